"""The workloads' sizes, prompts and rates."""

from __future__ import annotations

import random

import pytest

from qwenrt.tools.bench.workloads import WARM_UP, WORKLOADS, Workload


def test_prompts_are_the_same_for_the_same_seed_and_share_what_they_say() -> None:
    workload = Workload(sequences=3, shared_tokens=20, prompt_tokens=5, new_tokens=4, rate="output")
    prompts = workload.prompts(range(1000), 7)
    assert prompts == workload.prompts(range(1000), 7)
    assert [len(prompt) for prompt in prompts] == [25, 25, 25]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 3
    assert prompts[0][:20] != workload.prompts(range(1000), 8)[0][:20]


@pytest.mark.parametrize("workload", [*WORKLOADS.values(), WARM_UP])
def test_a_workload_fits_every_engine_and_keeps_its_shape(workload: Workload) -> None:
    rng = random.Random(0)
    for max_len in [*range(3, 40), *(rng.randrange(40, 8000) for _ in range(100))]:
        small = workload.within(max_len=max_len, max_sequences=4)
        assert small.length <= max_len
        assert small.sequences == min(workload.sequences, 4)
        assert small.prompt_tokens >= 1 and small.new_tokens >= min(2, workload.new_tokens)
        assert small.shared_tokens == 0 if workload.shared_tokens == 0 else small.shared_tokens >= 0
        if max_len >= workload.length:
            assert small.length == workload.length
        else:
            assert small.length == max_len


def test_rates_count_what_they_say() -> None:
    sizes = {"sequences": 4, "shared_tokens": 6, "prompt_tokens": 10, "new_tokens": 5}
    assert Workload(**sizes, rate="prompt").tokens_per_s(2.0, 4.0) == 4 * 16 / 2  # type: ignore[arg-type]
    assert Workload(**sizes, rate="decode").tokens_per_s(2.0, 4.0) == 4 * 4 / 2  # type: ignore[arg-type]
    assert Workload(**sizes, rate="output").tokens_per_s(2.0, 4.0) == 4 * 5 / 4  # type: ignore[arg-type]
