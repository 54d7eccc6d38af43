"""What a step costs at least, against sums over all tokens and pairs one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from qwenrt.runtime import LLM, EngineDir, SamplingParams
from qwenrt.runtime.model_runner import StepInputs
from qwenrt.tools.bench import machine
from qwenrt.tools.bench.roofline import CostModel, Machine, Recorder, Step


def inputs(counts: list[int], lengths: list[int], rows: int) -> StepInputs:
    tokens = sum(counts)
    return StepInputs(
        input_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        block_tables=np.zeros((len(counts), 4), np.int32),
        seq_lens=np.array(lengths, np.int32),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        logits_indices=np.zeros(rows, np.int32),
    )


def test_a_step_reads_weights_and_contexts_once_and_multiplies_each_weight_a_token(tiny_engine: Path) -> None:
    folder = EngineDir.open(tiny_engine)
    model = folder.manifest.model
    step = CostModel(folder).step(inputs([1, 5, 3], [40, 5, 9], 3))
    assert (step.sequences, step.tokens) == (3, 9)
    kv = model.num_layers * 2 * model.num_kv_heads * model.head_dim * 4
    assert step.bytes == folder.manifest.files["model.safetensors"].size + kv * (40 + 5 + 9)
    layer = (
        model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        + model.num_heads * model.head_dim * model.hidden_size
        + 3 * model.hidden_size * model.intermediate_size
    )
    head = model.vocab_size * model.hidden_size
    # The norms' weights are counted too, which is the little that is left.
    assert step.linear_ops == pytest.approx(2 * (9 * model.num_layers * layer + 3 * head), rel=0.02)
    seen = [40, *range(1, 6), *range(7, 10)]
    heads = model.num_layers * model.num_heads * model.head_dim
    assert step.attention_ops == sum(4 * heads * pair for pair in seen)


def test_a_step_takes_the_longer_of_its_bytes_and_its_products() -> None:
    step = Step(sequences=1, tokens=1, bytes=100, linear_ops=60, attention_ops=20)
    rates = Machine(read=10.0, float32=2.0, int8=6.0)
    assert step.least_seconds(rates, integer=False) == (10.0, 40.0)
    assert step.least_seconds(rates, integer=True) == (10.0, 20.0)


def test_the_recorder_sees_what_the_engine_computes_and_changes_nothing(tiny_engine: Path) -> None:
    llm = LLM(tiny_engine, num_kv_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], params)
    recorder = Recorder(llm.engine.backend, CostModel(EngineDir.open(tiny_engine)))
    llm.engine.backend = recorder
    (answer,) = llm.generate([[5, 6, 7]], params)
    assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
    assert dataclasses.asdict(recorder.last) | {"bytes": 0, "linear_ops": 0, "attention_ops": 0} == {
        "sequences": 1, "tokens": 1, "bytes": 0, "linear_ops": 0, "attention_ops": 0,
    }  # fmt: skip
    assert recorder.num_kv_blocks == 64


def test_what_the_machine_can_do_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BANDWIDTH_BYTES", 1 << 27)
    rates = machine.measure(1, 2)
    assert {name: len(runs) for name, runs in rates.items()} == {"read_gb_s": 2, "float32_gflop_s": 2, "int8_gop_s": 2}
    assert all(0.1 < rate < 5000 for rate in rates["read_gb_s"])
    assert all(0.1 < rate < 100_000 for name in ("float32_gflop_s", "int8_gop_s") for rate in rates[name])
