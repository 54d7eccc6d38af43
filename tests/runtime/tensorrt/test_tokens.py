"""The scheduler's whole work over the TensorRT backend: tokens are those of ONNX Runtime on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from qwenrt.runtime import LLM, SamplingParams

from .conftest import Machine

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 80)
NUM_NEW = 8
MARGIN = 0.02
"""Between the logits of float16 and float32; the largest difference seen is 0.01."""


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def greedy(count: int = NUM_NEW) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]], count: int = NUM_NEW) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(count))]


def check(answers: Iterable[list[int]], cpu: LLM, prompts: Sequence[list[int]], count: int = NUM_NEW) -> None:
    """Asserts that `answers` are those of the CPU; where two tokens are as good as equally likely, either is right."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = cpu.generate(prompt, params)[0].outputs
        assert len(answer) == count
        assert output.logprobs is not None
        for token, right in zip(answer, output.logprobs, strict=True):
            assert token in right.top and right.top[token] > right.logprob - MARGIN
            compared += 1
            if token != right.token_id:
                # From here on the texts differ.
                break
    assert compared > 0.75 * count * len(prompts)


@pytest.fixture
def prompts() -> list[list[int]]:
    return [ids(length, length) for length in LENGTHS]


def test_alone_and_batched(machine: Machine, engine_dir: Path, cpu: LLM, prompts: list[list[int]]) -> None:
    llm = LLM(engine_dir, num_kv_blocks=64)
    check([tokens(llm, [prompt])[0] for prompt in prompts], cpu, prompts)
    check(tokens(llm, prompts), cpu, prompts)
    assert llm.engine.scheduler.pool.num_free == 64


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(3, 2), (8, 8), (17, 10)])
def test_prompts_in_chunks_beside_decoding(
    machine: Machine, engine_dir: Path, cpu: LLM, prompts: list[list[int]], budget: int, max_num_seqs: int
) -> None:
    llm = LLM(engine_dir, num_kv_blocks=64, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    check(tokens(llm, prompts), cpu, prompts)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 10])
def test_numbers_of_decoding_sequences_around_the_padded_ones(
    machine: Machine, engine_dir: Path, cpu: LLM, count: int
) -> None:
    batch = [ids(2, seed) for seed in range(count)]
    llm = LLM(engine_dir, num_kv_blocks=64)
    check(tokens(llm, batch), cpu, batch)
    assert machine.device.counts("launch") == NUM_NEW - 1


def test_prefix_cache_hits(machine: Machine, engine_dir: Path, cpu: LLM) -> None:
    llm, prefix = LLM(engine_dir, num_kv_blocks=64), ids(40, 1)
    batch = [prefix + ids(tail, tail) for tail in (1, 9, 20)] * 2
    outputs = [llm.generate(prompt, greedy())[0] for prompt in batch]
    check([output.outputs[0].token_ids for output in outputs], cpu, batch)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32, 48, 48]


def test_preemption_in_a_tiny_pool(machine: Machine, engine_dir: Path, cpu: LLM) -> None:
    batch = [ids(15, seed) for seed in range(4)]
    llm = LLM(engine_dir, num_kv_blocks=8)
    check(tokens(llm, batch, 20), cpu, batch, 20)
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.scheduler.pool.num_free == 8


def test_drafts_that_want_more_rows_of_logits_than_the_plan_gives_at_once(
    machine: Machine, engine_dir: Path, cpu: LLM
) -> None:
    batch = [(ids(3, seed) * 6)[:18] for seed in range(4)]
    llm = LLM(engine_dir, num_kv_blocks=64, max_num_seqs=4, speculative={"method": "ngram"})
    downloads = []
    record = machine.device.download
    machine.device.download = lambda target, *rest: (downloads.append(len(target)), record(target, *rest))  # type: ignore
    check(tokens(llm, batch, 16), cpu, batch, 16)
    assert max(downloads) == 4
    assert len(downloads) > llm.engine.timings.steps


def test_several_answers_to_one_prompt(machine: Machine, engine_dir: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
    answers = [LLM(engine_dir, num_kv_blocks=20).generate(ids(20), params)[0].outputs for _ in range(2)]
    assert len({tuple(answer.token_ids) for answer in answers[0]}) == 3
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_and_go(machine: Machine, engine_dir: Path, cpu: LLM, seed: int) -> None:
    choice, count = random.Random(seed), 8
    engine = LLM(engine_dir, num_kv_blocks=12, max_num_batched_tokens=choice.choice([11, 16, 24])).engine
    shared = ids(33, 100)
    waiting = {}
    for number in range(12):
        start = shared[: choice.choice([0, 0, 16, 33])]
        waiting[f"r{number}"] = start + ids(choice.randint(1, 60 - len(start)), 1000 * seed + number)
    prompts, finished = dict(waiting), {}
    while waiting or engine.has_unfinished_requests():
        while waiting and choice.random() < 0.4:
            engine.add_request(*waiting.popitem(), greedy(count))
        if choice.random() < 0.05:
            aborted = choice.choice(list(prompts))
            if engine.abort(aborted):
                del prompts[aborted]
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    assert engine.scheduler.pool.num_free == 12
    assert prompts.keys() == finished.keys()
    check([finished[name] for name in prompts], cpu, list(prompts.values()), count)
