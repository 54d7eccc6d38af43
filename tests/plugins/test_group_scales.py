"""Linear and Embedding where groups of integers have float scales and offsets of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from qwenrt.plugins import panels, reference

from .ops import Array, isas, run_node, using_isa

FORMATS = [
    "uint8-8-offset",
    "uint8-16",
    "uint8-32",
    "uint8-128",
    "uint8-32-offset",
    "uint8-64-offset",
    "int8-8-offset",
    "int8-16-offset",
    "int8-32",
    "int8-128",
]
SHAPES = [
    *((0, 8, 8), (1, 1, 1), (1, 64, 32), (2, 70, 33), (3, 128, 16), (5, 1100, 47), (8, 192, 48), (13, 60, 20)),
    *((16, 200, 40), (17, 64, 16), (33, 300, 65), (70, 130, 31), (3, 5, 0)),
]


@dataclass(frozen=True)
class Grouped:
    """A weight as Linear and Embedding take it."""

    weight: Array
    scale: Array
    groups: Array | None
    group_scale: Array
    group_offset: Array | None

    def linear(self, x: Array, bias: Array | None = None) -> Array:
        rest = (None, None, None, self.group_scale, self.group_offset)
        return run_node("Linear", (x, self.weight, bias, self.scale, self.groups, *rest))

    def linear_by_reference(self, x: Array, bias: Array | None = None) -> Array:
        grouped = {"group_scale": self.group_scale, "group_offset": self.group_offset}
        return reference.linear(x, self.weight, bias, self.scale, self.groups, **grouped)

    @property
    def parts(self) -> tuple[Array | None, ...]:
        return self.weight, self.scale, self.groups, self.group_scale, self.group_offset

    def decoded(self, depth: int) -> Array:
        rows = np.arange(len(self.scale))
        return reference.embedding(
            rows, self.weight, self.scale, self.groups, self.group_scale, self.group_offset, depth=depth
        )


def grouped_weight(kind: str, width: int, depth: int, seed: int = 0) -> Grouped:
    """Any codes and zero points that checkpoints have; kind: element type, columns of a group, with an offset or not."""
    rng = np.random.default_rng(seed)
    dtype, size, *offset = kind.split("-")
    group_size = int(size)
    groups = -(-depth // group_size)
    group_scale = rng.uniform(0.5, 2, (width, groups)).astype(np.float32)
    group_offset = rng.uniform(-9, 9, (width, groups)).astype(np.float32)
    bytes_ = None
    if dtype == "int8":
        weight = panels.pack_int8(rng.integers(-128, 128, (width, depth)).astype(np.int8), group_size)
    else:
        weight = panels.pack_int4(rng.integers(0, 16, (width, depth)).astype(np.uint8), group_size)
        zeros = rng.integers(0, 16, (width, groups)).astype(np.uint8)
        bytes_ = panels.pack_groups(np.ones_like(zeros), zeros, depth, group_size)
    return Grouped(
        weight,
        rng.choice([0.5, 1, 2], width).astype(np.float32),
        bytes_,
        panels.pack_group_values(group_scale, depth, group_size),
        panels.pack_group_values(group_offset, depth, group_size) if offset else None,
    )


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "depth", "width"), SHAPES)
def test_equals_a_float64_computation(isa: str, kind: str, rows: int, depth: int, width: int) -> None:
    rng = np.random.default_rng(rows + depth + width)
    x = (rng.standard_normal((rows, depth)) * np.exp(3 * rng.standard_normal((rows, 1)))).astype(np.float32)
    weight = grouped_weight(kind, width, depth, seed=rows)
    bias = rng.standard_normal(width, np.float32) if width % 2 else None
    with using_isa(isa):
        y = weight.linear(x, bias)
    values, scale = reference.round_rows(x)
    terms = np.abs(values).astype(np.float64) @ np.abs(weight.decoded(depth)).T.astype(np.float64)
    most = scale[:, None] * (terms + 9 * np.abs(values).sum(1, keepdims=True) * np.abs(weight.scale))
    assert (
        np.abs(y - weight.linear_by_reference(x, bias)) <= 1e-6 * (most + (0 if bias is None else np.abs(bias)))
    ).all()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", ["uint8-32", "uint8-128", "int8-16", "int8-128"])
@pytest.mark.parametrize(("rows", "depth", "width"), SHAPES)
def test_scales_of_1_change_no_bit(isa: str, kind: str, rows: int, depth: int, width: int) -> None:
    """Each sum is then a whole number that float32 holds: as exact as with one scale a row."""
    x = np.random.default_rng(rows).standard_normal((rows, depth), np.float32)
    weight = grouped_weight(kind, width, depth, seed=rows)
    weight = replace(weight, group_scale=np.ones_like(weight.group_scale))
    with using_isa(isa):
        y = weight.linear(x)
    np.testing.assert_array_equal(y, reference.linear(x, weight.weight, None, weight.scale, weight.groups))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_whatever_else_is_computed_and_with_whatever_fuses(kind: str) -> None:
    weight = grouped_weight(kind, 50, 1000)
    x = np.random.default_rng(1).standard_normal((80, 1000), np.float32)
    fused: list[Array] = []
    for isa in isas():
        with using_isa(isa):
            want = weight.linear(x)
            for first, last in [(0, 1), (1, 3), (3, 12), (5, 70), (79, 80), (60, 80), (0, 20)]:
                np.testing.assert_array_equal(weight.linear(x[first:last]), want[first:last])
        fused += [want] if isa != "portable" else []
    for y in fused[1:]:
        np.testing.assert_array_equal(y, fused[0])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", ["uint8-32", "int8-128"])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone(isa: str, kind: str) -> None:
    weight = grouped_weight(f"{kind}-offset", 20, 100)
    x = np.ones((20, 100), np.float32)
    with using_isa(isa):
        want = weight.linear(x)
        x[3, 99] = np.inf
        y = weight.linear(x)
    assert np.isnan(y[3]).all()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(want, 3, 0))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_lowest_integer_is_one_of_int8(isa: str, sign: int) -> None:
    scale = np.ones(20, np.float32)
    lowest = panels.pack_int8(np.full((20, 64), -128, np.int8))
    with using_isa(isa):
        for rows in (1, 20):
            y = run_node("Linear", (np.full((rows, 64), sign, np.float32), lowest, None, scale))
            np.testing.assert_array_equal(y, np.float32(sign * -128 * 127 * 64) * (np.float32(1) / np.float32(127)))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("width", "depth"), [(20, 64), (33, 192), (16, 7)])
def test_embedding_gives_rows_of_the_weight(kind: str, width: int, depth: int) -> None:
    weight = grouped_weight(kind, width, depth)
    ids = np.array([0, width - 1, 3, 3, 15], np.int32)
    y = run_node("Embedding", (ids, *weight.parts), depth=depth)
    np.testing.assert_array_equal(y, weight.decoded(depth)[ids])


class TestWrongInputs:
    weight = grouped_weight("uint8-32-offset", 20, 64)
    x = np.ones((2, 64), np.float32)

    def test_an_offset_without_a_scale(self) -> None:
        alone = (self.x, self.weight.weight, None, self.weight.scale, self.weight.groups, None, None, None, None)
        with pytest.raises(Exception, match="group_scale is missing; group_offset needs it"):
            run_node("Linear", (*alone, self.weight.group_offset))

    @pytest.mark.parametrize("name", ["group_scale", "group_offset"])
    @pytest.mark.parametrize("shape", [(2, 1, 16), (1, 2, 16), (2, 2, 8)])
    def test_another_number_of_groups(self, name: str, shape: tuple[int, ...]) -> None:
        other = replace(self.weight, **{name: np.ones(shape, np.float32)})
        with pytest.raises(
            Exception, match=rf"{name} has shape \[{', '.join(map(str, shape))}\], expected \[2, 2, 16\]"
        ):
            other.linear(self.x)

    @pytest.mark.parametrize(("columns", "groups"), [(192, 8), (192, 24), (320, 2)])
    def test_groups_that_64_columns_do_not_fit(self, columns: int, groups: int) -> None:
        weight = replace(
            self.weight,
            weight=np.zeros((2, columns // 8, 64), np.uint8),
            groups=np.zeros((2, groups, 16), np.uint8),
            group_scale=np.ones((2, groups, 16), np.float32),
            group_offset=None,
        )
        if columns // groups == 8:
            weight.linear(self.x)
            return
        with pytest.raises(Exception, match=f"groups with scales are of {columns // groups} columns; that must be"):
            weight.linear(self.x)
