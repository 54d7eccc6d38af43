"""The engine's weight file: one safetensors file that ONNX Runtime maps as external data, written tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .checkpoint import Checkpoint
from .safetensors_file import DTYPES

PAGE = 4096
_CHUNK_ELEMENTS = 1 << 22
_CODES = {name: code for code, name in DTYPES.items()}
_ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

Array = npt.NDArray[Any]


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
    them starts on a page too, and can be mapped by itself.
    """

    def size(name: str) -> int:
        dtype, shape = tensors[name]
        return math.prod(shape) * _ITEM_SIZES[dtype]

    order = sorted(tensors, key=lambda name: size(name) % PAGE != 0)
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
    path: Path,
    layout: Layout,
    checkpoint: Checkpoint,
    sources: Mapping[str, tuple[str, ...]],
    computed: Mapping[str, Array],
    progress: Callable[[int, int], None],
) -> None:
    """Write the file: each tensor is the checkpoint tensors `sources[name]` one below the other, or the array `computed[name]`.

    Converts in chunks; memory stays below a few hundred MiB beyond the largest tensor of the checkpoint. `progress` is called
    with bytes written and bytes in all. Raises ConfigError if a value does not fit the file's type.
    """
    with path.open("xb", buffering=0) as file:
        done = _write(file, layout.header)
        for name, place in layout.tensors.items():
            for chunk in _chunks(name, checkpoint, sources, computed):
                done += _write(file, _converted(chunk, place.dtype, name))
                progress(done, layout.size)
        assert done == layout.size


def _chunks(
    name: str, checkpoint: Checkpoint, sources: Mapping[str, tuple[str, ...]], computed: Mapping[str, Array]
) -> Iterator[Array]:
    """Flat pieces of a tensor, in the types that they are stored in (bfloat16 as uint16)."""
    if name in computed:
        yield computed[name].reshape(-1)
        return
    for source in sources[name]:
        flat = checkpoint.read(source).reshape(-1)
        for start in range(0, flat.size, _CHUNK_ELEMENTS):
            yield flat[start : start + _CHUNK_ELEMENTS]
        checkpoint.forget(source)


def _converted(values: Array, dtype: str, name: str) -> Array:
    """The values as `dtype`, rounded to nearest even; raises ConfigError where float16 would overflow."""
    if values.dtype == np.uint16 and dtype == "bfloat16":
        return values
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(values.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        result = values.astype(dtype, copy=False)
    if dtype == "float16" and bool(np.any(np.isinf(result) & np.isfinite(values))):
        raise ConfigError(f"{name} has values beyond float16's 65504; use weights bfloat16 or float32")
    return result


def _rounded_to_bfloat16(values: npt.NDArray[np.float32]) -> Array:
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN into the sign bit.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _write(file: BinaryIO, data: Array | bytes) -> int:
    """Write all of a piece, which the system may take in parts."""
    view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
    written = 0
    while written < len(view):
        written += file.write(view[written:])
    return written
