"""How integer weights [N, K] lie in memory for the CPU's Linear: in the order in which its kernels read them.

A panel is 16 output channels. Four of its columns (a quad) are 64 bytes, the four of each channel together; with 4-bit codes, 64
bytes are two quads, the first in the low halves. N is filled up with zeros to whole panels, and K to `padded_depth`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PANEL_WIDTH = 16
_QUAD = 4
_DEPTH_UNIT = 64

Array = npt.NDArray[Any]


def padded_depth(depth: int, group_size: int = 1) -> int:
    """Columns of a panel for `depth` columns: a multiple of 64 and of the group size, which is a divisor or a multiple of 64."""
    unit = max(_DEPTH_UNIT, group_size)
    return -(-depth // unit) * unit


def num_panels(width: int) -> int:
    """Panels of `width` output channels."""
    return -(-width // PANEL_WIDTH)


def pack_int8(codes: npt.NDArray[np.int8], group_size: int = 1) -> npt.NDArray[np.int8]:
    """int8 [N, K] to panels [ceil(N / 16), padded_depth(K, group_size) / 4, 64]."""
    quads = _quads(codes, padded_depth(codes.shape[1], group_size))
    return np.ascontiguousarray(quads.reshape(*quads.shape[:2], PANEL_WIDTH * _QUAD))


def pack_int4(codes: npt.NDArray[np.uint8], group_size: int) -> npt.NDArray[np.uint8]:
    """uint8 [N, K] of 0 to 15 to panels [ceil(N / 16), padded_depth(K, group_size) / 8, 64]."""
    quads = _quads(codes, padded_depth(codes.shape[1], group_size))
    pairs: npt.NDArray[np.uint8] = quads[:, 0::2] | quads[:, 1::2] << 4
    return pairs.reshape(*pairs.shape[:2], PANEL_WIDTH * _QUAD)


def pack_groups(
    multiplier: npt.NDArray[np.uint8], zero_point: npt.NDArray[np.uint8], depth: int, group_size: int
) -> npt.NDArray[np.uint8]:
    """Multipliers and zero points [N, groups] of 0 to 15 to bytes [ceil(N / 16), padded_depth / group_size, 16]."""
    return pack_group_values(multiplier | zero_point << 4, depth, group_size)


def pack_group_values(values: Array, depth: int, group_size: int) -> Array:
    """What each group of a row has [N, groups] to [ceil(N / 16), padded_depth / group_size, 16]."""
    width, groups = values.shape
    filled = np.zeros((num_panels(width) * PANEL_WIDTH, padded_depth(depth, group_size) // group_size), values.dtype)
    filled[:width, :groups] = values
    return np.ascontiguousarray(filled.reshape(num_panels(width), PANEL_WIDTH, filled.shape[1]).swapaxes(1, 2))


def unpack_int8(panels: npt.NDArray[np.int8], width: int, depth: int) -> npt.NDArray[np.int8]:
    """What `pack_int8` was given."""
    return _matrix(panels)[:width, :depth]


def unpack_int4(
    panels: npt.NDArray[np.uint8], groups: npt.NDArray[np.uint8], width: int, depth: int
) -> npt.NDArray[np.int8]:
    """(code - zero point) * multiplier, int8 [N, K], of what `pack_int4` and `pack_groups` were given."""
    codes = _matrix(
        np.stack([panels & 15, panels >> 4], axis=2).reshape(len(panels), 2 * panels.shape[1], PANEL_WIDTH * _QUAD)
    )
    pairs = unpack_group_values(groups, len(codes), codes.shape[1])
    widened = (codes.astype(np.int8) - (pairs >> 4).astype(np.int8)) * (pairs & 15).astype(np.int8)
    return widened[:width, :depth]


def unpack_group_values(values: Array, width: int, padded: int) -> Array:
    """For each of the columns of a panel [N, padded] what its group has, of what `pack_group_values` returned."""
    count, groups, _ = values.shape
    rows: Array = values.swapaxes(1, 2).reshape(count * PANEL_WIDTH, groups)[:width]
    return np.repeat(rows, padded // max(1, groups), axis=1)


def _quads(codes: Array, depth: int) -> Array:
    """[panels, depth / 4, 16, 4]"""
    width, given = codes.shape
    panels = num_panels(width)
    filled = np.zeros((panels * PANEL_WIDTH, depth), codes.dtype)
    filled[:width, :given] = codes
    return filled.reshape(panels, PANEL_WIDTH, depth // _QUAD, _QUAD).swapaxes(1, 2)


def _matrix(panels: Array) -> Array:
    """Panels of quads [panels, quads, 64] to [16 * panels, 4 * quads]."""
    count, quads, _ = panels.shape
    return panels.reshape(count, quads, PANEL_WIDTH, _QUAD).swapaxes(1, 2).reshape(count * PANEL_WIDTH, quads * _QUAD)
