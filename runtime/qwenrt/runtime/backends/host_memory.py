"""Large arrays in this machine's memory, in huge pages where Linux gives them: reading them costs no page walk every 4 KiB."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""numpy has no bfloat16: its bits."""
_PIECE = 1 << 25
_POPULATE_WRITE = 23
"""Linux' MADV_POPULATE_WRITE, for which `mmap` has no name."""


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, *, populate: bool = False) -> npt.NDArray[Any]:
    """An array of zeros that takes memory only where it is first used; raises MemoryError if there is no room for it.

    populate: take all of it now, where Linux can (5.14). Else the first to write to a page waits until it is cleared: on a
    virtual machine that may be a third of a prompt's time.
    """
    count = math.prod(shape)
    memory = _allocate(count * np.dtype(dtype).itemsize)
    if populate:
        try:
            memory.madvise(_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise MemoryError(str(error)) from None
    return np.frombuffer(memory, dtype, count).reshape(shape)


def read_safetensors(path: Path, *, threads: int) -> dict[str, tuple[str, npt.NDArray[Any]]]:
    """The tensors of a safetensors file, {name: (element type as the file calls it, values)}; BF16 as uint16.

    Raises ConfigError if the file is not what it says, MemoryError if there is no room for it.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        memory = _allocate(size)
        view = memoryview(memory)

        def read(start: int) -> None:
            end = min(start + _PIECE, size)
            while start < end:
                count = os.preadv(file.fileno(), [view[start:end]], start)
                if not count:
                    raise ConfigError(f"{path} became shorter while it was read")
                start += count

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, size, _PIECE)))
    values = np.frombuffer(memory, np.uint8, size)
    tensors = {}
    try:
        begin = 8 + int.from_bytes(view[:8], "little")
        if begin > size:
            raise ValueError(f"its header should end at byte {begin} of {size}")
        header = json.loads(bytes(view[8:begin]))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                own = values[begin + first : begin + last].view(_DTYPES[entry["dtype"]])
                tensors[name] = (entry["dtype"], own.reshape(entry["shape"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no safetensors file that this engine can have: {error}; export the engine again"
        ) from None
    return tensors


def _allocate(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    with contextlib.suppress(OSError):  # A kernel without huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
