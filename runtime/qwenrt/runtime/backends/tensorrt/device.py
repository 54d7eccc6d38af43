"""The seam to CUDA: every call that the TensorRT backend makes to the device, and nothing of TensorRT.

`cuda.py` is the real one. Addresses, streams and graphs are integers, as CUDA has them. Each call raises DeviceError when CUDA
reports one; work that was queued on a stream may fail later, in whichever call comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import DeviceError

ALIGNMENT = 256
"""Bytes: what CUDA's allocations begin at a multiple of, and what TensorRT asks of addresses."""


class Device(Protocol):
    """One GPU."""

    @property
    def name(self) -> str:
        """Such as "NVIDIA H200"."""

    @property
    def compute_capability(self) -> str:
        """Such as "9.0"."""

    def use(self) -> None:
        """Make it the calling thread's current device."""

    def memory_info(self) -> tuple[int, int]:
        """Bytes that are free, and bytes that there are."""

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of device memory."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    def allocate_pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes of page-locked host memory, from and to which copies are asynchronous."""

    def free_pinned(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give back what `allocate_pinned` gave."""

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""

    def destroy_stream(self, stream: int) -> None:
        """Give back what `create_stream` gave."""

    def upload(self, address: int, source: npt.NDArray[Any], stream: int) -> None:
        """Queue a copy of a contiguous array to the device; the call may wait unless the array is page-locked."""

    def download(self, target: npt.NDArray[Any], address: int, stream: int) -> None:
        """Queue a copy from the device to a contiguous array; the call may wait unless the array is page-locked."""

    def capture(self, enqueue: Callable[[], None], stream: int) -> int:
        """An executable graph of what `enqueue` queues on `stream`, none of which runs now."""

    def launch(self, graph: int, stream: int) -> None:
        """Queue a graph."""

    def destroy_graph(self, graph: int) -> None:
        """Give back what `capture` gave."""

    def synchronize(self, stream: int) -> None:
        """Wait until everything that was queued is done."""


def give_back(resources: ExitStack, method: Callable[..., None], handle: Any) -> None:
    """Have `resources` call `method(handle)` when it closes. After a failure that fails too, and the failure is what matters."""

    def call() -> None:
        with contextlib.suppress(DeviceError):
            method(handle)

    resources.callback(call)
