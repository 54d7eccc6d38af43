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
@pytest.mark.parametrize("depth", [96, 1100, 2053])
def test_a_row_has_the_same_bits_whatever_else_is_computed(isa: str, weight_type: npt.DTypeLike, depth: int) -> None:
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((140, depth), np.float32)
    weight = rng.standard_normal((37, depth), np.float32).astype(weight_type)
    with using_isa(isa):
        want = run_linear(x, weight)
        for first, last in [(0, 1), (1, 3), (3, 6), (5, 70), (139, 140), (60, 140)]:
            np.testing.assert_array_equal(run_linear(x[first:last], weight), want[first:last])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("weight_type", [np.float16, ml_dtypes.bfloat16])
def test_every_value_of_a_short_type_is_read_exactly(isa: str, weight_type: npt.DTypeLike) -> None:
    weight = np.arange(65536, dtype=np.uint16).view(weight_type)
    finite = np.isfinite(weight.astype(np.float32))
    weight = np.where(finite, weight, np.zeros(1, weight_type)).astype(weight_type)
    x = np.zeros((8, 8), np.float32)
    np.fill_diagonal(x, 1)
    with using_isa(isa):
        y = run_linear(x, weight.reshape(-1, 8))
    np.testing.assert_array_equal(y.T.ravel(), weight.astype(np.float32))


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
