"""The kernels over the emulator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simt.build import KERNELS, Variant, build, missing

from .binding import EmulatedCuda


@pytest.fixture(scope="module")
def cuda() -> EmulatedCuda:
    """Whichever build test_memory.py asks for in the environment, else the fast one."""
    if reason := missing():
        pytest.skip(reason)
    variant = Variant[os.environ.get("SIMT_VARIANT", "FAST")]
    return EmulatedCuda(build(variant, Path(os.environ.get("SIMT_KERNELS", KERNELS))))
