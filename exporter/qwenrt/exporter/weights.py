"""The engine's weight file: one safetensors file that the graph's external data points into, written matrix by matrix."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .checkpoint import Checkpoint
from .safetensors_file import DTYPES, widened

PAGE = 4096
_CHUNK_ELEMENTS = 1 << 22
_BLOCK_ELEMENTS = 1 << 20
_CODES = {name: code for code, name in DTYPES.items()} | {"uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
_ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class Encoding(Protocol):
    """How a matrix of the checkpoint becomes other tensors: codes, scales."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the file; row i of each is made from row i of the matrix."""

    def encode(self, rows: Floats, scales: Floats | None = None) -> tuple[Array, ...]:
        """The rows [n, K] as rows of each tensor, in the type that it is stored in (bfloat16 as uint16).

        scales: [n], of what each row is multiples where the checkpoint is quantised so, else NaN.
        """


class KeptEncoding(Protocol):
    """How a quantised matrix of the checkpoint becomes other tensors without being decoded."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the file."""

    def blocks(self, checkpoint: Checkpoint) -> Iterator[tuple[Array, ...]]:
        """The next values of each tensor, from its first to its last, in the type that it is stored in."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A checkpoint tensor, or one of `count` equal parts of it along `axis`."""

    tensor: str
    axis: int = 0
    index: int = 0
    count: int = 1

    def of(self, tensor: Array) -> Array:
        """A view of the part."""
        size = tensor.shape[self.axis] // self.count
        part: Array = tensor[(slice(None),) * self.axis + (slice(self.index * size, (self.index + 1) * size),)]
        return part


@dataclasses.dataclass(frozen=True)
class Contents:
    """Where the values of the file's tensors come from.

    sources: for each parameter of the model, the checkpoint tensors or parts that it is made of, one below the other; computed:
    tensors that are in no checkpoint; encodings: parameters that the file holds encoded; kept: those that it holds so as the
    checkpoint does.
    """

    sources: Mapping[str, tuple[Part, ...]]
    computed: Mapping[str, Array]
    encodings: Mapping[str, Encoding]
    kept: Mapping[str, KeptEncoding]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor of the file: dtype, shape, and its bytes' place in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The whole file before it is written: its first bytes, and where each tensor goes."""

    header: bytes
    tensors: dict[str, Placed]
    size: int


def plan_layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """Place tensors given as name -> (dtype, shape).

    The data starts on a page. safetensors allows no holes between tensors, so those that fill whole pages come first: each of
    them starts on a page too, and can be mapped by itself. The others follow by item size, so that all are aligned.
    """

    def size(name: str) -> int:
        dtype, shape = tensors[name]
        return math.prod(shape) * _ITEM_SIZES[dtype]

    order = sorted(tensors, key=lambda name: (size(name) % PAGE != 0, -_ITEM_SIZES[tensors[name][0]]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [offset, offset + size(name)]}
        offset += size(name)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: Placed(*tensors[name], len(header) + entries[name]["data_offsets"][0], size(name)) for name in order
    }
    return Layout(header, placed, len(header) + offset)


def write_weights(
    path: Path, layout: Layout, checkpoint: Checkpoint, contents: Contents, progress: Callable[[int, int], None]
) -> None:
    """Write the file.

    Converts in chunks; memory stays below a few hundred MiB beyond the largest tensor of the checkpoint. `progress` is called
    with bytes written and bytes in all. Raises ConfigError if a value does not fit the file's type.
    """
    encodings: dict[str, Encoding | KeptEncoding] = {**contents.encodings, **contents.kept}
    encoded = {name for encoding in encodings.values() for name in encoding.names}
    with path.open("xb", buffering=0) as file:
        descriptor = file.fileno()
        done = _write(descriptor, 0, layout.header)
        for name, place in layout.tensors.items():
            offset = place.offset
            for chunk in () if name in encoded else _chunks(name, checkpoint, contents):
                count = _write(descriptor, offset, _converted(chunk, place.dtype, name))
                offset, done = offset + count, done + count
                progress(done, layout.size)
        for name, encoding in encodings.items():
            offsets = [layout.tensors[part].offset for part in encoding.names]
            for parts in _encoded(name, checkpoint, contents):
                for index, part in enumerate(parts):
                    count = _write(descriptor, offsets[index], np.ascontiguousarray(part))
                    offsets[index], done = offsets[index] + count, done + count
                progress(done, layout.size)
        assert done == layout.size


def _chunks(name: str, checkpoint: Checkpoint, contents: Contents) -> Iterator[Array]:
    """Flat pieces of a tensor, in the types that they are stored in (bfloat16 as uint16)."""
    if name in contents.computed:
        yield contents.computed[name].reshape(-1)
        return
    for tensor, sources in itertools.groupby(contents.sources[name], key=lambda source: source.tensor):
        whole = checkpoint.read(tensor)
        for source in sources:
            part = source.of(whole)
            rows = max(1, _CHUNK_ELEMENTS // math.prod(part.shape[1:]))
            for start in range(0, len(part), rows):
                yield part[start : start + rows].reshape(-1)
        checkpoint.forget(tensor)


def _encoded(name: str, checkpoint: Checkpoint, contents: Contents) -> Iterator[tuple[Array, ...]]:
    """The values of the tensors that a parameter is encoded in, some rows at a time."""
    if name in contents.kept:
        yield from contents.kept[name].blocks(checkpoint)
        return
    for rows, scales in _row_blocks(name, checkpoint, contents):
        yield contents.encodings[name].encode(rows, scales)


def _row_blocks(name: str, checkpoint: Checkpoint, contents: Contents) -> Iterator[tuple[Floats, Floats]]:
    """A matrix in blocks of whole rows, float32, with the rows' scales; each but the last has a multiple of 16 rows."""
    rest: list[tuple[Floats, Floats]] = []
    for source in contents.sources[name]:
        matrix, scales = source.of(checkpoint.read(source.tensor)), checkpoint.row_scales(source.tensor)
        if scales is None:
            scales = np.full(len(matrix), np.nan, np.float32)
        rows = max(1, _BLOCK_ELEMENTS // (16 * matrix.shape[1])) * 16
        start = 0
        while start < len(matrix):
            wanted = rows - sum(len(part) for part, _ in rest)
            rest.append((widened(matrix[start : start + wanted]), scales[start : start + wanted]))
            start += wanted
            if sum(len(part) for part, _ in rest) == rows:
                yield _joined(rest)
                rest = []
        checkpoint.forget(source.tensor)
    if rest:
        yield _joined(rest)


def _joined(parts: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    matrices, scales = zip(*parts, strict=True)
    return np.concatenate(matrices), np.concatenate(scales)


def _converted(values: Array, dtype: str, name: str) -> Array:
    """The values as `dtype`, rounded to nearest even; raises ConfigError where float16 would overflow."""
    if values.dtype == np.uint16 and dtype == "bfloat16":
        return values
    if values.dtype == np.uint16:
        values = widened(values)
    if dtype == "bfloat16":
        return rounded_to_bfloat16(values.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        result = values.astype(dtype, copy=False)
    if dtype == "float16" and bool(np.any(np.isinf(result) & np.isfinite(values))):
        raise ConfigError(f"{name} has values beyond float16's 65504; use weights bfloat16 or float32")
    return result


def rounded_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the values as bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN into the sign bit.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _write(descriptor: int, offset: int, data: Array | bytes) -> int:
    """Write all of a piece at its place, which the system may take in parts; returns its size."""
    view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
    return written
