"""Engines that are split over ranks: the same tokens as one rank, and processes that come and go as they should."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.runtime import LLM, RequestOutput, SamplingParams
from qwenrt.runtime.backends.tensor_parallel import TensorParallelBackend
from qwenrt.runtime.model_runner import StepInputs
from tests.checkpoints import write_checkpoint

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo" / "checkpoint"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, *range(40, 90)], [250, 3, 3, 17]]


def step_of(prompt: list[int], block_size: int) -> StepInputs:
    """A prompt as one step that wants every row's logits."""
    count = len(prompt)
    rows = np.arange(count, dtype=np.int32)
    return StepInputs(
        input_ids=np.array(prompt, np.int32),
        positions=rows,
        block_tables=np.arange(-(-count // block_size), dtype=np.int32)[None],
        seq_lens=np.array([count], np.int32),
        query_start=np.array([0, count], np.int32),
        logits_indices=rows,
    )


def workers(llm: LLM) -> list[subprocess.Popen[bytes]]:
    """The processes of the other ranks."""
    assert isinstance(llm.engine.backend, TensorParallelBackend)
    return [worker.process for worker in llm.engine.backend._workers]


def tokens(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Greedy answers."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def alive(pid: int) -> bool:
    """Whether a process is there that has not ended, which one that is not waited for would be too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 60.0) -> None:
    """Give a process time to end, and fail if it does not."""
    end = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def split_engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint over two ranks."""
    return export(tiny_checkpoint, tmp_path_factory.mktemp("split") / "engine", tp=2).path


def test_the_demo_checkpoint_answers_over_two_ranks_as_on_one(demo_engine: Path, tmp_path: Path) -> None:
    split = LLM(export(DEMO, tmp_path / "engine", tp=2).path)
    prompts = ["27+58=?", "Reverse: abcdef", "Copy: hello world"]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    assert tokens(split, prompts, params) == tokens(LLM(demo_engine), prompts, params)
    assert len(workers(split)) == 1


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "one K/V head, shared": (2, {"num_key_value_heads": 1, "num_hidden_layers": 2}),
    "not tied, biases": (2, {"tie_word_embeddings": False, "attention_bias": True, "num_attention_heads": 8}),
    "experts": (
        2,
        {
            "family": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "head_dim": 64,
        },
    ),
    "four ranks, two K/V heads": (4, {"num_attention_heads": 8, "tie_word_embeddings": False}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES][1:]


@pytest.mark.parametrize("name", ["one K/V head, shared", *SLOW])
def test_random_shapes_give_the_tokens_and_logits_of_one_rank(name: str, tmp_path: Path) -> None:
    size, shape = SHAPES[name]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=11, **shape)
    whole = LLM(export(checkpoint, tmp_path / "whole").path, backend="torch", num_kv_blocks=32)
    split = LLM(export(checkpoint, tmp_path / "split", tp=size).path, num_kv_blocks=32)
    assert len(workers(split)) == size - 1
    assert tokens(split, PROMPTS) == tokens(whole, PROMPTS)
    step = step_of(PROMPTS[1], whole.engine.manifest.block_size)
    expected = np.array(whole.engine.backend.execute(step))
    np.testing.assert_allclose(split.engine.backend.execute(step), expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_a_rank_that_is_killed_ends_the_engine_with_an_error(split_engine: Path) -> None:
    llm = LLM(split_engine, num_kv_blocks=32)
    (worker,) = workers(llm)

    def kill(output: RequestOutput) -> None:
        worker.kill()

    message = (
        rf"rank 1 \(process {worker.pid}\) was ended by SIGKILL; what the device held is lost: load the engine again"
    )
    with pytest.raises(DeviceError, match=message):
        llm.generate(PROMPTS, GREEDY, on_output=kill)
    with pytest.raises(DeviceError, match="load the engine again"):
        llm.generate(PROMPTS, GREEDY)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal, for what a shell starts in the background ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_the_ranks_together_and_the_last_reference_ends_them(split_engine: Path) -> None:
    llm = LLM(split_engine, num_kv_blocks=32)
    (worker,) = workers(llm)
    expected = tokens(llm, PROMPTS)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, PROMPTS * 100)
    assert tokens(llm, PROMPTS) == expected
    del llm
    gc.collect()
    assert not alive(worker.pid)


def test_a_killed_engine_leaves_no_process(split_engine: Path) -> None:
    code = (
        "import sys; from qwenrt.runtime import LLM; llm = LLM(sys.argv[1], num_kv_blocks=32)\n"
        "print(*[w.process.pid for w in llm.engine.backend._workers], flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, split_engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_until_gone(pid)


def test_a_rank_that_does_not_start_is_an_error(split_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"cannot be loaded: rank 1 \(process \d+\) ended with status 1"):
        LLM(split_engine)


def test_other_backends_refuse_it_and_name_the_one_that_runs_it(split_engine: Path) -> None:
    with pytest.raises(
        ConfigError, match="is split over 2 ranks, which backend onnxruntime cannot run; use --backend torch"
    ):
        LLM(split_engine, backend="onnxruntime")
