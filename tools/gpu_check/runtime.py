"""The few functions of the CUDA runtime that are needed beside the kernels, over ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_MEMCPY_DEFAULT = 4
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed: `status` is its cudaError_t."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call}: {text} (cudaError_t {status})")
        self.status = status


class CudaRuntime:
    """libcudart.so of a CUDA toolkit. Shares its context and its memory with every other runtime of the process."""

    def __init__(self, cuda_home: Path) -> None:
        """Raises FileNotFoundError if the toolkit has no libcudart.so."""
        found = [*cuda_home.glob("lib*/libcudart.so*"), *cuda_home.glob("targets/*/lib/libcudart.so*")]
        if not found:
            raise FileNotFoundError(f"{cuda_home} has no libcudart.so; set CUDA_HOME to a CUDA toolkit that has it")
        self._library = ctypes.CDLL(str(found[0]))
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CudaError(name, status, self._library.cudaGetErrorString(status).decode())

    def allocate(self, size: int) -> int:
        """The address of `size` bytes of the current GPU."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value or 0

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave; says nothing if the GPU has failed meanwhile."""
        self._library.cudaFree(ctypes.c_void_p(address))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies bytes between any two addresses, after all work queued before; also tells how that work ended."""
        pointers = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self._call("cudaMemcpy", *pointers, ctypes.c_size_t(size), _MEMCPY_DEFAULT)

    def compute_capability(self) -> tuple[int, int]:
        """Of GPU 0, for example (9, 0). Raises CudaError where there is no GPU."""
        value, numbers = ctypes.c_int(), []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            self._call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            numbers.append(value.value)
        return numbers[0], numbers[1]
