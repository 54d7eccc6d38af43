"""A tiny engine for TensorRT, and a machine that only seems to have TensorRT and a GPU."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qwenrt.exporter import export
from qwenrt.exporter.engine_writer import add_plan
from qwenrt.exporter.tensorrt.profiles import plan_profiles
from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import PLAN_VERSION
from qwenrt.runtime import LLM
from qwenrt.runtime.backends.tensorrt import backend, cuda
from qwenrt.runtime.engine_dir import EngineDir
from qwenrt.runtime.plan import Plan
from tests.checkpoints import write_checkpoint
from tests.plugins.tensorrt.binding import Host
from tests.plugins.tensorrt.build import build_host, build_plugin, missing

from .fake_device import FakeDevice
from .fake_tensorrt import FakeTensorRt

LIMITS: dict[str, Any] = {"max_num_seqs": 10, "max_num_batched_tokens": 24, "max_model_len": 96}
BLOCK_SIZE = 16


def fake_build(folder: Path, **changes: Any) -> Plan:
    """Put a plan into an engine folder that the fake TensorRT reads; `changes` are fields of Plan that differ."""
    engine = EngineDir.open(folder)
    plan = Plan(
        **{
            "file": "model.sm90-trt10.14.1.plan",
            "compute_capability": FakeDevice.compute_capability,
            "tensorrt_version": FakeTensorRt.__version__,
            "plan_version": PLAN_VERSION,
            "stripped": False,
            "activation_bytes": 0,
            "profiles": plan_profiles(engine.manifest),
            **changes,
        }
    )
    text = {"folder": str(folder), "network": engine.manifest.network_name(), **dataclasses.asdict(plan)}
    built = folder.parent / f"{folder.name}.plan"
    built.write_text(json.dumps(text))
    add_plan(engine, plan, built)
    return plan


@dataclasses.dataclass
class Machine:
    """What the fakes stand for."""

    device: FakeDevice
    trt: FakeTensorRt


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the CUDA kernels take."""
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("tensorrt") / "checkpoint", seed=3, **sizes)


@pytest.fixture(scope="session")
def cpu(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same checkpoint on ONNX Runtime in float32: whose tokens are right."""
    folder = tmp_path_factory.mktemp("tensorrt") / "cpu"
    export(checkpoint, folder, block_size=BLOCK_SIZE, max_model_len=LIMITS["max_model_len"])
    return LLM(folder, threads=1, num_kv_blocks=64, enable_prefix_caching=False)


@pytest.fixture(scope="session")
def unbuilt(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine folder without a plan, as an export leaves it where TensorRT is missing."""
    folder = tmp_path_factory.mktemp("tensorrt") / "engine"
    with pytest.raises(ConfigError, match="has all but its plan"):
        export(checkpoint, folder, target="tensorrt", dtype="float16", block_size=BLOCK_SIZE, **LIMITS)
    return folder


@pytest.fixture(scope="session")
def engine_dir(unbuilt: Path) -> Path:
    """The engine folder with a plan for the fake machine."""
    folder = Path(shutil.copytree(unbuilt, unbuilt.parent / "with-plan"))
    fake_build(folder)
    return folder


@pytest.fixture
def folder(unbuilt: Path, tmp_path: Path) -> Path:
    """A folder without a plan for a test to change."""
    return Path(shutil.copytree(unbuilt, tmp_path / "engine"))


@pytest.fixture(scope="session")
def host() -> Host:
    """The PagedAttention plugin over the emulated kernels."""
    if reason := missing():
        pytest.skip(reason)
    return Host(build_host(), build_plugin())


@pytest.fixture
def machine(host: Host, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the fakes."""
    # What the fake engine computes is small, and other processes have work too.
    torch.set_num_threads(1)
    device = FakeDevice()
    trt = FakeTensorRt(device, host)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: device)
    monkeypatch.setattr(backend, "tensorrt_library", build_plugin)
    return Machine(device, trt)
