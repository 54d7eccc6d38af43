"""Commands that build plans, in processes of their own: killed ones, and ones on a machine that seems to have a GPU."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qwenrt.exporter import build_plans
from qwenrt.runtime import EngineDir
from tests.plugins.tensorrt.rtx import rtx_environment

from .folders import DEMO, files_of

# A child that exports or builds, with the plugin's place as the first argument.
CHILD = """
import sys
from pathlib import Path
from qwenrt.plugins import library
library.tensorrt_library = lambda: Path(sys.argv[1])
from qwenrt.tools.cli import run
sys.exit(run(sys.argv[2:]))
"""


def start(plugin: Path, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, plugin, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_build(process: subprocess.Popen[str]) -> int:
    """The process id of the build's own process."""
    deadline = time.monotonic() + 120
    while True:
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "tensorrt.worker"], capture_output=True, text=True
        )
        if children.stdout.strip():
            return int(children.stdout.split()[0])
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_ended(process_id: int) -> bool:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process_id}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_killed_leaves_the_folder_as_it_was(engine: Path, plugin: Path, signum: int) -> None:
    before = files_of(engine)
    process = start(plugin, "build", engine, "--compute-capability", "8.6")
    worker = wait_for_build(process)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert stderr == ("qwenrt: error: terminated\n" if signum == signal.SIGTERM else "")
    assert has_ended(worker)
    assert files_of(engine) == before
    if signum == signal.SIGTERM:
        assert not list(engine.parent.glob(".*"))
    build_plans(engine, compute_capabilities=["8.6"])
    assert not list(engine.parent.glob(".*"))


@pytest.mark.slow
def test_an_export_that_is_killed_while_it_builds_leaves_no_folder(plugin: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    process = start(plugin, "export", DEMO, out, "--target", "tensorrt-rtx")
    worker = wait_for_build(process)
    process.kill()
    process.communicate(timeout=60)
    assert has_ended(worker)
    assert not out.exists()


# A module `tensorrt` made of TensorRT for RTX: the same interface, without what TensorRT lacks, for a GPU of its own.
STAND_IN = """
import tensorrt_rtx
from tensorrt_rtx import *

__version__ = "10.14.1.48"
del ComputeCapability

class Builder(tensorrt_rtx.Builder):
    def create_builder_config(self):
        config = super().create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(tensorrt_rtx.ComputeCapability.SM89, 0)
        return config
"""
# A driver with one GPU of compute capability 8.9.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 7; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 9 : -1;
    return device == 7 ? 0 : 101;
}
"""


@pytest.fixture
def gpu_machine(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a machine that seems to have TensorRT and a GPU."""
    module = tmp_path / "modules" / "tensorrt"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(STAND_IN)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", libraries / "libcuda.so.1", libraries / "driver.c"], check=True)
    rtx = rtx_environment()["LD_LIBRARY_PATH"]
    return {
        "PYTHONPATH": os.pathsep.join([str(module.parent), *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), rtx]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def without_plan(engine: Path) -> Path:
    """The demo checkpoint's folder as an export for TensorRT leaves it where that is missing: the graph is the same."""
    manifest = EngineDir.open(engine).manifest
    for plan in manifest.plans:
        (engine / plan.file).unlink()
    files = {name: entry for name, entry in manifest.files.items() if (engine / name).exists()}
    bare = dataclasses.replace(manifest, target="tensorrt", plans=(), files=files)
    (engine / "engine.json").write_text(bare.to_json())
    return engine


def test_a_plan_is_built_from_a_folder_that_came_from_another_machine(
    plugin: Path, without_plan: Path, gpu_machine: dict[str, str], tmp_path: Path
) -> None:
    assert run_on(gpu_machine, plugin, "build", without_plan) == f"{without_plan}\n"
    folder = EngineDir.open(without_plan)
    folder.verify()
    (plan,) = folder.manifest.plans
    assert (plan.file, plan.compute_capability) == ("model.sm89-trt10.14.1.plan", "8.9")
    assert plan.tensorrt_version == "10.14.1.48"
    assert (tmp_path / "cache" / "qwenrt" / "timing" / plan.file).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"half"])
def test_a_damaged_timing_cache_is_made_anew(
    damage: bytes, plugin: Path, without_plan: Path, gpu_machine: dict[str, str], tmp_path: Path
) -> None:
    run_on(gpu_machine, plugin, "build", without_plan)
    (cache,) = (tmp_path / "cache" / "qwenrt" / "timing").iterdir()
    size = cache.stat().st_size
    cache.write_bytes(damage)
    run_on(gpu_machine, plugin, "build", without_plan)
    assert cache.stat().st_size == size


@pytest.mark.slow
def test_one_command_builds_for_the_gpu_of_the_machine(
    plugin: Path, tmp_path: Path, gpu_machine: dict[str, str]
) -> None:
    out = tmp_path / "engine"
    run_on(gpu_machine, plugin, "export", DEMO, out, "--target", "tensorrt", "--dtype", "float16")
    manifest = EngineDir.open(out).manifest
    assert (manifest.target, manifest.dtype) == ("tensorrt", "float16")
    assert [plan.file for plan in manifest.plans] == ["model.sm89-trt10.14.1.plan"]


def run_on(machine: dict[str, str], plugin: Path, *arguments: str | Path) -> str:
    """What a command that succeeds prints."""
    process = start(plugin, *arguments, **machine)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return stdout
