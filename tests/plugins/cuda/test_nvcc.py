"""nvcc compiles the kernels for every architecture: no warning, no spill, and the instructions that the design counts on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from setup.nvidia import cuda_home
from tests.simt.build import KERNELS

ARCHITECTURES = [80, 86, 89, 90, 100, 120]
FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]
ATTENTION = {"decode": "decode_kernel", "prefill": "prefill_kernel"}
REGISTERS_PER_SM = 64 * 1024
THREADS = 128
BLOCKS_PER_SM = 2

pytestmark = pytest.mark.slow


def nvcc() -> str:
    try:
        return str(cuda_home() / "bin" / "nvcc")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def nvdisasm() -> str:
    """From the wheel nvidia-cuda-nvdisasm, where the CUDA toolkit has none."""
    folders = [cuda_home() / "bin", *Path(sysconfig.get_paths()["purelib"], "nvidia").glob("cu*/bin")]
    found = shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return found


def compile_cubin(unit: str, architecture: int, folder: Path) -> tuple[Path, str]:
    """The cubin and what ptxas says of it."""
    target = folder / f"{unit}.cubin"
    command = [nvcc(), *FLAGS, f"-arch=sm_{architecture}", "-cubin", str(KERNELS / f"{unit}.cu"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target, done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("unit", sorted(path.stem for path in KERNELS.glob("*.cu")))
def test_compiles_without_warning_or_spill(unit: str, architecture: int, tmp_path: Path) -> None:
    _, log = compile_cubin(unit, architecture, tmp_path)
    assert "warning" not in log
    assert set(re.findall(r"(\d+) bytes spill", log)) <= {"0"}, log
    if unit in ATTENTION:
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
        assert registers
        assert max(registers) <= 255
        assert BLOCKS_PER_SM * THREADS * max(registers) <= REGISTERS_PER_SM


@pytest.mark.parametrize("unit", ATTENTION)
def test_uses_tensor_cores_matrix_loads_and_asynchronous_copies(unit: str, tmp_path: Path) -> None:
    cubin, _ = compile_cubin(unit, 90, tmp_path)
    listing = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\.section\s+\.text\.", listing)[1:]
    kernels = [section for section in sections if ATTENTION[unit] in section.splitlines()[0]]
    assert len(kernels) >= 4  # two types, two head dimensions
    for kernel in kernels:
        for instruction in (
            "HMMA.16816.F32",
            "LDSM.16.M88.4",
            "LDSM.16.MT88.4",
            "LDGSTS.E.BYPASS.LTC128B.128",
            "MUFU.EX2",
        ):
            assert instruction in kernel, f"no {instruction} in {kernel.splitlines()[0]}"
