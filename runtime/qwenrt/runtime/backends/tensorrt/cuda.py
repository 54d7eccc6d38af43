"""The seam to CUDA over cuda-bindings: one method, one or two calls of the CUDA runtime, each checked."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError, DeviceError

try:
    from cuda.bindings import runtime as cudart
except ImportError as error:
    raise ConfigError(
        f"backend tensorrt needs cuda-bindings ({error}); install it with: pip install 'qwenrt[tensorrt]'"
    ) from error


class CudaDevice:
    """GPU number `index` of this process. Raises ConfigError where there is none."""

    def __init__(self, index: int) -> None:
        error, count = cudart.cudaGetDeviceCount()
        if error != cudart.cudaError_t.cudaSuccess:
            raise ConfigError(f"backend tensorrt needs an NVIDIA GPU and its driver: {_text(error)}")
        if index >= count:
            raise ConfigError(f"device is cuda:{index}, this machine has {count}: cuda:0 to cuda:{count - 1}")
        self._index = index
        self.use()
        attribute = cudart.cudaDeviceAttr
        major, minor = (
            _call(cudart.cudaDeviceGetAttribute, one, index)
            for one in (attribute.cudaDevAttrComputeCapabilityMajor, attribute.cudaDevAttrComputeCapabilityMinor)
        )
        self.compute_capability = f"{major}.{minor}"
        self.name: str = _call(cudart.cudaGetDeviceProperties, index).name.decode()

    def use(self) -> None:
        """Make it the calling thread's current device."""
        _call(cudart.cudaSetDevice, self._index)

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free, and bytes that there are."""
        free, total = _call(cudart.cudaMemGetInfo)
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of device memory."""
        return int(_call(cudart.cudaMalloc, size))

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        _call(cudart.cudaFree, address)

    def allocate_pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes of page-locked host memory."""
        address = _call(cudart.cudaHostAlloc, size, cudart.cudaHostAllocDefault)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))

    def free_pinned(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give back what `allocate_pinned` gave."""
        _call(cudart.cudaFreeHost, buffer.ctypes.data)

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""
        return int(_call(cudart.cudaStreamCreateWithFlags, cudart.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        """Give back what `create_stream` gave."""
        _call(cudart.cudaStreamDestroy, stream)

    def upload(self, address: int, source: npt.NDArray[Any], stream: int) -> None:
        """Queue a copy of a contiguous array to the device; the call may wait unless the array is page-locked."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        _call(cudart.cudaMemcpyAsync, address, source.ctypes.data, source.nbytes, kind, stream)

    def download(self, target: npt.NDArray[Any], address: int, stream: int) -> None:
        """Queue a copy from the device to a contiguous array; the call may wait unless the array is page-locked."""
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _call(cudart.cudaMemcpyAsync, target.ctypes.data, address, target.nbytes, kind, stream)

    def capture(self, enqueue: Callable[[], None], stream: int) -> int:
        """An executable graph of what `enqueue` queues on `stream`, none of which runs now."""
        # Other threads may allocate meanwhile, so the mode is not the global one.
        _call(cudart.cudaStreamBeginCapture, stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(DeviceError):
                _call(cudart.cudaGraphDestroy, _call(cudart.cudaStreamEndCapture, stream))
            raise
        graph = _call(cudart.cudaStreamEndCapture, stream)
        try:
            return int(_call(cudart.cudaGraphInstantiate, graph, 0))
        finally:
            _call(cudart.cudaGraphDestroy, graph)

    def launch(self, graph: int, stream: int) -> None:
        """Queue a graph."""
        _call(cudart.cudaGraphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Give back what `capture` gave."""
        _call(cudart.cudaGraphExecDestroy, graph)

    def synchronize(self, stream: int) -> None:
        """Wait until everything that was queued is done."""
        _call(cudart.cudaStreamSynchronize, stream)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the CUDA runtime returns beside its status; raises DeviceError where that is not success."""
    error, *values = function(*arguments)
    if error != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"{function.__name__} failed: {_text(error)}")
    return values[0] if len(values) == 1 else values


def _text(error: Any) -> str:
    _, name = cudart.cudaGetErrorName(error)
    _, text = cudart.cudaGetErrorString(error)
    return f"{name.decode()}, {text.decode()}"
