"""Where the compiled libraries are found, and what is said where they, nvcc or TensorRT's headers are not."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qwenrt.plugins import library
from qwenrt.plugins.errors import ConfigError
from setup.nvidia import cuda_home

ROOT = Path(__file__).resolve().parents[2]
NVIDIA = ROOT / "tools" / "setup" / "nvidia.py"


@pytest.mark.parametrize("find", [library.cuda_library, library.tensorrt_library])
def test_a_library_that_was_not_built_is_named_with_the_command_that_builds_it(
    find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library.resources, "files", lambda _package: tmp_path)
    monkeypatch.setattr(library, "_SOURCE_TREE", tmp_path)
    with pytest.raises(
        ConfigError, match=r"^libqwenrt_(cuda|tensorrt)\.so is missing; build it with: make cuda [^\n]*$"
    ):
        find()


@pytest.mark.parametrize("folder", [".", "build/dev"], ids=["installed", "source tree"])
def test_a_library_is_found(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library.resources, "files", lambda _package: tmp_path)
    monkeypatch.setattr(library, "_SOURCE_TREE", tmp_path)
    file = tmp_path / folder / "libqwenrt_cuda.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert library.cuda_library() == file


def find_nvidia(what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(NVIDIA), what],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "variable", "needed"),
    [("cuda", "CUDA_HOME", "bin/nvcc"), ("tensorrt", "TENSORRT_ROOT", "include/NvInferRuntime.h")],
)
def test_a_folder_that_the_user_names_is_taken_or_refused(
    what: str, variable: str, needed: str, tmp_path: Path
) -> None:
    refused = find_nvidia(what, **{variable: str(tmp_path)})
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1
    assert f"{variable} is {tmp_path}" in refused.stderr
    for file in (needed, "include/cuda_runtime.h"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    taken = find_nvidia(what, **{variable: str(tmp_path)})
    assert taken.returncode == 0, taken.stderr
    assert Path(taken.stdout.strip()) in (tmp_path, tmp_path / "include")


@pytest.mark.slow
@pytest.mark.parametrize("toolkit", ["wheels", "found"])
def test_both_libraries_build_and_load_without_a_gpu(toolkit: str, tmp_path: Path) -> None:
    """With nvcc from PyPI, and with the one that is found; for one architecture."""
    home = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13") if toolkit == "wheels" else cuda_home()
    if not (home / "bin" / "nvcc").exists():
        pytest.skip("nvcc's wheels are not installed: pip install 'qwenrt[cuda]'")
    fetched = subprocess.run(
        ["bash", str(ROOT / "tools/setup/tensorrt.sh"), "headers"], capture_output=True, text=True, check=False
    )
    if fetched.returncode != 0:
        pytest.skip(fetched.stderr)
    cmake = shutil.which("cmake", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    assert cmake is not None
    options = ["-DQWENRT_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options],
        [cmake, "--build", str(tmp_path), "-t", "cuda"],
    ):
        done = subprocess.run(
            command, env={**os.environ, "CUDA_HOME": str(home)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    for name in ("libqwenrt_cuda.so", "libqwenrt_tensorrt.so"):
        assert ctypes.CDLL(str(tmp_path / name)).qwenrt_paged_attention(None) == 1  # cudaErrorInvalidValue
    count = ctypes.c_int32()
    ctypes.CDLL(str(tmp_path / "libqwenrt_tensorrt.so")).getCreators(ctypes.byref(count))
    assert count.value == 2  # of PagedAttention and MixtureOfExperts
