"""TensorRT's Python module and TensorRT for RTX's: the same interface, but for what stands here."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .errors import ConfigError

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""Per target of an engine folder, the module that builds and reads its plans."""
_PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt-rtx-cu13"}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CUdevice_attribute."""
TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
RTX_COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
"""What TensorRT for RTX builds for, on any machine, and PagedAttention has kernels for."""


def check_installed(target: str) -> None:
    """Raise ConfigError where the module for the plans of an engine folder is not installed; does not load it."""
    try:
        spec = importlib.util.find_spec(_MODULES[target])
    except ImportError:
        spec = None
    # A folder of that name on the path is no package.
    if spec is None or spec.origin is None:
        raise ConfigError(f"{TITLES[target]} is missing (pip install {_PACKAGES[target]})")


def import_tensorrt(target: str) -> Any:
    """The module for the plans of an engine folder; raises ConfigError where it is not installed or does not load."""
    check_installed(target)
    try:
        return importlib.import_module(_MODULES[target])
    except (ImportError, OSError) as error:
        raise ConfigError(f"{TITLES[target]} is installed but does not load: {error}") from None


def gpu_compute_capability() -> str:
    """Of the first GPU that this process may use, from the driver; raises ConfigError where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError("this machine has no NVIDIA GPU, or no driver for it (libcuda.so.1)") from None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    status = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    )
    if status:
        raise ConfigError(f"this machine has no GPU that can be used (CUDA error {status})")
    return f"{major.value}.{minor.value}"


def plan_file(target: str, compute_capability: str, version: str, graph: str = "model.onnx") -> str:
    """The file name of a plan: of its graph, GPU architecture and release, such as model.sm90-trt10.14.1.plan."""
    release = ".".join(version.split(".")[:3])
    library = {"tensorrt": "trt", "tensorrt-rtx": "rtx"}[target]
    return f"{graph.removesuffix('.onnx')}.sm{compute_capability.replace('.', '')}-{library}{release}.plan"


def library_with_unversioned_name(target: str) -> Path | None:
    """The library for which a link lib*.so must be on the loader's path; None where there is none.

    The ONNX parser of TensorRT for RTX loads libtensorrt_rtx.so for a plugin node, and ends the process where that is not found;
    the wheel has libtensorrt_rtx.so.1 only.
    """
    if target != "tensorrt-rtx":
        return None
    package = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = (package.submodule_search_locations if package else None) or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("libtensorrt_rtx.so.*"))), None)


def set_compute_capability(trt: Any, config: Any, compute_capability: str) -> None:
    """Have TensorRT for RTX build for a GPU that need not be here; TensorRT always builds for the one that is."""
    if not hasattr(trt, "ComputeCapability"):
        return
    name = f"SM{compute_capability.replace('.', '')}"
    if not hasattr(trt.ComputeCapability, name):
        raise ConfigError(
            f"this TensorRT for RTX ({trt.__version__}) does not build for compute capability {compute_capability}"
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
