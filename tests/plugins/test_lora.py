"""Adapters beside Linear: what they add, to which rows, and that other rows keep their bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qwenrt.plugins import reference

from ..tolerance import relative_error
from .ops import Array, isas, run_node, using_isa
from .test_integer_linear import integer_weight

KINDS = ["float32", "bfloat16", "int8", "int4-32"]


def call(kind: str, adapters: list[int], depth: int = 70, width: int = 50, rank: int = 8, count: int = 3) -> list[Any]:
    """Inputs of Linear."""
    rng = np.random.default_rng(len(adapters) + depth)
    x = rng.standard_normal((len(adapters), depth), np.float32)
    if kind in ("float32", "bfloat16"):
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
        weight: tuple[Any, ...] = (rng.standard_normal((width, depth), np.float32).astype(dtype), None, None)
    else:
        weight = integer_weight(kind, width, depth)
    matrix, scale, groups = weight
    a = rng.standard_normal((count, rank, depth), np.float32)
    b = rng.standard_normal((count, rank, width), np.float32)
    bias = rng.standard_normal(width, np.float32)
    return [x, matrix, bias, scale, groups, np.array(adapters, np.int32), a, b]


def linear(inputs: list[Array | None]) -> Array:
    return run_node("Linear", inputs)


def rows(inputs: list[Any], *chosen: int) -> list[Any]:
    return [inputs[0][list(chosen)], *inputs[1:5], inputs[5][list(chosen)], *inputs[6:]]


MIXED = [0, 0, -1, 2, 2, 2, 1, -1, 0, -1]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [[], [1], [-1], MIXED, [1] * 1100], ids=len)
def test_each_row_gets_what_its_adapter_adds(isa: str, kind: str, adapters: list[int]) -> None:
    inputs = call(kind, adapters)
    with using_isa(isa):
        assert relative_error(linear(inputs), reference.linear(*inputs)) < 1e-5


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_an_adapter_keep_their_bits_and_others_depend_on_nothing_else(isa: str, kind: str) -> None:
    inputs = call(kind, MIXED, depth=1030, width=130)
    with using_isa(isa):
        y, plain = linear(inputs), linear(inputs[:5])
        for row, adapter in enumerate(MIXED):
            assert (y[row] == plain[row]).all() == (adapter < 0)
        for chosen in ([4], [9, 3, 0], list(range(9, -1, -1))):
            np.testing.assert_array_equal(linear(rows(inputs, *chosen)), y[chosen])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (5, np.array([0, 3], np.int32), r"adapters\[1\] is 3, but lora_a has 3"),
        (5, np.array([-2, 0], np.int32), r"adapters\[0\] is -2"),
        (5, np.zeros(3, np.int32), r"adapters has shape \[3\], expected \[2\]"),
        (6, np.zeros((3, 8, 71), np.float32), r"lora_a has shape \[3, 8, 71\], expected \[3, 8, 70\]"),
        (6, np.zeros((8, 70), np.float32), "lora_a has shape .* expected 3 dimensions"),
        (7, np.zeros((2, 8, 50), np.float32), r"lora_b has shape \[2, 8, 50\], expected \[3, 8, 50\]"),
        (7, None, "lora_b is missing"),
    ],
)
def test_what_does_not_fit_is_named(place: int, value: Array | None, message: str) -> None:
    inputs = call("float32", [0, 1])
    inputs[place] = value
    with pytest.raises(Exception, match=message):
        linear(inputs)
