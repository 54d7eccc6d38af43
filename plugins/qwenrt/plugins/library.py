"""Finds the compiled libraries.

An installed package has them beside its Python files; in a source tree `make cuda` and `cmake --build build/dev` leave them in
build/dev.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import ConfigError

_SOURCE_TREE = Path(__file__).resolve().parents[3]
_WITH_CUDA = "make cuda (for a wheel with it: pip wheel . -C cmake.define.QWENRT_CUDA=ON)"


def cpu_library() -> Path:
    """Path of the library with the CPU ops, for ONNX Runtime's custom ops and for ctypes; raises ConfigError if it is missing."""
    return _find("libqwenrt_cpu.so", "pip install . (in the source tree: make setup)")


def cuda_library() -> Path:
    """Path of the CUDA kernels' library, the C API of plugins/cuda/paged_attention.h; raises ConfigError if it is missing."""
    return _find("libqwenrt_cuda.so", f"{_WITH_CUDA}, which needs nvcc")


def tensorrt_library() -> Path:
    """Path of the TensorRT plugin, which registers itself when loaded; raises ConfigError if it is missing."""
    return _find("libqwenrt_tensorrt.so", f"{_WITH_CUDA}, which needs nvcc and TensorRT's headers")


def _find(name: str, how_to_build: str) -> Path:
    installed = resources.files("qwenrt.plugins") / name
    for candidate in (Path(str(installed)), _SOURCE_TREE / "build" / "dev" / name):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{name} is missing; build it with: {how_to_build}")
