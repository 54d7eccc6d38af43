"""SamplingParams accepts what it documents and names what it refuses (CASES P01, P02, P03)."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from qwenrt.plugins import RequestError
from qwenrt.runtime.sampling.params import SamplingParams

HUGE = 10**5000

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-1, -1e-9, math.nan, math.inf, -math.inf, "0", True, None, HUGE, 1j, [0.5])],
    *[("top_p", value) for value in (0, -0.1, 1.0001, math.nan, "1", False, None, math.inf)],
    *[("top_k", value) for value in (-2, 1.0, "5", True, None, 2**63, math.nan)],
    *[("min_p", value) for value in (-0.1, 1.0001, math.nan, "0", True, None)],
    *[("repetition_penalty", value) for value in (0, -1, math.inf, math.nan, "1", 0.001, 101, None, True)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, math.inf, math.nan, "0", True, None)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, -math.inf, math.nan, "0", True, None)],
    *[("seed", value) for value in (1.0, "1", True, 2**63, -(2**63) - 1, HUGE)],
    *[("max_tokens", value) for value in (0, -1, 2**63, 3.5, 1e8, "16", True, HUGE)],
    *[("min_tokens", value) for value in (-1, 17, 0.0, "0", True, None)],
    *[("logprobs", value) for value in (-1, 21, 5.0, "5", True)],
    *[("n", value) for value in (0, -1, 129, 10**6, 1.0, "1", True, None)],
    *[("stop", value) for value in ("", ["a", ""], [1], [None], b"x", {"a": 1}, 5, None, ["x"] * 1025, ["x" * 65_537])],
    *[("stop_token_ids", value) for value in ([-1], ["1"], [1.0], [True], "1", 5, None, [2**31], range(1025))],
    *[
        ("logit_bias", value)
        for value in ({-1: 0.0}, {"1": 0.0}, {1: math.nan}, {1: 101}, {True: 1.0}, {1: None}, [1], 5)
    ],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    *[(name, value) for name in ("ignore_eos", "skip_special_tokens") for value in (1, 0, "true", None)],
    ("include_stop_str_in_output", "false"),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


ACCEPTED: list[tuple[str, Any, Any]] = [
    *[("temperature", t, float(t)) for t in (0, 5e-324, 1e-39, 1e-12, 1e6, 1e300, np.float32(0.5), Fraction(1, 2))],
    *[("top_p", value, float(value)) for value in (1, 1e-9, np.float64(0.5))],
    *[("top_k", value, int(value)) for value in (-1, 0, 1, 2**31, np.int64(5))],
    *[("min_p", value, float(value)) for value in (0, 1, 5e-324)],
    *[("repetition_penalty", value, float(value)) for value in (0.01, 1, 100)],
    *[("presence_penalty", value, float(value)) for value in (-2, 2)],
    *[("seed", value, value) for value in (0, 2**63 - 1, -(2**63), None)],
    ("seed", -1, None),
    *[("max_tokens", value, value) for value in (1, 10**8, 2**31 - 1, None)],
    *[("logprobs", value, value) for value in (None, 0, 20)],
    *[("n", value, value) for value in (1, 128)],
    ("stop", "a", ("a",)),
    ("stop", ["a", "🙂"], ("a", "🙂")),
    ("stop", [f"stop {i}" for i in range(1000)], tuple(f"stop {i}" for i in range(1000))),
    ("stop_token_ids", [1, np.int32(2)], (1, 2)),
    ("logit_bias", {np.int64(3): -100}, {3: -100.0}),
    ("ignore_eos", np.bool_(True), True),
]


@pytest.mark.parametrize(("field", "value", "kept"), ACCEPTED)
def test_a_good_value_is_kept_as_a_plain_python_value(field: str, value: Any, kept: Any) -> None:
    params = SamplingParams(**{field: value})
    assert getattr(params, field) == kept
    assert type(getattr(params, field)) is type(kept)
    assert dataclasses.replace(params) == params


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100
    with pytest.raises(RequestError, match=r"min_tokens is 6.*max_tokens, 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_an_unknown_field_raises() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("fields", [{"stop_token_ids": [320]}, {"logit_bias": {320: 1.0}}])
def test_a_token_id_outside_the_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.validate_for(321)
    with pytest.raises(RequestError, match=r"320.*0 to 319"):
        params.validate_for(320)


def test_an_endless_list_is_refused() -> None:
    def endless() -> Any:
        while True:
            yield 1

    with pytest.raises(RequestError, match="stop_token_ids has more than 1024"):
        SamplingParams(stop_token_ids=endless())
