"""One execution context of a TensorRT engine, with every tensor bound."""

from __future__ import annotations

from collections.abc import Mapping

from qwenrt.plugins import DeviceError

from .device import Device
from .plan_loader import LoadedPlan
from .trt_objects import create_context

Shape = tuple[int, ...]


class Execution:
    """A context on profile number `profile`. What TensorRT refuses raises DeviceError with what it logged."""

    def __init__(
        self, loaded: LoadedPlan, profile: int, memory: tuple[int, int], stream: int, *, fixed_shapes: bool = False
    ) -> None:
        """memory: address and size of the activations' memory, which contexts that run one after another may share."""
        self._log = loaded.log
        self._stream = stream
        self._context = create_context(loaded.trt, loaded.engine, fixed_shapes=fixed_shapes)
        self._check(self._context is not None, "created no execution context")
        self._check(self._context.set_optimization_profile_async(profile, stream), f"refused profile {profile}")
        self._context.set_device_memory(*memory)

    def bind(self, addresses: Mapping[str, int], shapes: Mapping[str, Shape]) -> None:
        """Give tensors their addresses, and inputs their shapes."""
        for name, address in addresses.items():
            self._check(self._context.set_tensor_address(name, address), f"refused the address of {name}")
        self.set_shapes(shapes)

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Set the shapes of inputs."""
        for name, shape in shapes.items():
            self._check(self._context.set_input_shape(name, shape), f"refused {name} of shape {list(shape)}")

    def enqueue(self) -> None:
        """Queue one run on the stream."""
        self._check(self._context.execute_async_v3(self._stream), "did not run the step")

    def capture(self, device: Device) -> int | None:
        """The run as a CUDA graph, after one run that flushes what TensorRT puts off until then; None if it cannot be captured.

        The context must not be changed from then on.
        """
        self.enqueue()
        device.synchronize(self._stream)
        if not getattr(self._context, "is_stream_capturable", lambda stream: True)(self._stream):
            return None
        return device.capture(self.enqueue, self._stream)

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise DeviceError(f"TensorRT {what}: {self._log.text()}")
