"""Linear and Embedding with integer weights: to the bit what the reference says, on every instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import panels, reference

from .ops import Array, isas, run_node, using_isa

# Groups of 8 and 16 columns are less than some kernels sum up at once.
FORMATS = ["int8", "int4-8", "int4-16", "int4-32", "int4-128"]


def integer_weight(kind: str, width: int, depth: int, seed: int = 0) -> tuple[Array, Array, Array | None]:
    """Weight, scale and groups of any codes, multipliers and zero points that the formats allow."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 2, width).astype(np.float32)
    if kind == "int8":
        return panels.pack_int8(rng.integers(-127, 128, (width, depth)).astype(np.int8)), scale, None
    group_size = int(kind.removeprefix("int4-"))
    groups = -(-depth // group_size)
    zero_point = rng.integers(0, 16, (width, groups)).astype(np.uint8)
    largest = 127 // np.maximum(zero_point, 15 - zero_point)
    multiplier = rng.integers(1, np.minimum(largest, 15) + 1).astype(np.uint8)
    codes = rng.integers(0, 16, (width, depth)).astype(np.uint8)
    weight = panels.pack_int4(codes, group_size)
    return weight, scale, panels.pack_groups(multiplier, zero_point, depth, group_size)


def linear(x: Array, weight: Array, scale: Array, groups: Array | None, bias: Array | None = None) -> Array:
    return run_node("Linear", (x, weight, bias, scale, groups))


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_packed_comes_out_again(kind: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "int8":
        codes = rng.integers(-127, 128, (37, 150)).astype(np.int8)
        np.testing.assert_array_equal(panels.unpack_int8(panels.pack_int8(codes), 37, 150), codes)
        return
    size = int(kind.removeprefix("int4-"))
    groups = -(-150 // size)
    pairs, multiplier, zero_point = (rng.integers(1, 16, (37, n)).astype(np.uint8) for n in (150, groups, groups))
    column = np.arange(150) // size
    widened = ((pairs.astype(int) - zero_point[:, column]) * multiplier[:, column]).astype(np.int8)
    packed = panels.pack_int4(pairs, size), panels.pack_groups(multiplier, zero_point, 150, size)
    assert packed[0].shape == (3, panels.padded_depth(150, size) // 8, 64)
    np.testing.assert_array_equal(panels.unpack_int4(*packed, 37, 150), widened)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [
        *((0, 8, 8), (1, 1, 1), (1, 64, 32), (2, 70, 33), (3, 128, 16), (5, 1100, 47), (8, 192, 48), (13, 60, 20)),
        *((11, 192, 33), (16, 200, 40), (17, 64, 16), (33, 100, 65), (70, 130, 31), (3, 5, 0), (600, 100, 33)),
        # Of 300 channels every thread has several tasks, and calls for the next.
        *((5, 128, 300), (24, 128, 300), (64, 128, 300), (65, 128, 300)),
    ],
)
def test_every_bit_is_the_references(isa: str, kind: str, rows: int, depth: int, width: int) -> None:
    rng = np.random.default_rng(rows + depth + width)
    x = (rng.standard_normal((rows, depth)) * np.exp(3 * rng.standard_normal((rows, 1)))).astype(np.float32)
    weight, scale, groups = integer_weight(kind, width, depth, seed=rows)
    bias = rng.standard_normal(width, np.float32) if width % 2 else None
    with using_isa(isa):
        y = linear(x, weight, scale, groups, bias)
    np.testing.assert_array_equal(y, reference.linear(x, weight, bias, scale, groups))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("rows", [1, 5, 33, 65])
def test_products_of_no_columns_are_the_bias(isa: str, rows: int) -> None:
    weight, scale, _ = integer_weight("int8", 300, 0)
    bias = np.arange(300, dtype=np.float32)
    with using_isa(isa):
        y = linear(np.empty((rows, 0), np.float32), weight, scale, None, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (rows, 300)))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("group_size", [24, 40, 72])
def test_groups_that_are_no_multiple_of_what_is_summed_up_at_once(isa: str, group_size: int) -> None:
    """The op takes any multiple of 8."""
    rng = np.random.default_rng(group_size)
    width, depth = 33, 64 * group_size
    groups = rng.integers(1, 9, (3, depth // group_size, 16)) | rng.integers(0, 16, (3, depth // group_size, 16)) << 4
    weight = panels.pack_int4(rng.integers(0, 16, (width, depth)).astype(np.uint8), 8)
    parts = weight, rng.uniform(0.5, 2, width).astype(np.float32), groups.astype(np.uint8)
    for rows in (1, 5, 20):
        x = rng.standard_normal((rows, depth), np.float32)
        with using_isa(isa):
            y = linear(x, *parts)
        np.testing.assert_array_equal(y, reference.linear(x, parts[0], None, parts[1], parts[2]))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_whatever_else_is_computed(isa: str, kind: str) -> None:
    weight, scale, groups = integer_weight(kind, 50, 1000)
    x = np.random.default_rng(1).standard_normal((80, 1000), np.float32)
    with using_isa(isa):
        want = linear(x, weight, scale, groups)
        for first, last in [(0, 1), (1, 3), (3, 12), (5, 70), (79, 80), (60, 80)]:
            np.testing.assert_array_equal(linear(x[first:last], weight, scale, groups), want[first:last])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_products_do_not_overflow(isa: str, kind: str, sign: int) -> None:
    """All codes at one end, against a row of one sign: the sums come near 2^31, and those of a group's codes near 2^15."""
    size = int(kind.removeprefix("int4-")) if kind != "int8" else 1
    depth = (1 << 17) // (64 * size) * 64 * size
    if kind == "int8":
        weight, groups = panels.pack_int8(np.full((1, depth), 127 * sign, np.int8)), None
    else:
        code, zero_point = (15, 0) if sign > 0 else (0, 15)
        weight = panels.pack_int4(np.full((1, depth), code, np.uint8), size)
        shape = (1, depth // size)
        groups = panels.pack_groups(np.full(shape, 8, np.uint8), np.full(shape, zero_point, np.uint8), depth, size)
    scale = np.ones(1, np.float32)
    for rows in (1, 20):
        x = np.full((rows, depth), 127, np.float32)
        with using_isa(isa):
            y = linear(x, weight, scale, groups)
        assert (y == np.float32(sign * 127 * depth * (127 if kind == "int8" else 120))).all()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("depth", [3, 64, 100])
@pytest.mark.parametrize("kind", ["int8", "int4-32"])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone(
    isa: str, kind: str, bad: float, depth: int
) -> None:
    weight, scale, groups = integer_weight(kind, 20, depth)
    x = np.ones((20, depth), np.float32)
    x[3, depth - 1] = bad
    with using_isa(isa):
        y = linear(x, weight, scale, groups)
    assert np.isnan(y[3]).all()
    np.testing.assert_array_equal(np.delete(y, 3, 0), reference.linear(np.delete(x, 3, 0), weight, None, scale, groups))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("exponent", [-149, -126, -101, -100, -99, 0, 120, 127])
def test_rows_of_any_size(isa: str, exponent: int) -> None:
    weight, scale, _ = integer_weight("int8", 20, 40)
    x = np.ldexp(np.random.default_rng(0).uniform(-1, 1, (3, 40)).astype(np.float32), exponent)
    x[0, 0] = np.ldexp(np.float32(1), exponent)
    with using_isa(isa):
        y = linear(x, weight, scale, None)
    with np.errstate(over="ignore"):
        want = reference.linear(x, weight, None, scale)
    np.testing.assert_array_equal(y, want)
    if -99 <= exponent <= 100:
        exact = x.astype(np.float64) @ (panels.unpack_int8(weight, 20, 40) * scale[:, None]).T.astype(np.float64)
        np.testing.assert_allclose(y, exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_rounded_to_within_half_a_127th_of_its_largest(kind: str) -> None:
    x = np.random.default_rng(5).standard_normal((9, 300), np.float32)
    values, scale = reference.round_rows(x)
    assert (np.abs(values).max(axis=1) == 127).all()
    assert (np.abs(values * scale[:, None] - x) <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("width", "depth"), [(20, 64), (33, 192), (16, 7)])
def test_embedding_gives_rows_of_the_weight(kind: str, width: int, depth: int) -> None:
    weight, scale, groups = integer_weight(kind, width, depth)
    ids = np.array([0, width - 1, 3, 3, 15], np.int32)
    y = run_node("Embedding", (ids, weight, scale, groups), depth=depth)
    np.testing.assert_array_equal(y, reference.embedding(ids, weight, scale, groups, depth=depth))
    one_hot = np.eye(width, dtype=np.float32)[ids]
    exact = one_hot @ reference.embedding(np.arange(width), weight, scale, groups, depth=depth)
    np.testing.assert_array_equal(y, exact)


@pytest.mark.parametrize("token", [-1, 20, 2**31 - 1, -(2**31)])
def test_embedding_refuses_a_token_that_is_no_row(token: int) -> None:
    weight, scale, groups = integer_weight("int4-32", 20, 64)
    with pytest.raises(Exception, match=rf"ids\[1\] is {token}, but weight has 20 rows"):
        run_node("Embedding", (np.array([0, token], np.int32), weight, scale, groups), depth=64)


def with_shape(array: Array, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.zeros(shape, array.dtype)


class TestWrongInputs:
    weight, scale, groups = integer_weight("int4-32", 20, 64)
    assert groups is not None
    groups: Array
    x = np.ones((2, 64), np.float32)

    @pytest.mark.parametrize("missing", ["scale", "groups"])
    def test_what_belongs_to_the_weight_is_missing(self, missing: str) -> None:
        given = {"scale": self.scale, "groups": self.groups} | {missing: None}
        with pytest.raises(Exception, match=f"{missing} is missing"):
            run_node("Linear", (self.x, self.weight, None, given["scale"], given["groups"]))

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((2, 8, 32), r"weight has shape \[2, 8, 32\], expected \[2, 8, 64\]"),
            ((3, 8, 64), r"weight has shape \[3, 8, 64\], expected \[2, 8, 64\]"),
            ((2, 512), r"weight has shape \[2, 512\], expected 3 dimensions"),
            ((2, 4, 64), r"weight has 32 columns; with integers it must be a multiple of 64"),
            ((2, 0, 64), r"the depth is 64, but weight has 0 columns"),
        ],
    )
    def test_weight(self, shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(Exception, match=message):
            linear(self.x, with_shape(self.weight, shape), self.scale, self.groups)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((1, 2, 16), r"groups has shape \[1, 2, 16\], expected \[2, 2, 16\]"),
            ((2, 3, 16), r"groups are of 0 columns"),
            ((2, 0, 16), r"groups are of 0 columns"),
            ((2, 64, 16), r"groups are of 1 columns; that must be a multiple of 8"),
            ((2, 32), r"groups has shape \[2, 32\], expected 3 dimensions"),
        ],
    )
    def test_groups(self, shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(Exception, match=message):
            linear(self.x, self.weight, self.scale, with_shape(self.groups, shape))

    def test_x_and_scale(self) -> None:
        with pytest.raises(Exception, match="the depth is 70, but weight has 64 columns"):
            linear(np.ones((2, 70), np.float32), self.weight, self.scale, self.groups)
        with pytest.raises(Exception, match=r"scale has shape \[20, 1\], expected 1 dimension"):
            linear(self.x, self.weight, self.scale[:, None], self.groups)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 20])
def test_sums_of_the_largest_codes_do_not_overflow_either(isa: str, sign: int, rows: int) -> None:
    depth, size, multiplier = 1024, 128, 8
    groups = panels.pack_groups(
        np.full((20, depth // size), multiplier, np.uint8), np.zeros((20, depth // size), np.uint8), depth, size
    )
    weight = panels.pack_int4(np.full((20, depth), 15, np.uint8), size)
    with using_isa(isa):
        y = linear(np.full((rows, depth), sign, np.float32), weight, np.ones(20, np.float32), groups)
    np.testing.assert_array_equal(
        y, np.float32(sign * 15 * multiplier * 127 * depth) * (np.float32(1) / np.float32(127))
    )
