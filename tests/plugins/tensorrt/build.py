"""Builds the TensorRT plugin for a machine with neither TensorRT nor a GPU: g++, TensorRT's headers, the emulated kernels."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from setup.nvidia import cuda_home, tensorrt_include
from tests.simt import build as simt

HERE = Path(__file__).resolve().parent
REPOSITORY = simt.REPOSITORY
PLUGIN = REPOSITORY / "plugins" / "tensorrt"
FOLDER = REPOSITORY / "build" / "tensorrt"
SETUP = REPOSITORY / "tools" / "setup" / "tensorrt.sh"
SCHEMA = REPOSITORY / "plugins" / "qwenrt" / "plugins" / "schema.py"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@cache
def set_up(what: str) -> str | None:
    """Runs the set-up script, which does nothing where all is there; why it failed, or None."""
    done = subprocess.run(["bash", str(SETUP), what], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{SETUP.name} {what} failed: {done.stderr.strip()[-500:]}"


def missing() -> str | None:
    """Why the plugin cannot be built here, or None."""
    if reason := simt.missing():
        return reason
    return set_up("headers")


def build_plugin(variant: simt.Variant = simt.Variant.FAST) -> Path:
    """The plugin's library over the emulated kernels."""
    kernels = simt.build(variant)
    sources = [*sorted(PLUGIN.glob("*.cc")), HERE / "cuda_errors.cc"]
    links = [str(kernels), f"-Wl,-rpath,{kernels.parent}", "-Wl,--no-undefined"]
    return _library(f"plugin_{variant.name.lower()}", sources, [kernels], variant, links)


def build_host(variant: simt.Variant = simt.Variant.FAST) -> Path:
    """The library with which tests stand in for TensorRT."""
    return _library(f"host_{variant.name.lower()}", [HERE / "host.cc"], [], variant, ["-Wl,--no-undefined"])


def _library(
    name: str, sources: Sequence[Path], inputs: Sequence[Path], variant: simt.Variant, links: Sequence[str]
) -> Path:
    include = tensorrt_include()
    generated = FOLDER / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(SCHEMA), str(generated / "qwenrt_ops.h")], check=True)
    dependencies = [
        *sources,
        *inputs,
        *PLUGIN.glob("*.h"),
        *simt.KERNELS.glob("*.h"),
        generated / "qwenrt_ops.h",
        Path(__file__),
    ]
    digest = hashlib.sha256(str(include).encode() + (include / "NvInferVersion.h").read_bytes())
    for file in sorted(dependencies):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    target = FOLDER / f"lib{name}_{digest.hexdigest()[:16]}.so"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        sanitizers = SANITIZERS if variant is simt.Variant.MEMORY else ()
        flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *sanitizers]
        includes = [
            f"-I{simt.KERNELS}",
            f"-I{PLUGIN}",
            f"-I{generated}",
            f"-isystem{include}",
            f"-isystem{cuda_home() / 'include'}",
        ]
        command = ["g++", *flags, *includes, *map(str, sources), *links, "-ldl", "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or "warning:" in done.stderr:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
        partial.replace(target)
    return target
