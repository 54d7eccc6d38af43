"""Where a call's tensors lie: in the memory of a GPU, or in the host's, where the emulated kernels reach them."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .runtime import CudaRuntime

Array = npt.NDArray[Any]


class Buffer(Protocol):
    """An array's bytes at an address that the kernels can use; freed with the object."""

    address: int
    nbytes: int

    def read(self) -> Array:
        """The array as it is now; on a GPU, after all work queued before."""


class Memory(Protocol):
    """Makes buffers, each ending where its allocation ends, so that whoever watches the memory sees the first byte past it."""

    def upload(self, array: Array) -> Buffer:
        """A copy of `array` on a 256-byte boundary."""


class HostBuffer:
    """A buffer of the host."""

    def __init__(self, array: Array) -> None:
        self.array = aligned(array)
        self.address, self.nbytes = self.array.ctypes.data, self.array.nbytes

    def read(self) -> Array:
        return self.array


class HostMemory:
    """The host's memory."""

    def upload(self, array: Array) -> Buffer:
        return HostBuffer(array)


class DeviceBuffer:
    """A buffer of the GPU."""

    def __init__(self, runtime: CudaRuntime, array: Array) -> None:
        self.runtime, self.shape, self.dtype = runtime, array.shape, array.dtype
        self.address, self.nbytes = runtime.allocate(max(array.nbytes, 1)), array.nbytes
        weakref.finalize(self, runtime.free, self.address)
        runtime.copy(self.address, np.ascontiguousarray(array).ctypes.data, self.nbytes)

    def read(self) -> Array:
        array = np.empty(self.shape, self.dtype)
        self.runtime.copy(array.ctypes.data, self.address, self.nbytes)
        return array


class DeviceMemory:
    """The memory of GPU 0: one allocation of the CUDA runtime a buffer, which is what compute-sanitizer watches."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime

    def upload(self, array: Array) -> Buffer:
        return DeviceBuffer(self.runtime, array)


def aligned(array: Array) -> Array:
    """A copy on a 256-byte boundary, as device allocations are, that ends where its allocation ends: AddressSanitizer sees the
    first byte past it."""
    libc = ctypes.CDLL(None)
    memory = ctypes.c_void_p()
    size = max(array.nbytes, 1)
    failed = libc.posix_memalign(ctypes.byref(memory), ctypes.c_size_t(256), ctypes.c_size_t(size))
    if failed or memory.value is None:
        raise MemoryError(f"{size} bytes")
    block = (ctypes.c_ubyte * size).from_address(memory.value)
    weakref.finalize(block, libc.free, memory)
    copy: Array = np.ndarray(array.shape, array.dtype, memoryview(block))
    copy[...] = array
    return copy
