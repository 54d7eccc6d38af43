"""The integers in the blocks of a GGUF file, with their scales and offsets: weight = code * scale + offset.

The layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block has 32 columns (halves d and m,
codes) or 256 (8 or 16 groups whose scales are small integers times d). Products of a half and so few bits are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .gguf_file import BLOCKS
from .integers import IntegerFormat, Integers

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class _Blocks(NamedTuple):
    """Of n blocks the codes [n, columns], and scales and offsets [n, groups]."""

    codes: Array
    scale: Array
    offset: Array | None = None


def _q4_0(blocks: Bytes) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 2:18], 16), _halves(blocks[:, :2]))


def _q4_1(blocks: Bytes) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 4:20], 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> _Blocks:
    codes = _nibbles(blocks[:, 6:22], 16) | _bits(blocks[:, 2:6]) << 4
    return _Blocks(codes.astype(np.int8) - np.int8(16), _halves(blocks[:, :2]))


def _q5_1(blocks: Bytes) -> _Blocks:
    codes = _nibbles(blocks[:, 8:24], 16) | _bits(blocks[:, 4:8]) << 4
    return _Blocks(codes.astype(np.int8), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> _Blocks:
    return _Blocks(blocks[:, 2:34].view(np.int8), _halves(blocks[:, :2]))


def _q4_k(blocks: Bytes) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 16:144], 32), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> _Blocks:
    # Bit g of byte i is the fifth of column i of group g.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(blocks), 256)
    codes = _nibbles(blocks[:, 48:176], 32) | high << 4
    return _Blocks(codes.astype(np.int8), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> _Blocks:
    # In each half of a block, pairs of bits i of byte j belong to column 32 * i + j.
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(blocks), 256)
    codes = _nibbles(blocks[:, :128], 64) | high << 4
    scale = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _Blocks(codes.astype(np.int8) - np.int8(32), scale)


_READERS: dict[str, tuple[IntegerFormat, Callable[[Bytes], _Blocks]]] = {
    "Q4_0": (IntegerFormat(4, 32), _q4_0),
    "Q4_1": (IntegerFormat(4, 32, offset=True), _q4_1),
    "Q5_0": (IntegerFormat(8, 32), _q5_0),
    "Q5_1": (IntegerFormat(8, 32, offset=True), _q5_1),
    "Q8_0": (IntegerFormat(8, 32), _q8_0),
    "Q4_K": (IntegerFormat(4, 32, offset=True), _q4_k),
    "Q5_K": (IntegerFormat(8, 32, offset=True), _q5_k),
    "Q6_K": (IntegerFormat(8, 16), _q6_k),
}
FORMATS = {kind: form for kind, (form, _) in _READERS.items()}
"""What a matrix of each type needs; types of other names are not read here."""


def read_rows(rows: Bytes, kind: str) -> Integers:
    """Rows of blocks [n, bytes] of a type of `FORMATS`."""
    form, read = _READERS[kind]
    columns, size = BLOCKS[kind]
    blocks = rows.shape[1] // size
    codes, scale, offset = read(rows.reshape(-1, size))
    scale = scale.reshape(len(rows), -1)
    zero = None
    if form.bits == 4:
        zero = np.full(scale.shape, 0 if form.offset else 8, np.uint8)
    return Integers(
        codes.reshape(len(rows), blocks * columns),
        form.group_size,
        scale,
        zero,
        None if offset is None else offset.reshape(scale.shape),
    )


def _halves(bytes_: Bytes) -> npt.NDArray[np.float32]:
    """[n, 2 m] bytes as m halves, in float32."""
    return np.ascontiguousarray(bytes_).view("<f2").astype(np.float32)


def _nibbles(bytes_: Bytes, run: int) -> Bytes:
    """Codes of each `run` bytes: first all low halves, then all high ones."""
    runs = bytes_.reshape(len(bytes_), -1, run)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(bytes_), 2 * bytes_.shape[1])


def _bits(bytes_: Bytes) -> Bytes:
    """Each bit, the lowest first."""
    return np.unpackbits(bytes_, axis=1, bitorder="little")


def _k_scales(blocks: Bytes) -> tuple[Array, Array]:
    """Scales and offsets of 8 groups, from d, dmin, and 6 bits each in 12 bytes."""
    low, middle, high = (blocks[:, 4 + first : 8 + first] for first in (0, 4, 8))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return _halves(blocks[:, :2]) * scales, -(_halves(blocks[:, 2:4]) * minima)
