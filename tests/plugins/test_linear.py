"""Linear: against float64, and what a row's bits may depend on."""

from __future__ import annotations

import mmap
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import reference

from .ops import isas, run_linear, using_isa

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [
        (0, 8, 8),
        (1, 1, 1),
        (1, 8, 32),
        (2, 7, 33),
        (3, 64, 5),
        (5, 1025, 31),
        (67, 40, 3),
        (130, 24, 70),
        (16, 32, 64),
        (17, 160, 79),
        (70, 257, 300),
        (4, 0, 3),
        (3, 5, 0),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_a_float64_product(
    isa: str, weight_type: npt.DTypeLike, rows: int, depth: int, width: int, with_bias: bool
) -> None:
    rng = np.random.default_rng(rows * depth + width)
    x = rng.standard_normal((rows, depth), np.float32)
    weight = rng.standard_normal((width, depth), np.float32).astype(weight_type)
    bias = rng.standard_normal(width, np.float32) if with_bias else None
    with using_isa(isa):
        y = run_linear(x, weight, bias)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, reference.linear(x, weight, bias), rtol=1e-5, atol=1e-5 * max(depth, 1) ** 0.5)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("depth", [31, 32, 96, 1100, 2053])
def test_a_row_has_the_same_bits_whatever_else_is_computed(isa: str, weight_type: npt.DTypeLike, depth: int) -> None:
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((140, depth), np.float32)
    weight = rng.standard_normal((37, depth), np.float32).astype(weight_type)
    with using_isa(isa):
        want = run_linear(x, weight)
        for first, last in [(0, 1), (1, 3), (3, 6), (9, 25), (5, 70), (139, 140), (60, 140)]:
            np.testing.assert_array_equal(run_linear(x[first:last], weight), want[first:last])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("depth", [8, 64])
def test_every_value_of_a_short_type_is_read_exactly(isa: str, weight_type: npt.DTypeLike, depth: int) -> None:
    """Tiles take bfloat16s below 2^-126 as 0."""
    weight = np.arange(65536, dtype=np.uint16).view(weight_type)
    finite = np.isfinite(weight.astype(np.float32))
    weight = np.where(finite, weight, np.zeros(1, weight_type)).astype(weight_type)
    with using_isa(isa):
        y = run_linear(np.eye(depth, dtype=np.float32), weight.reshape(-1, depth))
    want = weight.astype(np.float32)
    if isa == "amx" and depth >= 32:
        want[np.abs(want) < 2.0**-126] = 0
    np.testing.assert_array_equal(y.T.ravel(), want)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("depth", [1024, 3072])
def test_rounding_errors_are_those_of_sums_in_float32(isa: str, weight_type: npt.DTypeLike, depth: int) -> None:
    """A sum's in float32, in as many parts as a register has lanes."""
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((32, depth), np.float32)
    weight = rng.standard_normal((256, depth), np.float32).astype(weight_type)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    with using_isa(isa):
        error = run_linear(x, weight) - exact
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight.astype(np.float64), axis=1)
    lanes = {"portable": 4, "avx2": 8}.get(isa, 16)
    assert np.sqrt(np.mean((error / size) ** 2)) < 2.0**-24 * 0.4 / lanes**0.5
    assert abs(np.vdot(error, exact) / np.vdot(exact, exact)) < 2.0**-25  # towards 0 or away from it


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(isa: str, weight_type: npt.DTypeLike, rows: int) -> None:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((70, 100), np.float32).astype(weight_type)
    x = rng.standard_normal((rows, 100), np.float32)
    row, column = rows - 1, 67
    signalling = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    with using_isa(isa):
        plain = run_linear(x, weight)
        for value in (np.nan, np.inf, -np.inf, *signalling):
            bad = x.copy()
            bad[row, column] = value
            y = run_linear(bad, weight)
            assert not np.isfinite(y[row]).any()
            np.testing.assert_array_equal(y[:row], plain[:row])
        x[row, column] = np.finfo(np.float32).max
        assert np.isfinite(run_linear(x, weight / 16)).all()
        for value in (np.nan, np.inf, -np.inf):
            bad = weight.copy()
            bad[5, column] = value
            y = run_linear(x / 16, bad)
            assert not np.isfinite(y[:, 5]).any()
            assert np.isfinite(np.delete(y, 5, axis=1)).all()


@pytest.mark.parametrize("weight_type", TYPES)
def test_weights_lie_anywhere_in_a_file(tmp_path: Path, weight_type: npt.DTypeLike) -> None:
    """A safetensors file aligns tensors to their element at best."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((33, 70), np.float32).astype(weight_type)
    offset = 128 + weight.itemsize
    path = tmp_path / "weights"
    path.write_bytes(bytes(offset) + weight.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        mapped = np.frombuffer(memory, weight_type, weight.size, offset).reshape(weight.shape)
        x = rng.standard_normal((2, 70), np.float32)
        np.testing.assert_array_equal(run_linear(x, mapped), run_linear(x, weight))
        del mapped


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ((2, 5), (3, 6), None, r"weight has shape \[3, 6\], expected \[3, 5\]"),
        ((2, 5), (3, 5), (4,), r"bias has shape \[4\], expected \[3\]"),
        ((2, 5, 1), (3, 5), None, r"x has shape \[2, 5, 1\], expected 2 dimensions"),
        ((2, 5), (15,), None, r"weight has shape \[15\], expected 2 dimensions"),
        ((2, 5), (3, 5), (3, 1), r"bias has shape \[3, 1\]"),
    ],
)
def test_a_wrong_shape_is_named(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, message: str
) -> None:
    arrays = [None if shape is None else np.zeros(shape, np.float32) for shape in (x, weight, bias)]
    with pytest.raises(Exception, match=message):
        run_linear(arrays[0], arrays[1], arrays[2])
