"""The plugin in a process with a stand-in for TensorRT."""

from __future__ import annotations

import os

import pytest

from tests.simt.build import Variant

from .binding import Host
from .build import build_host, build_plugin, missing


@pytest.fixture(scope="session")
def host() -> Host:
    if reason := missing():
        pytest.skip(reason)
    variant = Variant[os.environ.get("SIMT_VARIANT", "FAST")]  # test_memory.py sets this
    return Host(build_host(variant), build_plugin(variant))
