"""What a measurement does with an engine, on the demo checkpoint and on a tiny one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qwenrt.tools.bench.steps import PARTS
from qwenrt.tools.bench.worker import Bench
from qwenrt.tools.bench.workloads import WORKLOADS
from qwenrt.tools.load.load import Load, LogNormal, Range


@pytest.fixture(scope="module")
def bench(demo_engine: Path) -> Bench:
    return Bench(str(demo_engine), {"kv_memory": 64 << 20}, 2)


def test_prompts_hold_no_special_token(tiny_engine: Path) -> None:
    bench = Bench(str(tiny_engine), {}, 1)
    (prompt,) = replace(WORKLOADS["prefill"], prompt_tokens=5000).prompts(bench.ordinary, 0)
    assert not set(prompt) & set(bench.engine.tokenizer.special_token_ids)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_measured_and_finds_no_prefix_of_another_run(bench: Bench, name: str) -> None:
    # An eighth of the work: the same shape, and soon done.
    whole = WORKLOADS[name]
    given = replace(
        whole,
        shared_tokens=whole.shared_tokens // 8,
        prompt_tokens=max(8, whole.prompt_tokens // 8),
        new_tokens=max(1, whole.new_tokens // 8),
    )
    found = bench.workload(given)
    assert len(found["tokens_per_s"]) == len(found["other_cpus"]) == 2
    for number in range(2):
        traces = found["traces"][number]
        assert len(traces) == given.sequences
        assert all(len(trace["arrivals"]) == trace["completion_tokens"] == given.new_tokens for trace in traces)
        assert all(trace["prompt_tokens"] == given.shared_tokens + given.prompt_tokens for trace in traces)
        seconds = found["wall_s"][number] if whole.rate == "output" else None
        if seconds:
            assert found["tokens_per_s"][number] == pytest.approx(given.sequences * given.new_tokens / seconds)
        steps = found["steps"][number]
        computed = sum(step["tokens"] for step in steps)
        asked = given.sequences * (given.length - 1)
        if given.shared_tokens:
            # The first computes what all share, the others find most of it.
            assert 0.5 < found["cached_share"][number] < 1
            assert computed < asked
        else:
            assert found["cached_share"][number] == 0
            assert computed == asked
        parts = found["decode_steps"][number]
        assert parts["steps"] == sum(step["decodes"] for step in steps)
        assert 0 < sum(parts[part] for part in PARTS) <= parts["wall"] or given.new_tokens == 1


def test_a_mix_sends_requests_when_they_are_due_and_no_two_runs_are_alike(bench: Bench) -> None:
    sizes = LogNormal(6, 1.0, 40)
    load = Load(requests=12, words=sizes, new_tokens=sizes, shared_words=0, rate=200.0, seed=3)
    found = bench.mix(load, 4096)
    first, second = found["traces"]
    assert len(first) == len(second) == 12
    assert [trace["completion_tokens"] for trace in first] != [trace["completion_tokens"] for trace in second]
    for traces in (first, second):
        assert all(trace["error"] is None and trace["arrivals"][0] > trace["started"] for trace in traces)
        assert len({trace["started"] for trace in traces}) == 12


def test_a_closed_loop_keeps_so_many_requests_in_the_engine(bench: Bench) -> None:
    load = Load(requests=9, words=Range(3, 3), new_tokens=Range(2, 6), shared_words=0, rate=None, seed=3)
    found = bench.mix(load, 3)
    for steps in found["steps"]:
        assert max(step["sequences"] for step in steps) == 3


def test_a_mix_is_cut_to_what_the_engine_takes(tiny_engine: Path) -> None:
    bench = Bench(str(tiny_engine), {}, 1)
    load = Load(requests=3, words=Range(4000, 4000), new_tokens=Range(900, 900), shared_words=0, rate=None, seed=0)
    (traces,) = bench.mix(load, 2)["traces"]
    most = bench.limits.max_model_len
    assert {(trace["prompt_tokens"], trace["completion_tokens"]) for trace in traces} == {(most - most // 2, most // 2)}
