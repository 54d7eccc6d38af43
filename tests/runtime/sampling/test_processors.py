"""Penalties by hand, and against their dense formula."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenrt.runtime.sampling.processors import Penalties


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
