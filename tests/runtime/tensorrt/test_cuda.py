"""The seam's real side, as far as a machine without a GPU shows it: cuda-bindings takes our arguments, and errors are told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.runtime.backends.tensorrt.cuda import CudaDevice, cudart
from qwenrt.runtime.backends.tensorrt.device import Device

from .fake_device import FakeDevice

HAS_GPU = cudart.cudaGetDeviceCount()[0] == cudart.cudaError_t.cudaSuccess
CALLS: dict[str, Callable[[CudaDevice], Any]] = {
    "use": lambda device: device.use(),
    "memory_info": lambda device: device.memory_info(),
    "allocate": lambda device: device.allocate(1 << 40),
    "free": lambda device: device.free(256),
    "allocate_pinned": lambda device: device.allocate_pinned(64),
    "free_pinned": lambda device: device.free_pinned(np.zeros(4, np.uint8)),
    "create_stream": lambda device: device.create_stream(),
    "destroy_stream": lambda device: device.destroy_stream(512),
    "upload": lambda device: device.upload(256, np.zeros(4, np.uint8), 512),
    "download": lambda device: device.download(np.zeros(4, np.uint8), 256, 512),
    "capture": lambda device: device.capture(lambda: None, 512),
    "launch": lambda device: device.launch(1024, 512),
    "destroy_graph": lambda device: device.destroy_graph(1024),
    "synchronize": lambda device: device.synchronize(512),
}


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU, on which these calls would be made")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_reaches_cuda_and_its_error_is_raised(name: str) -> None:
    device = object.__new__(CudaDevice)
    device._index = 0
    with pytest.raises(DeviceError, match=r"^cuda\w+ failed: cudaError(InsufficientDriver|NoDevice), "):
        CALLS[name](device)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(ConfigError, match="backend tensorrt needs an NVIDIA GPU and its driver: cudaError"):
        CudaDevice(0)


@pytest.mark.parametrize("implementation", [CudaDevice, FakeDevice])
def test_both_sides_of_the_seam_have_its_methods(implementation: type) -> None:
    for name, method in vars(Device).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert (
                inspect.signature(method).parameters.keys()
                == inspect.signature(getattr(implementation, name)).parameters.keys()
            )


class RecordedRuntime:
    """The CUDA runtime's functions, each of which succeeds and is written down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""
        self.cudaError_t = cudart.cudaError_t
        self.cudaMemcpyKind = cudart.cudaMemcpyKind
        self.cudaStreamCaptureMode = cudart.cudaStreamCaptureMode
        self.cudaGetErrorName, self.cudaGetErrorString = cudart.cudaGetErrorName, cudart.cudaGetErrorString

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            failed = name == self.failing
            return (cudart.cudaError_t(700 if failed else 0), 7)

        call.__name__ = name
        return call


def test_a_capture_that_fails_is_ended_so_that_the_stream_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = RecordedRuntime(), object.__new__(CudaDevice)
    monkeypatch.setattr("qwenrt.runtime.backends.tensorrt.cuda.cudart", runtime)
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 // 0, 512)  # type: ignore[arg-type, return-value]
    assert runtime.calls == ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphDestroy"]


def test_a_capture_leaves_the_executable_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = RecordedRuntime(), object.__new__(CudaDevice)
    monkeypatch.setattr("qwenrt.runtime.backends.tensorrt.cuda.cudart", runtime)
    expected = ["cudaStreamBeginCapture", "enqueue", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphDestroy"]
    assert device.capture(lambda: runtime.calls.append("enqueue"), 512) == 7
    assert runtime.calls == expected
    runtime.failing = "cudaGraphInstantiate"
    with pytest.raises(DeviceError, match="cudaGraphInstantiate failed: cudaErrorIllegalAddress"):
        device.capture(lambda: runtime.calls.append("enqueue"), 512)
    assert runtime.calls == expected * 2
