"""Backend torch runs the graph of a folder for TensorRT over the CUDA kernels, here over the emulator instead of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, torch_cuda, torch_op
from qwenrt.runtime import LLM
from qwenrt.runtime.backends import torch as torch_backend
from qwenrt.runtime.backends.rank_worker import RankSetup
from qwenrt.runtime.backends.torch import TorchBackend
from qwenrt.runtime.engine_dir import EngineDir
from qwenrt.runtime.kv_budget import KvBudget
from qwenrt.runtime.model_runner import StepInputs
from tests.plugins.cuda.binding import EmulatedCuda
from tests.simt.build import build, missing

from .conftest import BLOCK_SIZE, LIMITS
from .test_tokens import check, ids, tokens


@pytest.fixture
def _over_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the CUDA kernels."""
    if reason := missing():
        pytest.skip(reason)
    kernels, one_at_a_time = EmulatedCuda(build()), threading.Lock()

    def launch(inputs: Mapping[str, Tensor], values: Mapping[str, float]) -> Tensor:
        with one_at_a_time:
            return torch_cuda.launch(kernels, inputs, values, 0)

    monkeypatch.setattr(torch_backend, "check_device", lambda device, engine: None)
    monkeypatch.setattr(torch_op, "_check_types", lambda inputs: None)
    monkeypatch.setattr(torch_op, "_on_cpu", launch)


@pytest.mark.usefixtures("_over_the_emulator")
def test_tokens_over_the_emulated_kernels(unbuilt: Path, cpu: LLM) -> None:
    llm = LLM(unbuilt, backend="torch", device="cpu", num_kv_blocks=16, max_num_seqs=3, threads=1)
    prompts = [ids(length, length) for length in (1, 17, 40, 60)]
    check(tokens(llm, prompts), cpu, prompts)


@pytest.mark.usefixtures("_over_the_emulator")
def test_two_ranks_over_the_emulated_kernels(checkpoint: Path, unbuilt: Path, tmp_path: Path) -> None:
    """The graphs that two GPUs run over NCCL, in two threads over gloo: one K/V head that both have, TensorRT's collectives."""
    split = tmp_path / "split"
    with pytest.raises(ConfigError, match="has all but its plan"):
        export(checkpoint, split, target="tensorrt", dtype="float16", block_size=BLOCK_SIZE, tp=2, **LIMITS)
    limits, budget = EngineDir.open(split).manifest.limits, KvBudget(num_kv_blocks=4)
    setups = [RankSetup(str(split), str(tmp_path), rank, "cpu", limits, budget, threads=1) for rank in range(2)]
    rows = np.arange(20, dtype=np.int32)
    step = StepInputs(
        input_ids=np.array(ids(20, 1), np.int32),
        positions=rows,
        block_tables=np.array([[2, 1]], np.int32),
        seq_lens=np.array([20], np.int32),
        query_start=np.array([0, 20], np.int32),
        logits_indices=rows,
    )
    one = TorchBackend(EngineDir.open(unbuilt), device="cpu", limits=limits, budget=budget, threads=1)
    expected = one.execute(step)
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(RankSetup.load, setups))
        first, second = threads.map(lambda rank: rank.execute(step), ranks)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected, atol=5e-3 * np.abs(expected).max(), rtol=0)
