"""Finds NVIDIA's compiler and TensorRT's headers, for CMake, for the tests and for gpu_check. Needs nothing but Python.

    nvidia.py cuda        prints the folder of the CUDA toolkit
    nvidia.py tensorrt    prints the folder with TensorRT's headers

Exits with 1 and one line on stderr where there is none.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

FETCHED_HEADERS = Path(__file__).resolve().parents[2] / "build" / "tensorrt" / "headers"


def cuda_home() -> Path:
    """The CUDA toolkit with nvcc: $CUDA_HOME if set, else that of nvcc on the PATH, /usr/local/cuda, or the nvidia-cuda-* wheels.

    Raises FileNotFoundError with one line that tells what to do.
    """
    if "CUDA_HOME" in os.environ:
        candidates = [Path(os.environ["CUDA_HOME"])]
        remedy = f"CUDA_HOME is {candidates[0]}; set it to the folder of a CUDA toolkit (12.6 to 13.x), or unset it"
    else:
        on_path = shutil.which("nvcc")
        candidates = [
            *([Path(on_path).resolve().parents[1]] if on_path else []),
            Path("/usr/local/cuda"),
            Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13"),
        ]
        remedy = (
            "pip install 'qwenrt[cuda]' (in the source tree: make setup), or install the CUDA toolkit (12.6 to 13.x) "
            "and set CUDA_HOME to its folder"
        )
    for home in candidates:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            return home
    raise FileNotFoundError(f"nvcc is missing: {remedy}")


def tensorrt_include() -> Path:
    """The folder with NvInferRuntime.h: of $TENSORRT_ROOT if set, else the system's, or what tensorrt.sh fetched.

    Raises FileNotFoundError with one line that tells what to do.
    """
    system = f"include/{platform.machine()}-linux-gnu"
    if root := os.environ.get("TENSORRT_ROOT"):
        candidates = [Path(root, "include"), Path(root, system), Path(root)]
        remedy = f"TENSORRT_ROOT is {root}; set it to an unpacked TensorRT (10.13 to 11.x), or unset it"
    else:
        roots = ("/usr", "/usr/local", "/usr/local/tensorrt", "/opt/tensorrt")
        candidates = [*(Path(root, include) for root in roots for include in (system, "include")), FETCHED_HEADERS]
        remedy = "set TENSORRT_ROOT to an unpacked TensorRT (10.13 to 11.x), or run tools/setup/tensorrt.sh headers"
    for include in candidates:
        if (include / "NvInferRuntime.h").exists():
            return include
    raise FileNotFoundError(f"TensorRT's header NvInferRuntime.h is missing: {remedy}")


def main() -> int:
    """The command line."""
    found = {"cuda": cuda_home, "tensorrt": tensorrt_include}
    if len(sys.argv) != 2 or sys.argv[1] not in found:
        print(f"usage: nvidia.py {'|'.join(found)}", file=sys.stderr)
        return 2
    try:
        print(found[sys.argv[1]]())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
