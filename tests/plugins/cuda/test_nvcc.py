"""nvcc compiles the kernels for every architecture: no warning, no spill, and the instructions that the design counts on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from setup.nvidia import cuda_home
from tests.simt.build import KERNELS

from .readme import ARCHITECTURES, Kernel, kernels

FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]
PRODUCTS = {"decode": "decode_kernel", "prefill": "prefill_kernel", "experts": "experts_kernel"}
"""The kernels that live by tensor cores."""
REGISTERS_PER_SM = 64 * 1024
THREADS = 128
BLOCKS_PER_SM = 2

README_VERSION = "release 13.0"
UNITS = {
    **{name: name for name in ("rope_cache", "decode", "prefill", "experts")},
    "experts_few": "experts",
    "combine": "decode",
    **dict.fromkeys(("choose", "sort", "gather"), "routing"),
}
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""Of a multiprocessor; each block takes 1 KiB more than it asks for."""
MAX_THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
REGISTER_UNIT = 8
"""Registers of a thread are given out in such pieces."""

Compile = Callable[[str, int], tuple[Path, str]]


def nvcc() -> str:
    try:
        return str(cuda_home() / "bin" / "nvcc")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def nvdisasm() -> str:
    """From the wheel nvidia-cuda-nvdisasm, where the CUDA toolkit has none."""
    wheels = (folder for path in sys.path for folder in Path(path, "nvidia").glob("cu*/bin"))
    folders = [cuda_home() / "bin", *wheels]
    found = shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles a unit for an architecture, once: the cubin and what ptxas says of it."""
    folder = tmp_path_factory.mktemp("nvcc")

    @cache
    def compile_cubin(unit: str, architecture: int) -> tuple[Path, str]:
        target = folder / f"{unit}.sm_{architecture}.cubin"
        command = [nvcc(), *FLAGS, f"-arch=sm_{architecture}", "-cubin", str(KERNELS / f"{unit}.cu"), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return target, done.stderr

    return compile_cubin


@pytest.mark.parametrize(
    "architecture", [sm if sm == 90 else pytest.param(sm, marks=pytest.mark.slow) for sm in ARCHITECTURES]
)
@pytest.mark.parametrize("unit", sorted(path.stem for path in KERNELS.glob("*.cu")))
def test_compiles_without_warning_or_spill(unit: str, architecture: int, compiled: Compile) -> None:
    _, log = compiled(unit, architecture)
    assert "warning" not in log
    assert set(re.findall(r"(\d+) bytes spill", log)) <= {"0"}, log
    if unit in PRODUCTS:
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
        assert registers
        assert max(registers) <= 255
        assert BLOCKS_PER_SM * THREADS * max(registers) <= REGISTERS_PER_SM


@pytest.mark.parametrize("unit", PRODUCTS)
def test_uses_tensor_cores_matrix_loads_and_asynchronous_copies(unit: str, compiled: Compile) -> None:
    cubin, _ = compiled(unit, 90)
    listing = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"\.section\s+\.text\.", listing)[1:]
    kernels = [section for section in sections if PRODUCTS[unit] in section.splitlines()[0]]
    assert len(kernels) >= 4  # two types, two head dimensions or products
    softmax = [] if unit == "experts" else ["LDSM.16.MT88.4", "MUFU.EX2"]
    for kernel in kernels:
        for instruction in (
            "HMMA.16816.F32",
            "LDSM.16.M88.4",
            "LDGSTS.E.BYPASS.LTC128B.128",
            *softmax,
        ):
            assert instruction in kernel, f"no {instruction} in {kernel.splitlines()[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", kernels(), ids=str)
def test_takes_of_a_multiprocessor_what_the_readme_says(kernel: Kernel, compiled: Compile) -> None:
    version = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    if README_VERSION not in version:
        pytest.skip(f"the README's figures are of nvcc's {README_VERSION}")
    registers = tuple(most_registers(compiled(UNITS[kernel.name], sm)[1], kernel) for sm in ARCHITECTURES)
    assert kernel.registers == registers
    assert kernel.blocks == tuple(map(partial(blocks_per_sm, kernel), registers, ARCHITECTURES))


def most_registers(log: str, kernel: Kernel) -> int:
    """Of a thread, over the instances of the kernel that the README's row is about."""
    # What a C++ compiler makes of the template arguments <T, C, D>: an e4m3 cache is the only one with that name in it.
    found = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    narrow = kernel.pool == "float8_e4m3fn"
    counts = [
        int(count)
        for name, count in found
        if f"{kernel.name}_kernel" in name
        and (kernel.pool == "any" or (("e4m3" in name) == narrow and f"Li{kernel.head_dim}E" in name))
    ]
    assert counts, f"ptxas says nothing of {kernel}"
    return max(counts)


def blocks_per_sm(kernel: Kernel, registers: int, architecture: int) -> int:
    """How many blocks are there at once: as many as registers, shared memory and threads allow."""
    taken = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * kernel.threads
    limits = [REGISTERS_PER_SM // taken, MAX_THREADS[architecture] // kernel.threads]
    if kernel.shared:
        limits.append(SHARED_KIB[architecture] * 1024 // (kernel.shared + 1024))
    return min(limits)
