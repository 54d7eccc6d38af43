"""One safetensors file, memory-mapped: its header checked to the byte before anything of it is believed.

Format: https://huggingface.co/docs/safetensors. 8 bytes little-endian header length, JSON header, then the tensors back to back.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .json_fields import MAX_BYTES, parse_json_object, shown

_ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that weights may have, by their names in safetensors."""

_NUMPY = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1",
    "I64": "<i8", "I32": "<i4", "I8": "i1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: file, byte range in the file, safetensors dtype name and shape."""

    file: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """An open file; `tensors` maps names to `TensorInfo`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self.tensors = _read_header(file.read(8), file.read, path, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; download the checkpoint again") from None

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor as a view of the mapped file; bfloat16 as its bits in uint16, 8-bit floats as theirs in uint8."""
        info = self.tensors[name]
        count = math.prod(info.shape)
        return np.frombuffer(self._map, _NUMPY[info.dtype], count, info.start).reshape(info.shape)

    def raw(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """Bytes of the file, as a view of the mapped file."""
        return np.frombuffer(self._map, np.uint8, length, start)

    def forget(self, name: str) -> None:
        """Let the kernel drop the tensor's pages from this process; a later read maps them again."""
        info = self.tensors[name]
        start = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = info.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def _read_header(prefix: bytes, read: Any, path: Path, size: int) -> dict[str, TensorInfo]:
    length = int.from_bytes(prefix, "little")
    if len(prefix) == 8 and MAX_BYTES < length <= size - 8:
        raise ConfigError(f"{path} names a header of {length} bytes, at most {MAX_BYTES} are read; download it again")
    if len(prefix) < 8 or length > size - 8:
        raise ConfigError(
            f"{path} is truncated or no safetensors file: it has {size} bytes and names a header of {length}; "
            "download it again"
        )
    header = parse_json_object(read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != end:
            raise ConfigError(f"{path} is damaged: tensor {shown(name)} does not start where the one before it ends")
        end = info.end
    if end != size:
        state = "truncated" if size < end else "too long"
        raise ConfigError(f"{path} is {state}: it has {size} bytes, its header describes {end}; download it again")
    return tensors


def _tensor_info(path: Path, name: str, entry: object, base: int) -> TensorInfo:
    def damaged(what: str) -> ConfigError:
        return ConfigError(f"{path} is damaged: tensor {shown(name)} has {what}; download it again")

    if not isinstance(entry, dict):
        raise damaged("no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise damaged(f"the dtype {shown(dtype)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 8:
        raise damaged("a shape that is no list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in offsets)
        or offsets[1] - offsets[0] != math.prod(shape) * _ITEM_SIZES[dtype]
    ):
        raise damaged(f"offsets that do not fit its shape {shape} of {dtype}")
    return TensorInfo(path, base + offsets[0], base + offsets[1], dtype, tuple(shape))


def widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 of any float type; bfloat16 comes as its bits in uint16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
