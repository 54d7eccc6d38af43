"""What the engine promises about requests: admission, isolation, preemption, aborts (CASES S01 to S06, K01, K02)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM, ConfigError, RequestError, SamplingParams
from qwenrt.runtime.sampling.sampler import SampledToken, SequenceSampler
from tests.oracle import Oracle

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "small-blocks"
    export(tiny_checkpoint, out, block_size=4)
    return out


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


def small_kv(engine_dir: Path, **options: Any) -> LLM:
    """64 token slots in 16 blocks, 8 tokens a step, 4 sequences, 48 tokens each."""
    limits: dict[str, Any] = {
        "num_kv_blocks": NUM_BLOCKS,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 48,
        "threads": 1,
    }
    return LLM(engine_dir, **{**limits, **options})


@pytest.fixture
def llm(engine_dir: Path, oracle: Oracle) -> Iterator[LLM]:
    """After every case all blocks are free and an ordinary request gets the answer it always got."""
    llm = small_kv(engine_dir)
    yield llm
    assert tokens(llm, [7, 8, 9]) == oracle.greedy([7, 8, 9], 6)
    assert llm.engine.scheduler.pool.num_free == NUM_BLOCKS
    assert not llm.engine.has_unfinished_requests()


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_served(engine_dir: Path) -> None:
    llm = small_kv(engine_dir, max_model_len=200)
    with pytest.raises(RequestError, match=r"70 tokens.* needs 19 KV blocks and the pool has 16"):
        llm.generate(ids(70), GREEDY)
    with pytest.raises(RequestError, match=r"needs 20 KV blocks and the pool has 16.*num_kv_blocks"):
        llm.generate(ids(60), SamplingParams(max_tokens=20))
    assert len(tokens(llm, ids(4))) == 6


def test_a_request_that_just_fits_the_pool_succeeds(engine_dir: Path, oracle: Oracle) -> None:
    llm = small_kv(engine_dir, max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert tokens(llm, ids(40), params) == oracle.greedy(ids(40), 24)


def test_without_max_tokens_an_answer_ends_at_the_model_length_or_the_pool(engine_dir: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for max_model_len, total in ((48, 48), (200, 65)):
        output = small_kv(engine_dir, max_model_len=max_model_len).generate(ids(10), params)[0].outputs[0]
        assert (10 + len(output.token_ids), output.finish_reason) == (total, "length")


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
def test_an_empty_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ids(48), "48 tokens; with max_model_len 48 it may have 47"),
        ([1, -1], "token id -1"),
        ([1, 320], "token id 320; ids are integers from 0 to 319"),
        ([1, 2**40], "token id 1099511627776"),
        ([[1, True]], "token id True"),
        ([[1, "a"]], "token id 'a'"),
        ([[1, 1.5]], "token id 1.5"),
        (["fine", 7], "prompt is a int"),
    ],
)
def test_a_bad_prompt_is_refused_by_what_is_wrong_with_it(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_a_bad_request_does_not_disturb_the_others(llm: LLM, oracle: Oracle) -> None:
    engine = llm.engine
    engine.add_request("good", ids(9), GREEDY)
    engine.step()
    for prompt, params in ((ids(60), GREEDY), ([999], GREEDY), (ids(3), SamplingParams(stop_token_ids=[5000]))):
        with pytest.raises(RequestError):
            engine.add_request("bad", prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == oracle.greedy(ids(9), 6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(
            temperature=0.7,
            seed=5,
            max_tokens=24,
            ignore_eos=True,
            logprobs=2,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
        ),
    ],
    ids=["greedy", "seeded", "penalties and logprobs"],
)
def test_preempted_requests_give_what_they_give_alone(llm: LLM, params: SamplingParams) -> None:
    prompts = [ids(8, seed) for seed in range(4)]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert llm.engine.scheduler.num_preemptions > 0
    for prompt, answer in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params)[0].outputs[0]
        assert (alone.text, alone.token_ids, alone.finish_reason) == (answer.text, answer.token_ids, "length")
        if alone.logprobs:
            assert answer.logprobs is not None
            for one, other in zip(alone.logprobs, answer.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one.top.keys() == other.top.keys()


def test_a_stream_under_preemption_repeats_and_loses_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    seen: dict[str, list[int]] = {}

    def follow(output: Any) -> None:
        so_far = seen.setdefault(output.request_id, [])
        now = output.outputs[0].token_ids
        assert now[:-1] == so_far
        seen[output.request_id] = now

    final = llm.generate([ids(8, seed) for seed in range(4)], params, on_output=follow)
    assert llm.engine.scheduler.num_preemptions > 0
    assert list(seen.values()) == [output.outputs[0].token_ids for output in final]


def test_tokens_found_again_after_a_preemption_are_no_cached_prompt(engine_dir: Path) -> None:
    llm = small_kv(engine_dir, num_kv_blocks=6)
    prompts = [ids(3, seed) for seed in range(2)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    assert llm.engine.scheduler.num_preemptions > 0
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_more_answers_than_sequences_all_return(engine_dir: Path) -> None:
    llm = small_kv(engine_dir, max_num_seqs=2)
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(ids(36), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert output.prompt_token_ids == ids(36)
    assert [answer.token_ids for answer in llm.generate(ids(36), params)[0].outputs] == [
        answer.token_ids for answer in output.outputs
    ]


def test_a_request_id_in_use_is_refused_and_free_again_after_abort(llm: LLM) -> None:
    engine = llm.engine
    for round_ in range(200):
        engine.add_request("same", ids(6 + round_ % 3), GREEDY)
        with pytest.raises(RequestError, match="'same' is in use"):
            engine.add_request("same", ids(3), GREEDY)
        if round_ % 2:
            engine.step()
        aborted = engine.abort("same")
        assert aborted is not None
        assert aborted.outputs[0].finish_reason == "abort"
    assert engine.abort("same") is None
    assert engine.scheduler.pool.num_free == NUM_BLOCKS


def test_cached_fresh_and_decoding_sequences_share_a_step(llm: LLM, oracle: Oracle) -> None:
    engine = small_kv_engine = llm.engine
    prefix = ids(12, 1)
    tokens(llm, prefix)
    engine.add_request("decoding", ids(3, 2), GREEDY)
    engine.step()
    requests = {"decoding": ids(3, 2), "hit": [*prefix, 1, 2], "fresh": ids(14, 3)}
    engine.add_request("hit", requests["hit"], GREEDY)
    engine.add_request("fresh", requests["fresh"], GREEDY)
    done = {}
    while small_kv_engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    assert done["hit"].num_cached_tokens == 12
    for name, prompt in requests.items():
        assert done[name].outputs[0].token_ids == oracle.greedy(prompt, 6), name


@pytest.mark.parametrize("budget", [4, 5, 48])
def test_a_cached_prefix_gives_what_a_fresh_one_gives(engine_dir: Path, oracle: Oracle, budget: int) -> None:
    llm = small_kv(engine_dir, max_num_batched_tokens=budget)
    prefix = ids(10, 4)
    hits = []
    for _ in range(2):
        for tail in (1, 3, 6):
            prompt = prefix + ids(tail, tail)
            (output,) = llm.generate(prompt, GREEDY)
            assert output.outputs[0].token_ids == oracle.greedy(prompt, 6)
            hits.append(output.num_cached_tokens)
        tokens(llm, ids(40, 5), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert hits[0] == 0
    assert all(hits[1:3])


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    other = SamplingParams(temperature=1.3, max_tokens=10, ignore_eos=True)
    alone = tokens(llm, ids(5), params)
    for place in range(3):
        prompts = [ids(7, 1), ids(12, 2)]
        prompts.insert(place, ids(5))
        every = [other, other]
        every.insert(place, params)
        assert llm.generate(prompts, every)[place].outputs[0].token_ids == alone


def test_an_interrupted_generate_leaves_the_llm_usable(llm: LLM) -> None:
    def interrupt(output: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([ids(5), ids(9)], GREEDY, on_output=interrupt)


def test_a_failing_step_is_undone_and_can_be_tried_again(
    llm: LLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    engine.add_request("a", ids(9), GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "execute", lambda inputs: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                engine.step()
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == oracle.greedy(ids(9), 6)


def test_an_interruption_between_two_draws_is_undone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, repetition_penalty=1.5)
    prompts = [ids(2, seed) for seed in range(3)]
    alone = [tokens(llm, prompt, params) for prompt in prompts]
    engine = llm.engine
    takes = itertools.count(1)

    def take(sampler: SequenceSampler, token_id: int) -> SampledToken:
        if next(takes) == 3:
            raise KeyboardInterrupt
        return take_on(sampler, token_id)

    take_on = SequenceSampler.take
    with monkeypatch.context() as patch:
        patch.setattr(SequenceSampler, "take", take)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            with contextlib.suppress(KeyboardInterrupt):
                done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert next(takes) > 3
    assert [done[str(number)] for number in range(3)] == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 10**6}, "max_model_len is 1000000"),
        ({"max_num_batched_tokens": 2, "max_num_seqs": 4}, "lower max_num_seqs"),
        ({"num_kv_blocks": 0}, "num_kv_blocks is 0"),
        ({"kv_memory": 10**9}, "both given"),
        ({"num_kv_blocks": None, "kv_memory": 5}, "one KV block of this engine takes"),
        ({"backend": "cuda"}, "backend is 'cuda'.*onnxruntime, torch, tensorrt"),
        ({"device": "cuda"}, "device is 'cuda', backend onnxruntime runs on: cpu"),
        (
            {"num_kv_blocks": None, "gpu_memory_fraction": 0.5},
            "gpu_memory_fraction is given and the engine runs on the CPU",
        ),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(engine_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_kv(engine_dir, **options)


def test_the_torch_backend_gives_the_same_tokens(engine_dir: Path, oracle: Oracle) -> None:
    llm = small_kv(engine_dir, backend="torch")
    prompts = [ids(length, length) for length in (1, 5, 13, 30)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == [
        oracle.greedy(prompt, 6) for prompt in prompts
    ]
