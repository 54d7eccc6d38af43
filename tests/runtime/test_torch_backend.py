"""Backend torch beyond what the engine's tests ask of every backend: devices, types, and CUDA where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.runtime import LLM, SamplingParams
from qwenrt.runtime.backends import torch as torch_backend
from qwenrt.runtime.backends.torch import TorchBackend
from qwenrt.runtime.engine_dir import EngineDir, Limits
from qwenrt.runtime.kv_budget import KvBudget

HAS_GPU = torch.cuda.is_available()
DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo" / "checkpoint"
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=9, max_model_len=64)


def load(folder: Path) -> TorchBackend:
    budget = KvBudget(num_kv_blocks=6)
    return TorchBackend(EngineDir.open(folder), device="cpu", limits=LIMITS, budget=budget, threads=1)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none(tiny_engine: Path, device: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(tiny_engine, backend="torch", device=device)
    (line,) = str(raised.value).splitlines()
    number = device.partition(":")[2] or 0
    assert line.startswith(f"device is cuda:{number}, and there is no GPU for PyTorch {torch.__version__}")
    assert line.endswith("give device cpu")


def test_a_gpu_that_is_not_there_among_others(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device is cuda:2, this machine has 2: cuda:0 to cuda:1"):
        LLM(tiny_engine, backend="torch", device="cuda:2")


def test_an_engine_in_float32_on_cuda(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"is an engine in float32, the CUDA kernels compute in float16 or bfloat16; export"
    ):
        LLM(tiny_engine, backend="torch", device="cuda")


def test_a_step_of_padding_alone_writes_nothing(tiny_engine: Path) -> None:
    backend = load(tiny_engine)
    blocks = np.arange(6)
    backend.write_kv_blocks(1, blocks, np.full_like(backend.read_kv_blocks(1, blocks), 0.5))
    assert backend.execute(torch_backend._padding_step(LIMITS)).shape == (4, 320)
    assert not backend.read_kv_blocks(0, blocks).any()
    assert (backend.read_kv_blocks(1, blocks) == 0.5).all()


def test_a_failure_of_a_gpu_is_a_device_error_and_one_of_the_cpu_is_not(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load(tiny_engine)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backend._program, "run", fail)
    step = torch_backend._padding_step(LIMITS)
    with pytest.raises(RuntimeError):
        backend.execute(step)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    backend._device = torch.device("cuda:0")
    with pytest.raises(DeviceError, match="PyTorch on cuda:0: CUDA error: an illegal memory access"):
        backend.execute(step)


@pytest.fixture(scope="module")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint in bfloat16, without a plan."""
    folder = tmp_path_factory.mktemp("demo") / "engine"
    with pytest.raises(ConfigError, match="no plan"):
        export(DEMO, folder, target="tensorrt")
    return folder


@pytest.mark.skipif(not HAS_GPU, reason="no GPU for PyTorch here")
def test_the_demo_checkpoint_answers_on_a_gpu_as_on_the_cpu(demo_engine: Path, tmp_path: Path) -> None:
    cpu_engine = tmp_path / "cpu"
    export(DEMO, cpu_engine)
    questions = [f"{a}+{b}=?" for a, b in ((27, 58), (9, 1), (83, 17), (0, 99))]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    answers = [
        [output.outputs[0].token_ids for output in llm.chat(messages, params, enable_thinking=True)]
        for llm in (LLM(demo_engine, backend="torch", device="cuda"), LLM(cpu_engine))
    ]
    assert answers[0] == answers[1]
