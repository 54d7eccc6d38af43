"""What the runtime makes of TensorRT's Python module or TensorRT for RTX's: a logger, and execution contexts."""

from __future__ import annotations

from collections import deque
from typing import Any

_KEPT_LINES = 8


def make_log(trt: Any) -> Any:
    """A logger for TensorRT that prints nothing and keeps the last warnings and errors: `text()` gives them and forgets them."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self._lines.append(" ".join(message.split()))

        def text(self) -> str:
            lines, self._lines = list(self._lines), deque(maxlen=_KEPT_LINES)
            return "; ".join(lines) or "it logged nothing"

    return Log()


def create_context(trt: Any, engine: Any, *, fixed_shapes: bool) -> Any:
    """An execution context whose activation memory is given to it later; None where TensorRT fails.

    fixed_shapes: it will see one set of shapes, and may be captured in a CUDA graph. TensorRT for RTX compiles its kernels when
    it first runs; for other shapes it begins with general ones and replaces them later, which a graph would not see.
    """
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    if not (fixed_shapes and hasattr(trt, "DynamicShapesKernelSpecializationStrategy")):
        return engine.create_execution_context(strategy)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy)
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    return engine.create_execution_context(config)
