"""The parts of sampling against sorting, slow and obvious versions of themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenrt.runtime.sampling.processors import Penalties, draw, largest, nucleus

Array = npt.NDArray[np.float32]

SIZES = st.sampled_from([1, 2, 3, 100, 511, 512, 513, 1500, 4097, 6000])
KINDS = st.sampled_from(["normal", "flat", "steps", "peaked", "half masked"])


def values_of(kind: str, size: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 3, size)
    if kind == "flat":
        values = np.zeros(size)
    elif kind == "steps":
        values = rng.integers(-3, 4, size).astype(float)
    elif kind == "peaked":
        values[rng.integers(size)] += 30
    elif kind == "half masked":
        values[rng.random(size) < 0.5] = -np.inf
        values[rng.integers(size)] = 0
    return values.astype(np.float32)


def by_rank(values: Array) -> npt.NDArray[np.int64]:
    return np.argsort(-values, kind="stable")


@given(size=SIZES, kind=KINDS, seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=150, deadline=None)
def test_largest_are_the_first_by_rank(size: int, kind: str, seed: int, data: st.DataObject) -> None:
    values = values_of(kind, size, seed)
    k = data.draw(st.integers(1, size + 1))
    assert largest(values, k).tolist() == sorted(by_rank(values)[:k].tolist())


@given(size=SIZES, kind=KINDS, seed=st.integers(0, 2**32), top_p=st.floats(1e-9, 1, exclude_max=True))
@settings(max_examples=150, deadline=None)
def test_nucleus_is_the_shortest_start_of_the_ranking_with_enough_mass(
    size: int, kind: str, seed: int, top_p: float
) -> None:
    values = values_of(kind, size, seed)
    weights = np.exp(values - values.max())
    order = by_rank(weights)
    sums = np.cumsum(weights[order], dtype=np.float64)
    shares = sums / sums[-1]
    chosen = nucleus(weights, top_p)
    count = len(chosen)
    assert chosen.tolist() == sorted(order[:count].tolist())
    assert shares[count - 1] >= top_p - 1e-9
    assert count == 1 or shares[count - 2] < top_p + 1e-9


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5001, 2), (0.75, 2), (0.76, 3), (0.99, 4), (1e-9, 1)])
def test_nucleus_by_hand(top_p: float, kept: int) -> None:
    weights = np.array([1, 4, 1, 2], np.float32) * np.float32(0.3)
    assert nucleus(weights, top_p).tolist() == sorted([1, 3, 0, 2][:kept])


def test_nucleus_of_equal_weights_takes_the_lowest_ids() -> None:
    assert nucleus(np.ones(151_936, np.float32), 0.25).tolist() == list(range(37_984))


@pytest.mark.parametrize("size", [1, 7, 512, 513, 5000])
def test_draw_is_the_inverse_of_the_running_sum(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.random(size).astype(np.float32) * (rng.random(size) < 0.7)
    weights[rng.integers(size)] = 1
    sums = np.cumsum(weights, dtype=np.float64)
    for uniform in [0.0, np.nextafter(1, 0), *rng.random(200)]:
        index = draw(weights, float(uniform))
        assert weights[index] > 0
        target = uniform * sums[-1]
        assert sums[index] >= target - 1e-6
        assert index == 0 or sums[index - 1] <= target + 1e-6


def test_draw_never_takes_a_weight_of_zero_at_the_edges() -> None:
    weights = np.zeros(2000, np.float32)
    weights[[700, 900]] = 1e-30
    assert draw(weights, 0.0) == 700
    assert draw(weights, float(np.nextafter(1, 0))) == 900


def test_penalties_by_hand() -> None:
    logits = np.zeros(12, np.float32)
    logits[[7, 9, 3]] = [4, -1, 5]
    penalties = Penalties([7, 7, 9], repetition=2.0, frequency=0.5, presence=1.0)
    penalties.apply(logits)
    assert logits[[7, 9, 3, 0]].tolist() == [2, -2, 5, 0]
    penalties.record(3)
    penalties.record(3)
    penalties.record(7)
    logits[[7, 9, 3]] = [4, -1, 5]
    penalties.apply(logits)
    assert logits[[7, 9, 3, 0]].tolist() == [0.5, -2, 0.5, 0]


@given(
    prompt=st.lists(st.integers(0, 49), max_size=200),
    output=st.lists(st.integers(0, 49), max_size=300),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    frequency=st.sampled_from([0.0, -0.5, 1.5]),
    presence=st.sampled_from([0.0, 0.7, -2.0]),
)
@settings(max_examples=60, deadline=None)
def test_penalties_equal_the_dense_formula(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    logits = np.random.default_rng(len(prompt)).normal(0, 2, 50).astype(np.float32)
    logits[5] = -np.inf
    expected = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    penalties = Penalties(prompt, repetition=repetition, frequency=frequency, presence=presence)
    for token in output:
        penalties.record(token)
    penalties.apply(logits)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
