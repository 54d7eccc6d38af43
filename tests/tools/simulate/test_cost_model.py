"""The cost model: what it says of a machine, and found again from steps that follow it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from qwenrt.runtime import ConfigError, EngineDir
from qwenrt.tools.simulate.cost_model import CostModel, Work, weight_bytes_of
from qwenrt.tools.simulate.fit import Measured, fit, steps_of_bench

TRUE = CostModel(fixed=3e-4, weights=1e-3, knee=16.0, per_token=0.0, per_sample=4e-5, per_context=2e-7, per_pair=1e-8)


def works() -> list[Work]:
    rng = random.Random(5)
    found = []
    for _ in range(300):
        sequences, decodes = rng.choice([1, 2, 4, 16, 64]), rng.random() < 0.5
        count, start = (1, rng.randint(1, 2000)) if decodes else (rng.randint(2, 500), rng.randint(0, 500))
        pairs = count * (2 * start + count + 1) // 2
        found.append(Work(sequences * count, sequences, sequences * (start + count), sequences * pairs))
    return found


def test_steps_that_follow_a_cost_model_give_it_back() -> None:
    rng = random.Random(1)
    steps = [Measured(work, TRUE.seconds(work) * rng.uniform(0.95, 1.05)) for work in works()]
    found = fit(steps)
    for work in works():
        assert found.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.06)


def test_a_step_that_somebody_else_held_up_does_not_count() -> None:
    steps = [
        Measured(work, TRUE.seconds(work) * (30 if number % 40 == 0 else 1)) for number, work in enumerate(works())
    ]
    found = fit(steps)
    for work in works():
        assert found.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.05)


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 steps of too few sizes"):
        fit([Measured(Work(1, 1, 5, 5), 0.1), Measured(Work(2, 2, 9, 9), 0.1)])


def test_hardware_figures_are_the_roofline_of_the_engine(tiny_engine: Path) -> None:
    manifest = EngineDir.open(tiny_engine).manifest
    model, weights = manifest.model, weight_bytes_of(manifest)
    cost = CostModel.of_hardware(manifest, weights, bandwidth=1e9, flops=1e12, overhead=1e-3)
    one = cost.seconds(Work(1, 1, 10, 10))
    assert one == pytest.approx(1e-3 + weights / 1e9 + 10 * manifest.kv_bytes_per_token / 1e9, rel=0.01)
    many = Work(10**6, 0, 0, 0)
    untied = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    used = model.num_active_parameters - untied - model.vocab_size * model.hidden_size
    assert cost.seconds(many) == pytest.approx(1e-3 + 2e6 * used / 1e12)


def test_a_file_gives_the_cost_model_back_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(TRUE.to_json())
    assert CostModel.from_file(path) == TRUE
    path.write_text('{"fixed": 1}')
    with pytest.raises(ConfigError, match="is no cost model"):
        CostModel.from_file(path)
    with pytest.raises(ConfigError, match="per_pair of the cost model is -1"):
        dataclasses.replace(TRUE, per_pair=-1)
    with pytest.raises(ConfigError, match="steps that take no time"):
        dataclasses.replace(TRUE, fixed=0, weights=0)


def test_the_json_of_bench_gives_the_steps_that_it_measured(tmp_path: Path) -> None:
    def median(value: float) -> dict[str, float]:
        return {"median": value}

    def entry(sequences: int, prompt: int, new: int, **times: dict[str, float]) -> dict[str, object]:
        return {"sequences": sequences, "shared_tokens": 0, "prompt_tokens": prompt, "new_tokens": new} | times

    path = tmp_path / "bench.json"
    works = [Work(512, 1, 512, 512 * 513 // 2), Work(16, 1, 16, 136), Work(1, 1, 80, 80), Work(16, 16, 2560, 2560)]
    seconds = [TRUE.seconds(work) for work in works]
    workloads = [
        entry(1, 512, 1, ttft_s=median(seconds[0])),
        entry(1, 16, 128, ttft_s=median(seconds[1]), step_ms=median(1000 * seconds[2])),
        entry(16, 128, 64, ttft_s=median(0.9), step_ms=median(1000 * seconds[3])),
        {"workload": "mix", "rate": 1.0},
    ]
    path.write_text(json.dumps({"workloads": workloads}))
    steps = steps_of_bench(path)
    assert [step.work for step in steps] == works
    assert [step.seconds for step in steps] == pytest.approx(seconds)
    cost = fit(steps)
    for step in steps:
        assert cost.seconds(step.work) == pytest.approx(step.seconds, rel=0.1)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no result of qwenrt bench ENGINE"):
        steps_of_bench(path)
