"""Finds the compiled libraries."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import ConfigError

_SOURCE_TREE = Path(__file__).resolve().parents[3]


def cpu_library() -> Path:
    """Path of the library with the CPU ops, for ONNX Runtime's custom ops and for ctypes; raises ConfigError if it is missing.

    An installed package has it beside its Python files; in a source tree `cmake --build build/dev` leaves it there.
    """
    name = "libqwenrt_cpu.so"
    installed = resources.files("qwenrt.plugins") / name
    for candidate in (Path(str(installed)), _SOURCE_TREE / "build" / "dev" / name):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{name} is missing; build it with: pip install . (in the source tree: make setup)")
