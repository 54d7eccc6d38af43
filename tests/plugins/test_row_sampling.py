"""Rows of logits to tokens: what the reference takes, on every instruction set, and what a sorted vocabulary says by hand."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import reference
from qwenrt.plugins.reference import sample_row
from qwenrt.plugins.row_sampling import GREEDY, describe_row, sample_rows, sampling_rule
from tests.logits import LOGIT_KINDS, logits_of

from .ops import isas, using_isa

Array = npt.NDArray[np.float32]
LAST = float(np.nextafter(1, 0))
SIZES = [1, 2, 15, 16, 17, 100, 511, 513, 1023, 4097, 20_000]
RULES: list[dict[str, float]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1e-3},
    {"temperature": 1e300, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]


def rule(temperature: float, **fields: Any) -> bytes:
    return sampling_rule(temperature=temperature, **fields) if temperature else GREEDY


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_every_row_gets_the_token_of_the_reference(isa: str, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for size in SIZES:
        logits = np.stack([logits_of(kind, size, rng) for _ in range(4 * len(RULES))])
        rules = [fields for fields in RULES for _ in range(4)]
        uniforms = [0.0, LAST, *rng.random(len(rules) - 2).tolist()]
        with using_isa(isa):
            tokens = sample_rows(logits, [rule(**fields) for fields in rules], uniforms)
        assert tokens == [
            sample_row(row, uniform, **fields)  # type: ignore[arg-type]
            for row, uniform, fields in zip(logits, uniforms, rules, strict=True)
        ]


def test_a_rows_token_does_not_depend_on_the_others_or_on_threads() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (40, 5000)).astype(np.float32)
    rules = [rule(**RULES[i % len(RULES)]) for i in range(40)]
    uniforms = rng.random(40).tolist()
    alone = [sample_rows(logits[i : i + 1], rules[i : i + 1], uniforms[i : i + 1])[0] for i in range(40)]
    for threads in (1, 2, 3, 0):
        assert sample_rows(logits, rules, uniforms, threads=threads) == alone
    order = rng.permutation(40).tolist()
    shuffled = sample_rows(logits[order], [rules[i] for i in order], [uniforms[i] for i in order], threads=2)
    assert shuffled == [alone[i] for i in order]


def edges_of(logits: Array, **fields: Any) -> tuple[int, int]:
    """The tokens of the lowest and the highest id that can be drawn."""
    first, last = sample_rows(np.stack([logits, logits]), [rule(**fields)] * 2, [0.0, LAST])
    return first, last


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5001, 2), (0.75, 2), (0.76, 3), (0.99, 4), (1e-9, 1)])
def test_nucleus_by_hand(top_p: float, kept: int) -> None:
    logits = np.log(np.array([1, 4, 1, 2], np.float32))
    chosen = sorted([1, 3, 0, 2][:kept])
    uniforms = np.linspace(0, LAST, 50)
    tokens = sample_rows(np.tile(logits, (50, 1)), [rule(temperature=1.0, top_p=top_p)] * 50, uniforms.tolist())
    assert sorted(set(tokens)) == chosen


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    logits = np.zeros(151_936, np.float32)
    assert edges_of(logits, temperature=1.0, top_p=0.25) == (0, 37_983)
    assert edges_of(logits, temperature=1.0, top_k=1000) == (0, 999)
    assert edges_of(logits, temperature=1.0, top_k=40, top_p=0.5) == (0, 19)
    assert edges_of(logits, temperature=1.0) == (0, 151_935)


@pytest.mark.parametrize("size", [20, 5000])
def test_a_token_without_weight_is_never_drawn(size: int) -> None:
    logits = np.full(size, -np.inf, np.float32)
    logits[[7, 9]] = -1e4
    for fields in RULES[1:]:
        assert edges_of(logits, **fields) in {(7, 9), (7, 7)}


@pytest.mark.parametrize("size", [5, 1000])
def test_a_row_without_a_finite_peak_gets_no_token(size: int) -> None:
    rows = np.random.default_rng(0).normal(0, 1, (5, size)).astype(np.float32)
    rows[1] = -math.inf
    rows[2, size // 2] = math.nan
    rows[3, size - 1] = math.inf
    for fields in RULES:
        tokens = sample_rows(rows, [rule(**fields)] * 5, [0.5] * 5)
        assert tokens[1:4] == [-1, -1, -1]
        assert min(tokens[0], tokens[4]) >= 0


def test_no_rows_are_no_tokens() -> None:
    assert sample_rows(np.empty((0, 100), np.float32), [], []) == []


def test_python_allocates_nothing_of_the_size_of_the_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (4, 150_000)).astype(np.float32)
    rules = [rule(**fields) for fields in RULES[:4]]
    sample_rows(logits, rules, [0.5] * 4)
    describe_row(logits[0], 20)
    tracemalloc.start()
    sample_rows(logits, rules, [0.5] * 4)
    describe_row(logits[0], 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_log_probabilities_and_the_largest_logits_are_those_of_the_reference(isa: str, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for size in [*SIZES, 151_936]:
        logits = logits_of(kind, size, rng)
        for count in (0, 1, 5, 20, size):
            with using_isa(isa):
                log_sum, top = describe_row(logits, count)
            want_sum, want_top = reference.describe_row(logits, count)
            assert log_sum == pytest.approx(want_sum, abs=1e-6)
            assert top == want_top


def test_there_are_no_more_largest_logits_than_tokens() -> None:
    assert describe_row(np.array([1, 3, 2], np.float32), 20)[1] == [1, 2, 0]


@pytest.mark.parametrize("size", [5, 1000])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_without_a_finite_peak_has_no_log_probabilities(size: int, wrong: float) -> None:
    logits = np.zeros(size, np.float32)
    logits[size - 2] = wrong
    for row in (logits, np.full(size, -np.inf, np.float32)):
        log_sum, top = describe_row(row, 3)
        assert math.isnan(log_sum)
        assert top == []
