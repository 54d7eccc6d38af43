"""The part that builds the kernels for the GPU of this machine, with nvcc alone.

python -m gpu_check.build LIBRARY
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setup.nvidia import cuda_home

from .parts import emit
from .runtime import CudaRuntime

KERNELS = Path(__file__).resolve().parents[2] / "plugins" / "cuda"
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden")


def build(target: Path, architecture: str) -> None:
    """Compiles each file of the kernels in an nvcc of its own and links `target`. Raises CalledProcessError."""
    nvcc = str(cuda_home() / "bin" / "nvcc")

    def compile_unit(unit: Path) -> str:
        unit_object = str(target.with_name(f"{unit.stem}.o"))
        _run(nvcc, *FLAGS, f"-arch={architecture}", "-c", str(unit), "-o", unit_object)
        return unit_object

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_unit, sorted(KERNELS.glob("*.cu"))))
    # The toolkit's wheels have their libraries in lib, where nvcc does not look.
    _run(nvcc, "-shared", f"-arch={architecture}", f"-L{cuda_home() / 'lib'}", *objects, "-o", str(target))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> int:
    """The command line."""
    target = Path(sys.argv[1])
    major, minor = CudaRuntime(cuda_home()).compute_capability()
    started = time.monotonic()
    build(target, f"sm_{major}{minor}")
    emit(
        {"library": str(target), "architecture": f"sm_{major}{minor}", "seconds": round(time.monotonic() - started, 1)}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
