"""A stand-in for CUDA behind the backend's seam, in host memory.

It is no GPU: it shows that the host side asks for the right things in the right order, not that a device would do them. It is
stricter than CUDA where that finds faults: memory begins as 0xFF (NaN, or -1), work that was queued runs when somebody waits for
it and not before, an address outside every allocation ends the test, and every call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_check.memory import aligned
from qwenrt.plugins import DeviceError

Work = Callable[[], None]


class FakeDevice:
    """One GPU of `total` bytes. `fail` makes a call fail; as with CUDA, all calls after it fail too."""

    name = "Fake GPU"
    compute_capability = "9.0"

    def __init__(self, total: int = 256 << 20) -> None:
        self.total = total
        self.calls: list[tuple[str, Any]] = []
        """Every call by name, with its sizes or handles."""
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}
        """Device allocations by address."""
        self.pinned: dict[int, npt.NDArray[np.uint8]] = {}
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Work]] = {}
        self.failure: str | None = None
        self._failing: str | None = None
        self._queue: list[Work] = []
        self._captured: list[Work] | None = None
        self._handles = iter(range(1000, 10**9))

    def fail(self, call: str) -> None:
        """Let the next call of that name, and everything after it, fail."""
        self._failing = call

    def counts(self, call: str) -> int:
        """How often a call was made."""
        return sum(name == call for name, _ in self.calls)

    def use(self) -> None:
        self._record("use", None)

    def memory_info(self) -> tuple[int, int]:
        self._record("memory_info", None)
        return self.total - sum(block.nbytes for block in self.memory.values()), self.total

    def allocate(self, size: int) -> int:
        self._record("allocate", size)
        if size > self.total - sum(block.nbytes for block in self.memory.values()):
            raise DeviceError("cudaMalloc failed: cudaErrorMemoryAllocation, out of memory")
        block = aligned(np.full(size, 0xFF, np.uint8))
        self.memory[block.ctypes.data] = block
        return int(block.ctypes.data)

    def free(self, address: int) -> None:
        self._record("free", address)
        del self.memory[address]

    def allocate_pinned(self, size: int) -> npt.NDArray[np.uint8]:
        self._record("allocate_pinned", size)
        block = aligned(np.full(size, 0xFF, np.uint8))
        self.pinned[block.ctypes.data] = block
        return block

    def free_pinned(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._record("free_pinned", buffer.nbytes)
        del self.pinned[buffer.ctypes.data]

    def create_stream(self) -> int:
        self._record("create_stream", None)
        stream = next(self._handles)
        self.streams.add(stream)
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._record("destroy_stream", stream)
        self.streams.remove(stream)

    def upload(self, address: int, source: npt.NDArray[Any], stream: int) -> None:
        self._record("upload", source.nbytes)
        target = self.at(address, source.nbytes)
        assert source.flags.c_contiguous
        self.queue(lambda: _copy(target, source.reshape(-1).view(np.uint8)), stream)

    def download(self, target: npt.NDArray[Any], address: int, stream: int) -> None:
        self._record("download", target.nbytes)
        source = self.at(address, target.nbytes)
        assert target.flags.c_contiguous
        self.queue(lambda: _copy(target.reshape(-1).view(np.uint8), source), stream)

    def capture(self, enqueue: Work, stream: int) -> int:
        self._record("capture", None)
        assert not self._queue, "captured before what was queued is done"
        self._captured = []
        try:
            enqueue()
            graph = next(self._handles)
            self.graphs[graph] = self._captured
        finally:
            self._captured = None
        return graph

    def launch(self, graph: int, stream: int) -> None:
        self._record("launch", graph)
        for work in self.graphs[graph]:
            self.queue(work, stream)

    def destroy_graph(self, graph: int) -> None:
        self._record("destroy_graph", graph)
        del self.graphs[graph]

    def synchronize(self, stream: int) -> None:
        self._record("synchronize", stream)
        work, self._queue = self._queue, []
        for one in work:
            one()

    # What is not of the seam: the fake TensorRT's way to the device.

    @property
    def capturing(self) -> bool:
        return self._captured is not None

    def queue(self, work: Work, stream: int) -> None:
        """Do `work` when the stream comes to it, or keep it in the graph that is being captured."""
        assert stream in self.streams, "a stream that was not created, or was destroyed"
        (self._queue if self._captured is None else self._captured).append(work)

    def at(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """Device memory from `address` on."""
        for start, block in self.memory.items():
            if start <= address and address + size <= start + block.nbytes:
                return block[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} lie in no allocation")

    def _record(self, call: str, detail: Any) -> None:
        if self.failure is None and self._failing == call:
            self._failing = None
            self.failure = f"{call} failed: cudaErrorIllegalAddress, an illegal memory access was encountered"
        if self.failure is not None:
            raise DeviceError(self.failure)
        self.calls.append((call, detail))


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    target[:] = source
