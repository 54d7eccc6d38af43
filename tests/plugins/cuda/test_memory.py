"""The suite under AddressSanitizer and UndefinedBehaviorSanitizer: nothing outside a tensor or the shared memory is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.build import KERNELS, REPOSITORY, Variant, build, missing

ATTENTION, EXPERTS = (Path(__file__).with_name(f"test_{op}.py") for op in ("paged_attention", "experts"))

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


def run_suite(suite: Path, kernels: Path, *selection: str) -> subprocess.CompletedProcess[str]:
    """A suite in a Python of its own, which must begin with the sanitizer's library."""
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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", str(suite), *selection]
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("suite", "selection"),
    [(ATTENTION, "bfloat16 and (mixed or window) or many or any_number or padding"), (EXPERTS, "test_suite or spoil")],
    ids=["attention", "experts"],
)
def test_suite_touches_no_other_memory(suite: Path, selection: str) -> None:
    done = run_suite(suite, KERNELS, "-k", selection)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("suite", "selection", "file", "old", "new"),
    [
        (
            ATTENTION,
            "mixed or heads",
            "prefill.cu",
            "sizeof(Shared<T, C, kHeadDim>))",
            "sizeof(Shared<T, C, kHeadDim>) - 32)",
        ),
        (ATTENTION, "mixed or heads", "rope_cache.cu", "const bool mine = head < num_all;", "const bool mine = true;"),
        (EXPERTS, "test_suite", "experts.cu", " && first_column + column + first < width", ""),
    ],
    ids=["32 bytes too little", "heads past qkv", "rows past a matrix"],
)
def test_mutant_is_found(suite: Path, selection: str, file: str, old: str, new: str, tmp_path: Path) -> None:
    kernels = tmp_path / "cuda"
    shutil.copytree(KERNELS, kernels)
    source = (kernels / file).read_text()
    assert source.count(old) == 1, f"{file} has {source.count(old)} of {old!r}: update the mutant"
    (kernels / file).write_text(source.replace(old, new))
    done = run_suite(suite, kernels, "-k", selection)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
