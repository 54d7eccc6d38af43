"""One GGUF file, memory-mapped: its header checked to the byte before anything of it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Magic, version, counts, key-value pairs, tensor descriptions,
then aligned tensors; little-endian. The package `gguf` reads such files too, but trusts them and makes objects of all numbers.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .json_fields import MAX_BYTES, shown
from .safetensors_file import TensorInfo

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16",
}  # fmt: skip
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Per type the elements of a block, and its bytes."""
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
BLOCK_TYPES = tuple(name for name in BLOCKS if name not in _NUMPY)
"""The types whose elements are packed in blocks."""


class GgufFile:
    """An open file; `metadata` has its key-value pairs, `tensors` maps names to `TensorInfo`.

    A number in the metadata is an int, a float or a bool, an array of them a NumPy array, an array of strings a list.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size < 24:
                    raise _damaged(path, f"it has {self.size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; download it again") from None
        header = _Header(path, self._map[: min(self.size, MAX_BYTES)], self.size)
        num_tensors, num_pairs = header.start()
        self.metadata = header.pairs(num_pairs)
        self.tensors = header.tensors(num_tensors, self.metadata.get("general.alignment", 32))

    def read(self, info: TensorInfo) -> npt.NDArray[Any]:
        """A tensor as a view of the mapped file; bfloat16 as its bits in uint16, blocks as the bytes of each row."""
        whole = np.frombuffer(self._map, np.uint8, info.end - info.start, info.start)
        if info.dtype in _NUMPY:
            return whole.view(_NUMPY[info.dtype]).reshape(info.shape)
        return whole.reshape(*info.shape[:-1], -1)

    def forget(self, info: TensorInfo) -> None:
        """Let the kernel drop the tensor's pages from this process; a later read maps them again."""
        start = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = info.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class _Header:
    """Reads the start of a file from the front to the back; never beyond what there is."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def start(self) -> tuple[int, int]:
        """Numbers of tensors and of key-value pairs."""
        if self._take(4) != _MAGIC:
            raise ConfigError(f"{self.path} is no GGUF file: it does not start with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self.path} is GGUF version {version}, must be 2 or 3, little-endian; convert the model again"
            )
        return self._number("<Q"), self._number("<Q")

    def pairs(self, count: int) -> dict[str, Any]:
        """The metadata."""
        found: dict[str, Any] = {}
        for _ in range(count):
            key, kind = self._string(), self._number("<I")
            if key in found:
                raise _damaged(self.path, f"it has the key {shown(key)} twice")
            found[key] = self._array() if kind == _ARRAY else self._value(kind)
        return found

    def tensors(self, count: int, alignment: object) -> dict[str, TensorInfo]:
        """The descriptions that come after the metadata, with their places in the file."""
        if type(alignment) is not int or alignment not in [1 << power for power in range(16)]:
            raise _damaged(self.path, f"general.alignment is {shown(alignment)}, no power of two")
        entries = [self._entry() for _ in range(count)]
        base = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, dtype, shape, offset in entries:
            block, size = BLOCKS[dtype]
            start, elements = base + offset, math.prod(shape)
            end = start + elements // block * size
            if name in found or offset % alignment or shape[-1] % block or end > self.size:
                state = "is there twice" if name in found else f"does not fit the file's {self.size} bytes"
                raise _damaged(self.path, f"tensor {shown(name)} {state}")
            found[name] = TensorInfo(self.path, start, end, dtype, shape)
        last = base
        for name, info in sorted(found.items(), key=lambda item: item[1].start):
            if info.start < last:
                raise _damaged(self.path, f"tensor {shown(name)} lies over another")
            last = info.end
        return found

    def _entry(self) -> tuple[str, str, tuple[int, ...], int]:
        name, rank = self._string(), self._number("<I")
        if not 1 <= rank <= 4:
            raise _damaged(self.path, f"tensor {shown(name)} has {rank} dimensions")
        sizes = [self._number("<Q") for _ in range(rank)]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in _TYPES:
            raise ConfigError(
                f"{self.path}: tensor {shown(name)} is of ggml type {kind}, supported are {', '.join(_TYPES.values())}; "
                "download the model in another quantisation"
            )
        if not all(0 < size < 1 << 40 for size in sizes):
            raise _damaged(self.path, f"tensor {shown(name)} has the shape {sizes}")
        return name, _TYPES[kind], tuple(reversed(sizes)), offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise _damaged(self.path, f"it has a value of type {kind}")
        value = self._numbers(kind, 1)[0]
        # Of a float32 the shortest decimal that is it: 1e-06, not 9.99999997e-07.
        return bool(value) if kind == _BOOL else float(str(value)) if value.dtype.kind == "f" else value.item()

    def _array(self) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _damaged(self.path, f"it has an array of type {kind}")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _string(self) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError:
            raise _damaged(self.path, "a string of it is not UTF-8") from None

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            limit = "is truncated" if len(self.data) == self.size else f"has a header of more than {MAX_BYTES} bytes"
            raise ConfigError(f"{self.path} is damaged: it {limit}; download it again")
        self.at += count
        return self.data[self.at - count : self.at]


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {what}; download it again")
