"""Weight formats of 8 and 4 bits: how a matrix becomes integers, and how far off it then is.

A row of a matrix [N, K] is the weights of one output channel. Both formats are integers times one float32 scale per row: a
product with an int8 row of activations is then exact in int32, whatever the order of its sums, and is scaled once at its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

GROUP_SIZES = (32, 64, 128)
INT8_MAX = 127
_INT4_MAX = 15
_SYMMETRIC_ZERO = 8
_BLOCK_ELEMENTS = 1 << 16
"""Encoded at a time, so that the search works in a core's cache."""


class QuantizedWeight(ABC):
    """A matrix [N, K] in integers."""

    @abstractmethod
    def decode(self) -> Floats:
        """The matrix [N, K] that the integers stand for, float32."""

    def error(self, weight: Floats) -> float:
        """Relative error against the matrix that was encoded: |decoded - weight| / |weight|, Frobenius norms; 0 for zeros."""
        size = float(np.linalg.norm(weight))
        return float(np.linalg.norm(self.decode() - weight)) / size if size else 0.0


@dataclass(frozen=True)
class Int8Weight(QuantizedWeight):
    """Symmetric, one scale per output channel: weight = code * scale."""

    codes: npt.NDArray[np.int8]
    """[N, K], from -127 to 127, or -128 where a checkpoint has it."""
    scale: Floats
    """[N]"""

    @classmethod
    def encode(cls, weight: Floats, known: Floats | None = None) -> Self:
        """Quantise float32 [N, K]: a row's largest magnitude becomes 127. Raises ConfigError for a NaN or an infinity.

        known: [N], of what a row may be multiples already, or NaN. A row that is, of -128 to 127, is kept as it is, to the bit.
        """
        _check_finite(weight)
        scale = np.abs(weight).max(axis=1, initial=0) / np.float32(INT8_MAX)
        if known is not None:
            scale = np.where(_multiples(weight, known, -INT8_MAX - 1, INT8_MAX), known, scale)
        codes = np.rint(weight / _divisor(scale)[:, None])
        return cls(np.clip(codes, -INT8_MAX - 1, INT8_MAX).astype(np.int8), scale)

    def decode(self) -> Floats:
        """The matrix [N, K], float32."""
        return self.codes * self.scale[:, None]


@dataclass(frozen=True)
class Int4Weight(QuantizedWeight):
    """4-bit codes in groups along K, on two levels: weight = (code - zero_point) * multiplier * scale.

    A group's scale is a small integer times its row's scale, chosen such that (code - zero_point) * multiplier fits int8: the
    matrix can be widened to int8 with nothing lost (progressive group quantisation, as in QServe, Lin et al., 2024), and a group
    costs a byte where a float16 scale costs two.
    """

    codes: Codes
    """[N, K], from 0 to 15."""
    zero_point: Codes
    """[N, ceil(K / group_size)], from 0 to 15; 8 everywhere if symmetric."""
    multiplier: Codes
    """[N, ceil(K / group_size)], from 1 to 15; multiplier * max(zero_point, 15 - zero_point) is at most 127."""
    scale: Floats
    """[N]"""
    group_size: int

    @classmethod
    def encode(
        cls, weight: Floats, known: Floats | None = None, *, group_size: int = 32, symmetric: bool = False
    ) -> Self:
        """Quantise float32 [N, K] with the multipliers and zero points that give the least squared error.

        group_size: 32, 64 or 128 columns share a multiplier and a zero point; the last group may have fewer. symmetric: every
        zero point is 8. known: [N], of what a row may be multiples already, or NaN; a row that is, within 16 neighbouring ones,
        is kept as it is, to the bit. Raises ConfigError for another group size, a NaN or an infinity.
        """
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"group_size is {group_size!r}, must be one of {', '.join(map(str, GROUP_SIZES))}")
        _check_finite(weight)
        width, depth = weight.shape
        rows = max(1, _BLOCK_ELEMENTS // max(1, depth))
        blocks = [
            _encode_block(weight[first : first + rows], group_size, symmetric)
            for first in range(0, max(1, width), rows)
        ]
        codes, zero_point, multiplier, scale = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        if known is not None:
            whole = np.rint(weight / _divisor(known)[:, None])
            lowest = np.clip(whole.min(axis=1, initial=0), -8 if symmetric else -_INT4_MAX, 0)
            zero = np.full_like(lowest, _SYMMETRIC_ZERO) if symmetric else -lowest
            kept = _multiples(weight, known, -zero, _INT4_MAX - zero)
            codes[kept] = whole[kept] + zero[kept, None]
            zero_point[kept], multiplier[kept], scale[kept] = zero[kept, None], 1, known[kept]
        return cls(codes, zero_point, multiplier, scale, group_size)

    def widened(self) -> npt.NDArray[np.int8]:
        """(code - zero_point) * multiplier [N, K]: the matrix is this times `scale`, exactly."""
        repeat = np.arange(self.codes.shape[1]) // self.group_size
        zero_point, multiplier = self.zero_point.astype(np.int8), self.multiplier.astype(np.int8)
        return (self.codes.astype(np.int8) - zero_point[:, repeat]) * multiplier[:, repeat]

    def group_scale(self) -> Floats:
        """multiplier * scale [N, groups]: weight = (code - zero_point) * this, for those who know one level only."""
        return self.multiplier * self.scale[:, None]

    def decode(self) -> Floats:
        """The matrix [N, K], float32."""
        return self.widened() * self.scale[:, None]


def _encode_block(weight: Floats, group_size: int, symmetric: bool) -> tuple[Codes, Codes, Codes, Floats]:
    """Codes, zero points, multipliers and scales of a few rows."""
    width, depth = weight.shape
    groups = math.ceil(depth / group_size)
    padded = np.pad(weight, ((0, 0), (0, groups * group_size - depth))).reshape(width, groups, group_size)
    low, high = padded.min(axis=2, initial=0), padded.max(axis=2, initial=0)
    # The largest magnitude of a row is 8 steps of its group's largest possible multiplier.
    scale = np.maximum(high, -low).max(axis=1, initial=0) / np.float32(_SYMMETRIC_ZERO * _INT4_MAX)
    unit = padded / _divisor(scale)[:, None, None]
    low, high = low / _divisor(scale)[:, None], high / _divisor(scale)[:, None]
    # The multiplier that clips nothing, and those below it, which clip a little and round finer.
    enough = np.ceil(np.maximum(high / 7, -low / 8) if symmetric else (high - low) / _INT4_MAX)
    best: list[Any] = []
    for less in range(4):
        multiplier = np.clip(enough - less, 1, _INT4_MAX)
        if symmetric:
            zero_point = np.full_like(multiplier, _SYMMETRIC_ZERO)
        else:
            bound = np.floor(INT8_MAX / multiplier)
            middle = np.rint(_INT4_MAX / 2 - (low + high) / 2 / multiplier)
            zero_point = np.clip(middle, np.maximum(0, _INT4_MAX - bound), np.minimum(_INT4_MAX, bound))
        exact = unit / multiplier[:, :, None] + zero_point[:, :, None]
        codes = np.clip(np.rint(exact), 0, _INT4_MAX)
        error = np.square(codes - exact).sum(axis=2) * np.square(multiplier)
        found = [error, codes, zero_point, multiplier]
        best = _better(found, best) if best else found
    _, codes, zero_point, multiplier = best
    flat = codes.reshape(width, groups * group_size)[:, :depth]
    return flat.astype(np.uint8), zero_point.astype(np.uint8), multiplier.astype(np.uint8), scale


def _better(found: Sequence[Floats], best: Sequence[Floats]) -> list[Floats]:
    """Per group, all of whichever has the smaller error, which comes first."""
    less = found[0] < best[0]
    return [
        np.where(less if new.ndim == 2 else less[:, :, None], new, old) for new, old in zip(found, best, strict=True)
    ]


def _multiples(weight: Floats, scale: Floats, low: Floats | int, high: Floats | int) -> npt.NDArray[np.bool_]:
    """[N]: which rows are `scale` times integers from low to high, to the bit; none whose scale is NaN."""
    whole = np.rint(weight / _divisor(scale)[:, None])
    fits = whole * scale[:, None] == weight
    fits &= (whole >= np.reshape(low, (-1, 1))) & (whole <= np.reshape(high, (-1, 1)))
    kept: npt.NDArray[np.bool_] = fits.all(axis=1) & (scale > 0)
    return kept


def _check_finite(weight: Floats) -> None:
    if not np.isfinite(weight).all():
        raise ConfigError("a weight is NaN or infinite, so the matrix cannot be quantised")


def _divisor(scale: Floats) -> Floats:
    """The scale, or 1 where it is 0 and so is all that it scales."""
    return np.where(scale > 0, scale, np.float32(1))
