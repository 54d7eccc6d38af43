"""What the sampler takes from a row of logits (CASES P01, P05, P06)."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import RequestError
from qwenrt.runtime.sampling.params import SamplingParams
from qwenrt.runtime.sampling.sampler import SampledToken, SequenceSampler, sample

Array = npt.NDArray[np.float32]
VOCAB = 320


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sampler(
    prompt: list[int] | None = None, eos: tuple[int, ...] = (), index: int = 0, **fields: Any
) -> SequenceSampler:
    return SequenceSampler(SamplingParams(**fields), prompt or [], eos, index)


def logits_of(seed: int = 0, size: int = VOCAB, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def one(state: SequenceSampler, logits: Array) -> SampledToken:
    (result,) = sample(logits.copy()[None], [state])
    assert isinstance(result, SampledToken)
    return result


def drawn(state: SequenceSampler, logits: Array, count: int) -> list[int]:
    return [one(state, logits).token_id for _ in range(count)]


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-39, 1e-38, 1e-12, 9e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy_with_finite_logprobs(temperature: float) -> None:
    logits = logits_of() + 20
    token = one(sampler(temperature=temperature, logprobs=5, seed=1), logits)
    assert token.token_id == int(logits.argmax())
    assert token.logprob is not None
    assert math.isfinite(token.logprob)
    assert token.top_logprobs is not None
    assert all(map(math.isfinite, token.top_logprobs.values()))


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_a_huge_temperature_is_near_uniform_over_the_tokens_that_are_left(temperature: float) -> None:
    logits = logits_of(size=20)
    logits[[3, 4]] = -np.inf
    counts = Counter(drawn(sampler(temperature=temperature, seed=7), logits, 3600))
    assert counts.keys() == set(range(20)) - {3, 4}
    assert 130 < min(counts.values()) <= max(counts.values()) < 280


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[17, 5, 300]] = 2
    assert one(sampler(temperature=0), logits).token_id == 5


CHI_SQUARE_999 = {2: 13.82, 5: 20.52, 7: 24.32, 39: 72.05}
"""Values that chi-square exceeds once in 1,000, by degrees of freedom (from tables)."""


def expected_of(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 40),
        ({"temperature": 1.7}, 40),
        ({"top_k": 6}, 6),
        ({"top_p": 0.8}, 8),
        ({"min_p": 0.1}, 3),
        ({"top_k": 10, "top_p": 0.9, "min_p": 0.05, "temperature": 1.1}, 6),
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, Any], kept: int) -> None:
    logits = logits_of(seed=3, size=40, scale=1.3)
    rule = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **fields}
    expected = expected_of(logits, **rule)
    assert np.count_nonzero(expected) == kept
    count = 4000
    counts = Counter(drawn(sampler(seed=11, **fields), logits, count))
    assert all(expected[token] > 0 for token in counts)
    chi = sum((counts[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected) if p > 0)
    assert chi < CHI_SQUARE_999[kept - 1]


def test_draws_over_a_large_vocabulary_follow_the_distribution() -> None:
    logits = np.full(151_936, -30, np.float32)
    logits[[0, 511, 512, 151_935]] = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    counts = Counter(drawn(sampler(seed=5), logits, 800))
    for token, share in ((0, 0.1), (511, 0.2), (512, 0.3), (151_935, 0.4)):
        assert abs(counts[token] / 800 - share) < 0.05


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.001}])
def test_the_narrowest_setting_takes_the_most_likely(fields: dict[str, Any]) -> None:
    logits = logits_of(4)
    assert set(drawn(sampler(seed=1, **fields), logits, 20)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 2**31])
def test_top_k_that_keeps_everything_changes_nothing(top_k: int) -> None:
    logits = logits_of(5)
    assert drawn(sampler(seed=2, top_k=top_k), logits, 50) == drawn(sampler(seed=2), logits, 50)


def test_the_same_seed_draws_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    rows = np.stack([logits_of(seed) for seed in range(3)])
    others = [sampler(temperature=0, prompt=[1, 2]), sampler(prompt=[3] * 50, repetition_penalty=1.3, top_k=3)]
    fields = {"seed": 42, "top_p": 0.9, "presence_penalty": 0.5, "prompt": [5]}
    alone, among = sampler(**fields), sampler(**fields)
    single = drawn(alone, rows[1], 40)
    batched = []
    for step in range(40):
        order = [0, 1, 2] if step % 2 else [2, 1, 0]
        states = {0: others[0], 1: among, 2: others[1]}
        result = sample(rows[order].copy(), [states[i] for i in order])[1]
        assert isinstance(result, SampledToken)
        batched.append(result.token_id)
    assert batched == single


def test_seeds_and_answers_draw_differently_and_no_seed_is_fresh() -> None:
    logits = logits_of(6)
    series = [drawn(sampler(seed=seed, index=i), logits, 30) for seed in (0, 1, -2, 2**63 - 1) for i in (0, 1)]
    series += [drawn(sampler(seed=seed), logits, 30) for seed in (None, -1, None)]
    assert len({tuple(tokens) for tokens in series}) == len(series)


def test_repetition_counts_prompt_and_output_and_never_a_neighbours_padding() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 9, 0]] = [4, -1, 3]
    short = sampler(prompt=[7, 7, 9], repetition_penalty=2.0, temperature=0)
    long = sampler(prompt=[0] * 100, temperature=0)
    rows = np.stack([logits, logits])
    results = sample(rows, [short, long])
    assert [result.token_id for result in results if isinstance(result, SampledToken)] == [0, 7]
    assert rows[0, [7, 9, 0]].tolist() == [2, -2, 3]


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 8]] = [2.0, 1.1]
    state = sampler(prompt=[7, 7, 7], presence_penalty=0.5, frequency_penalty=0.25, temperature=0)
    assert drawn(state, logits, 4) == [7, 7, 8, 7]


def test_min_tokens_masks_every_ending_until_reached() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[1, 2, 3, 4]] = [9, 8, 7, 1]
    state = sampler(eos=(1, 2), stop_token_ids=[3], min_tokens=2, temperature=0)
    assert drawn(state, logits, 3) == [4, 4, 1]


def test_logit_bias_is_added_and_does_not_unmask() -> None:
    logits = np.zeros(VOCAB, np.float32)
    state = sampler(eos=(1,), logit_bias={1: 100, 5: 2, 6: -100}, min_tokens=1, temperature=0)
    assert drawn(state, logits, 2) == [5, 1]


@pytest.mark.parametrize("size", [VOCAB, 30_000])
def test_logprobs_are_those_of_the_model_before_processing(size: int) -> None:
    logits = logits_of(8, size=size)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    fields: dict[str, Any] = {"logprobs": 5, "top_k": 1, "logit_bias": {17: 100.0}, "temperature": 0.01}
    token = one(sampler(**fields), logits)
    assert token.token_id == 17
    assert token.logprob == pytest.approx(exact[17], abs=1e-4)
    assert token.top_logprobs is not None
    assert list(token.top_logprobs) == np.argsort(-exact, kind="stable")[:5].tolist()
    assert list(token.top_logprobs.values()) == pytest.approx(sorted(exact, reverse=True)[:5], abs=1e-4)


def test_logprobs_of_the_most_likely_can_be_none_and_all_stay_strict_json() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[3] = 1
    token = one(sampler(logprobs=0), logits)
    assert (token.token_id, token.logprob, token.top_logprobs) == (3, 0.0, {})
    token = one(sampler(logprobs=20), logits)
    assert token.top_logprobs is not None
    assert json.loads(json.dumps(token.top_logprobs, allow_nan=False))["0"] == -9999.0
    assert one(sampler(), logits).logprob is None


def test_logprobs_ask_for_no_more_than_the_vocabulary_has() -> None:
    token = one(sampler(logprobs=20), logits_of(size=4))
    assert token.top_logprobs is not None
    assert len(token.top_logprobs) == 4


BAD_ROWS = [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)]


@pytest.mark.parametrize(("shown", "value"), BAD_ROWS)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 5}, {"logprobs": 5}])
def test_a_row_that_cannot_be_sampled_fails_alone(shown: str, value: float, fields: dict[str, Any]) -> None:
    rows = np.stack([logits_of(1), logits_of(2), logits_of(3)])
    rows[1, slice(None) if value == -math.inf else 50] = value
    states = [sampler(temperature=0), sampler(**fields), sampler(temperature=0)]
    tops = rows.argmax(axis=1)
    results = sample(rows, states)
    assert isinstance(results[1], RequestError)
    assert shown in str(results[1])
    assert states[1].num_generated == 0
    assert [results[i].token_id for i in (0, 2)] == [tops[0], tops[2]]  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [1e4, 1e30, 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 1e6])
def test_enormous_logits_give_a_valid_token(scale: float, temperature: float) -> None:
    logits = logits_of(9)
    logits *= np.float32(3 * scale) / np.abs(logits).max()
    state = sampler(temperature=temperature, seed=3, logprobs=5, repetition_penalty=100.0, prompt=[1, 2, 3])
    token = one(state, logits)
    if temperature * 100 < scale:
        assert token.token_id == int(logits.argmax())
    assert token.top_logprobs is not None
    assert all(map(math.isfinite, token.top_logprobs.values()))
