"""TensorRT for RTX in a process of its own, for tests that use it without the exporter."""

from __future__ import annotations

import os

from qwenrt.plugins import ConfigError
from qwenrt.plugins.tensorrt_module import check_installed, library_with_unversioned_name

from .build import FOLDER


def missing_rtx() -> str | None:
    """Why TensorRT for RTX cannot be used here, or None."""
    try:
        check_installed("tensorrt-rtx")
    except ConfigError as error:
        return str(error)
    return None


def rtx_environment() -> dict[str, str]:
    """Environment variables with which its ONNX parser finds its library."""
    shared = library_with_unversioned_name("tensorrt-rtx")
    assert shared is not None
    folder = FOLDER / "unversioned"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libtensorrt_rtx.so"
    if not link.is_symlink() or link.readlink() != shared:
        link.unlink(missing_ok=True)
        link.symlink_to(shared)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}
