"""Weight formats: what they keep of a matrix, what they promise to the kernels, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.exporter.quantize import GROUP_SIZES, Int4Weight, Int8Weight, QuantizedWeight
from qwenrt.plugins import ConfigError

Floats = npt.NDArray[np.float32]
Encode = Callable[[Floats], QuantizedWeight]


def gaussian(width: int, depth: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((width, depth), dtype=np.float32) * np.float32(0.02)


def test_int8_is_off_by_half_a_step_at_most_and_keeps_the_largest() -> None:
    weight = gaussian(40, 300)
    stored = Int8Weight.encode(weight)
    assert stored.codes.dtype == np.int8 and stored.scale.dtype == np.float32 and stored.decode().dtype == np.float32
    assert (np.abs(stored.decode() - weight) <= stored.scale[:, None] * 0.5001).all()
    assert (np.abs(stored.codes).max(axis=1) == 127).all()
    assert 0.005 < stored.error(weight) < 0.012


@pytest.mark.parametrize(("group_size", "most"), [(32, 0.083), (64, 0.092), (128, 0.1)])
def test_int4_of_gaussian_weights_loses_what_it_should(group_size: int, most: float) -> None:
    weight = gaussian(64, 1024)
    stored = Int4Weight.encode(weight, group_size=group_size)
    assert stored.decode().dtype == np.float32
    assert 0.9 * most < stored.error(weight) < most
    assert stored.error(weight) < Int4Weight.encode(weight, group_size=group_size, symmetric=True).error(weight)


def test_int4_beats_plain_rounding_to_the_largest_of_a_group() -> None:
    weight = gaussian(64, 1024)
    groups = weight.reshape(64, 32, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = (np.rint(groups / step) * step).reshape(weight.shape)
    for symmetric in (False, True):
        error = Int4Weight.encode(weight, symmetric=symmetric).error(weight)
        assert error < 0.95 * np.linalg.norm(plain - weight) / np.linalg.norm(weight)


@pytest.mark.parametrize("depth", [1, 31, 32, 100, 384])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_is_exactly_int8_times_a_scale(depth: int, group_size: int, symmetric: bool) -> None:
    random = np.random.default_rng(depth)
    # Groups of very different sizes and offsets, so that every multiplier and zero point occurs.
    weight = (
        random.standard_normal((50, depth)) * np.exp(random.standard_normal(depth)) + random.standard_normal(depth)
    ).astype(np.float32)
    stored = Int4Weight.encode(weight, group_size=group_size, symmetric=symmetric)
    groups = -(-depth // group_size)
    assert stored.codes.shape == (50, depth) and stored.zero_point.shape == stored.multiplier.shape == (50, groups)
    assert stored.codes.max() <= 15 and stored.multiplier.min() >= 1 and stored.multiplier.max() <= 15
    assert (stored.zero_point == 8).all() if symmetric else stored.zero_point.max() <= 15
    reach = np.maximum(stored.zero_point, 15 - stored.zero_point).astype(int) * stored.multiplier
    assert reach.max() <= 127
    group = np.arange(depth) // group_size
    exact = (stored.codes.astype(int) - stored.zero_point[:, group]) * stored.multiplier[:, group].astype(int)
    np.testing.assert_array_equal(stored.widened(), exact)
    np.testing.assert_array_equal(stored.decode(), exact.astype(np.float32) * stored.scale[:, None])
    by_group = (stored.codes - stored.zero_point[:, group].astype(np.float32)) * stored.group_scale()[:, group]
    np.testing.assert_allclose(by_group, stored.decode(), rtol=1e-6)


def test_a_row_is_encoded_the_same_in_any_company() -> None:
    weight = gaussian(300, 1000)
    whole, alone = Int4Weight.encode(weight), Int4Weight.encode(weight[211:212])
    np.testing.assert_array_equal(whole.codes[211:212], alone.codes)
    np.testing.assert_array_equal(whole.decode()[211:212], alone.decode())


def test_encoding_again_changes_next_to_nothing() -> None:
    """What a checkpoint was quantised to survives being quantised here."""
    weight = Int4Weight.encode(gaussian(64, 1024)).decode()
    assert Int4Weight.encode(weight).error(weight) < 0.03
    weight = Int8Weight.encode(gaussian(64, 1024)).decode()
    assert Int8Weight.encode(weight).error(weight) < 1e-6


@pytest.mark.parametrize("encode", [Int8Weight.encode, Int4Weight.encode])
class TestExtremes:
    @pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (1, 1)])
    def test_empty_and_tiny(self, encode: Encode, shape: tuple[int, int]) -> None:
        stored = encode(np.ones(shape, np.float32))
        np.testing.assert_allclose(stored.decode(), np.ones(shape), rtol=1e-6)

    @pytest.mark.parametrize("value", [0.0, 1e-44, 1e-38, 3e38])
    def test_magnitudes(self, encode: Encode, value: float) -> None:
        weight = np.full((3, 64), value, np.float32)
        weight[1] *= -1
        decoded = encode(weight).decode()
        assert np.isfinite(decoded).all()
        np.testing.assert_allclose(decoded, weight, rtol=1e-5, atol=1e-42)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_refused(self, encode: Encode, value: float) -> None:
        weight = np.ones((3, 64), np.float32)
        weight[2, 7] = value
        with pytest.raises(ConfigError, match="NaN or infinite"):
            encode(weight)


def test_another_group_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size is 48, must be one of 32, 64, 128"):
        Int4Weight.encode(np.ones((1, 48), np.float32), group_size=48)


def rows_of(low: int, high: int, seed: int = 3) -> tuple[npt.NDArray[np.int16], Floats]:
    random = np.random.default_rng(seed)
    return random.integers(low, high + 1, (37, 200)).astype(np.int16), random.uniform(0.001, 0.1, 37).astype(np.float32)


def test_rows_of_int8_multiples_are_kept_to_the_bit() -> None:
    codes, scale = rows_of(-128, 127)
    codes[:5] //= 3  # rows whose largest is not 127
    weight = codes * scale[:, None]
    stored = Int8Weight.encode(weight, scale)
    np.testing.assert_array_equal(stored.codes, codes)
    np.testing.assert_array_equal(stored.decode(), weight)
    assert Int8Weight.encode(weight).error(weight) > 0
    codes[7, 3] = -129
    weight = codes * scale[:, None]
    kept = (Int8Weight.encode(weight, scale).decode() == weight).all(axis=1)
    assert list(np.flatnonzero(~kept)) == [7]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_of_int4_multiples_are_kept_to_the_bit(group_size: int) -> None:
    codes, scale = rows_of(-8, 7)
    codes[::2] += 4  # other zero points
    weight = codes * scale[:, None]
    stored = Int4Weight.encode(weight, scale, group_size=group_size)
    np.testing.assert_array_equal(stored.decode(), weight)
    assert (stored.multiplier == 1).all()
    codes[7, 3] = 20
    weight = codes * scale[:, None]
    assert not (Int4Weight.encode(weight, scale, group_size=group_size).decode()[7] == weight[7]).all()
    scale[4] = np.nan
    assert Int4Weight.encode(weight, scale, group_size=group_size).scale[4] > 0
