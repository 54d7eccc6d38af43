"""The plugin's tests under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.cuda.test_memory import sanitizer_runtime
from tests.simt.build import Variant

from .build import REPOSITORY, missing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("suite", ["test_plugin.py", "test_experts_plugin.py"])
def test_plugin_touches_no_other_memory(suite: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    environment = {
        **os.environ,
        "LD_PRELOAD": sanitizer_runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "SIMT_VARIANT": Variant.MEMORY.name,
    }
    path = Path(__file__).with_name(suite)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
