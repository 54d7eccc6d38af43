"""The suite under AddressSanitizer and UndefinedBehaviorSanitizer: nothing outside a tensor or the shared memory is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.build import KERNELS, REPOSITORY, Variant, build, missing

SUITE = Path(__file__).with_name("test_paged_attention.py")

pytestmark = pytest.mark.slow


def sanitizer_runtime() -> str:
    """What a Python must begin with to load sanitized libraries: AddressSanitizer's library, and the C++ library too, or a thrown
    exception would not find what AddressSanitizer looked for at the start."""
    if reason := missing():
        pytest.skip(reason)
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    for path in found:
        if not Path(path).is_absolute():
            pytest.skip(f"{path} is not installed")
    return " ".join(found)


def run_suite(kernels: Path, *selection: str) -> subprocess.CompletedProcess[str]:
    """The suite in a Python of its own, which must begin with the sanitizer's library."""
    runtime = sanitizer_runtime()
    build(Variant.MEMORY, kernels)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "SIMT_VARIANT": Variant.MEMORY.name,
        "SIMT_KERNELS": str(kernels),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", str(SUITE), *selection]
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_suite_touches_no_other_memory() -> None:
    done = run_suite(KERNELS, "-k", "bfloat16 and (mixed or window) or many or any_number or padding")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("prefill.cu", "sizeof(Shared<T, C, kHeadDim>))", "sizeof(Shared<T, C, kHeadDim>) - 32)"),
        ("rope_cache.cu", "const bool mine = head < num_all;", "const bool mine = true;"),
    ],
    ids=["32 bytes too little", "heads past qkv"],
)
def test_mutant_is_found(file: str, old: str, new: str, tmp_path: Path) -> None:
    kernels = tmp_path / "cuda"
    shutil.copytree(KERNELS, kernels)
    source = (kernels / file).read_text()
    assert source.count(old) == 1, f"{file} has {source.count(old)} of {old!r}: update the mutant"
    (kernels / file).write_text(source.replace(old, new))
    done = run_suite(kernels, "-k", "mixed or heads")
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
