"""The integers of a quantised matrix as its checkpoint has them, in a form that the CPU's Linear takes: nothing is rounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
GROUP_SIZES = (128, 64, 32, 16, 8)
"""Columns that may share a scale in Linear, the cheapest first."""
ROW_GROUP = 128
"""Columns of the groups that 4-bit codes lie in where a row has one scale."""


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """What a matrix needs: weight = (code - zero point) * scale + offset, the last three for each row and group of columns.

    bits: 4 for codes and zero points from 0 to 15; 8 for int8, without zero points. group_size: columns of a group; 0: all of a
    row. offset: whether there are offsets, which only groups have.
    """

    bits: int
    group_size: int
    offset: bool = False

    def joined(self, other: IntegerFormat) -> IntegerFormat:
        """The format that holds the matrices of both: the finer groups for all."""
        sizes = [size for size in (self.group_size, other.group_size) if size]
        return IntegerFormat(max(self.bits, other.bits), min(sizes, default=0), self.offset or other.offset)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Some rows of a matrix, to the bit as the checkpoint has them."""

    codes: Array
    """[n, K], uint8 from 0 to 15 or int8."""
    group_size: int
    """Columns of a group."""
    scale: Floats
    """[n, groups]"""
    zero_point: npt.NDArray[np.uint8] | None = None
    """[n, groups], with uint8."""
    offset: Floats | None = None
    """[n, groups]; None: zeros."""

    def arranged(self, form: IntegerFormat) -> tuple[Array, ...]:
        """As `form` has them: codes [n, K]; scales of rows [n]; for 4 bits zero points; and with groups their scales and offsets.

        What groups have is [n, groups], of `form` or of `ROW_GROUP` columns. The groups of `form` divide those that are here.
        """
        width, depth = self.codes.shape
        groups = np.arange(0, depth, form.group_size or ROW_GROUP) // self.group_size
        parts: list[Array] = [self._int8() if form.bits == 8 else self.codes]
        parts.append(np.ones(width, np.float32) if form.group_size else self.scale[:, 0])
        if form.bits == 4:
            assert self.zero_point is not None
            parts.append(self.zero_point[:, groups])
        if form.group_size:
            parts.append(self.scale[:, groups])
        if form.offset:
            offset = np.zeros_like(self.scale) if self.offset is None else self.offset
            parts.append(offset[:, groups])
        return tuple(parts)

    def _int8(self) -> npt.NDArray[np.int8]:
        if self.zero_point is None:
            return self.codes.astype(np.int8, copy=False)
        groups = np.arange(self.codes.shape[1]) // self.group_size
        return self.codes.astype(np.int8) - self.zero_point.astype(np.int8)[:, groups]
