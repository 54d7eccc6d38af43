"""Engines behind one protocol: a backend runs the graph of an engine folder over its own KV pool."""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from ..adapters import LoraStacks
from ..engine_dir import EngineDir, Limits
from ..kv_budget import KvBudget
from ..model_runner import IndexArray, StepInputs

KV_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
}
"""Types of a KV pool, by the manifest's names."""

_DEVICES = {"onnxruntime": ("cpu",), "torch": ("cpu", "cuda"), "tensorrt": ("cuda",)}
"""Per backend the kinds of devices that it runs on, its usual one first."""


class Backend(Protocol):
    """Runs steps of one engine; the KV pool lives inside and keeps what earlier steps wrote."""

    num_kv_blocks: int
    """How many blocks the pool has."""
    lora: LoraStacks | None
    """The adapters' slots; None where the engine takes none."""

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call.

        Raises DeviceError when the device failed; the pool's contents are then lost, and so is the backend.
        """

    def read_kv_blocks(self, layer: int, blocks: IndexArray) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, head_dim], in the pool's type."""

    def write_kv_blocks(self, layer: int, blocks: IndexArray, values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""


def load_backend(
    name: str | None,
    engine: EngineDir,
    *,
    device: str | None,
    limits: Limits,
    budget: KvBudget,
    threads: int,
    max_loras: int = 1,
) -> Backend:
    """The backend called `name`, by default the one that the engine was made for, over `engine`; torch for one of several ranks.

    device: "cpu", "cuda" or "cuda:N". limits: of a step. budget: for the KV pool. threads: compute threads on the CPU. max_loras:
    slots for adapters. Raises
    ConfigError if backend or device is not known, or the engine does not run there.
    """
    tp, on_cpu = engine.manifest.tp, engine.manifest.target == "onnxruntime"
    if name is None:
        name = "torch" if tp > 1 else "onnxruntime" if on_cpu else "tensorrt"
    if name not in _DEVICES:
        raise ConfigError(f"backend is {name!r}, must be one of: {', '.join(_DEVICES)}")
    if tp > 1 and name != "torch":
        raise ConfigError(
            f"{engine.path} is split over {tp} ranks, which backend {name} cannot run; use --backend torch"
        )
    if tp > 1 and device is None and not on_cpu:
        device = "cuda"
    kind, index = _parse_device(device or _DEVICES[name][0])
    if kind not in _DEVICES[name]:
        raise ConfigError(f"device is {device!r}, backend {name} runs on: {', '.join(_DEVICES[name])}")
    if name == "onnxruntime":
        from .onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend(engine, limits=limits, budget=budget, threads=threads, max_loras=max_loras)
    if name == "torch":
        from .torch import TorchBackend

        device = f"cuda:{index}" if kind == "cuda" else "cpu"
        if tp > 1:
            from .tensor_parallel import TensorParallelBackend

            return TensorParallelBackend(engine, device=device, limits=limits, budget=budget, threads=threads)
        return TorchBackend(
            engine,
            device=device,
            limits=limits,
            budget=budget,
            threads=threads,
            max_loras=max_loras,
        )
    from .tensorrt import TensorRtBackend

    return TensorRtBackend.load(engine, device_index=index, limits=limits, budget=budget)


def _parse_device(device: str) -> tuple[str, int]:
    """Kind and number of a device."""
    kind, colon, number = device.partition(":")
    if kind in ("cpu", "cuda") and (not colon or (kind == "cuda" and number.isascii() and number.isdecimal())):
        return kind, int(number or 0)
    raise ConfigError(f"device is {device!r}, must be cpu, cuda or cuda:N")
