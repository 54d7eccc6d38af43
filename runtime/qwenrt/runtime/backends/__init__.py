"""Engines behind one protocol: a backend runs the graph of an engine folder over its own KV pool."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from ..engine_dir import EngineDir
from ..model_runner import IndexArray, StepInputs


class Backend(Protocol):
    """Runs steps of one engine; the KV pool lives inside and keeps what earlier steps wrote."""

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call."""

    def read_kv_blocks(self, layer: int, blocks: IndexArray) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, head_dim], in the pool's type."""

    def write_kv_blocks(self, layer: int, blocks: IndexArray, values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""


def load_backend(name: str, engine: EngineDir, *, num_kv_blocks: int, threads: int) -> Backend:
    """The backend called `name` ("onnxruntime" or "torch") over `engine`; raises ConfigError if it is not known."""
    if name == "onnxruntime":
        from .onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend(engine, num_kv_blocks=num_kv_blocks, threads=threads)
    if name == "torch":
        from .torch import TorchBackend

        return TorchBackend(engine, num_kv_blocks=num_kv_blocks, threads=threads)
    raise ConfigError(f"backend is {name!r}, must be one of: onnxruntime, torch")
