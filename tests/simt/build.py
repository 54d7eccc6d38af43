"""Builds the CUDA kernels for the CPU: g++, the real CUDA headers, and the emulator of this folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from setup.nvidia import cuda_home

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "plugins" / "cuda"
EMULATOR = REPOSITORY / "tests" / "simt"
CACHE = REPOSITORY / "build" / "simt"
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
)


class Variant(Enum):
    """What a build looks for beside wrong numbers: nothing; races (only the kernels call race.cpp's hooks); bad addresses."""

    FAST = ("-O2",)
    RACES = ("-O1", "-g", "-fsanitize=thread", "-DSIMT_RACES")
    MEMORY = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def missing() -> str | None:
    """Why the emulated library cannot be built here, or None."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    try:
        cuda_home()
    except FileNotFoundError as error:
        return str(error)
    return None


def build(variant: Variant = Variant.FAST, kernels: Path = KERNELS) -> Path:
    """The shared library of `kernels` over the emulator. Nothing is compiled twice for the same sources and flags."""
    emulator = [
        EMULATOR / name for name in ("machine.cpp", "matrix.cpp", *(["race.cpp"] if variant is Variant.RACES else []))
    ]
    units = [*sorted(kernels.glob("*.cu")), *emulator]
    headers = [*sorted(kernels.glob("*.h")), *sorted(kernels.glob("*.cuh")), *sorted(EMULATOR.glob("*.h"))]
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda unit: _compile(unit, variant, kernels, _digest([unit, *headers])), units))
    library = CACHE / f"libqwenrt_cuda_{variant.name.lower()}_{_digest(objects)}.so"
    if not library.exists():
        sanitizers = [flag for flag in variant.value if flag.startswith("-fsanitize") and variant is Variant.MEMORY]
        _make(library, ["g++", "-shared", *sanitizers, *map(str, objects)])
    return library


def _compile(unit: Path, variant: Variant, kernels: Path, digest: str) -> Path:
    target = CACHE / f"{unit.stem}_{variant.name.lower()}_{digest}.o"
    if not target.exists():
        instrumented = variant is not Variant.RACES or unit.suffix == ".cu"
        flags = [*FLAGS, *(flag for flag in variant.value if instrumented or not flag.startswith("-fsanitize"))]
        includes = [f"-I{kernels}", f"-I{EMULATOR}", f"-isystem{cuda_home() / 'include'}"]
        _make(target, ["g++", *flags, "-DQWENRT_SIMT", *includes, "-x", "c++", "-c", str(unit)])
    return target


def _make(target: Path, command: list[str]) -> None:
    """Runs the command with an output of its own, so that two processes may make one target at a time."""
    partial = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if done.returncode != 0 or "warning:" in done.stderr:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    partial.replace(target)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(repr([FLAGS, [variant.value for variant in Variant]]).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
