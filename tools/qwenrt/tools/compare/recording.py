"""Recording the steps of a live run, each as a batch that can be compared by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.runtime import LLM
from qwenrt.runtime.backends import Backend
from qwenrt.runtime.model_runner import IndexArray, StepInputs

from .batch_files import BatchWriter, batch_writer
from .feeds import Feed

_MOST_BYTES = 2 << 30


@contextmanager
def recorded(llm: LLM, path: Path) -> Iterator[BatchWriter]:
    """While the block runs, write every step of `llm` to `path`, up to 2 GiB; see `batch_files.batch_writer`."""
    engine = llm.engine
    backend = engine.backend
    with batch_writer(path) as writer:
        engine.backend = _RecordingBackend(
            backend, writer, engine.manifest.model.num_layers, engine.manifest.block_size
        )
        try:
            yield writer
        finally:
            engine.backend = backend


class _RecordingBackend:
    """A backend that writes down what it is given, with the KV blocks that the step can see, before it runs it."""

    def __init__(self, backend: Backend, writer: BatchWriter, num_layers: int, block_size: int) -> None:
        self._backend, self._writer = backend, writer
        self._num_layers, self._block_size = num_layers, block_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call."""
        if self._writer.size < _MOST_BYTES:
            self._writer.append(self._feed(inputs))
        return self._backend.execute(inputs)

    def read_kv_blocks(self, layer: int, blocks: IndexArray) -> npt.NDArray[Any]:
        """As the backend does it."""
        return self._backend.read_kv_blocks(layer, blocks)

    def write_kv_blocks(self, layer: int, blocks: IndexArray, values: npt.NDArray[Any]) -> None:
        """As the backend does it."""
        self._backend.write_kv_blocks(layer, blocks, values)

    def _feed(self, inputs: StepInputs) -> Feed:
        """The step over a pool of only the blocks that it uses, numbered anew."""
        feed: Feed = {
            field.name: value.copy()
            for field in dataclasses.fields(inputs)
            if (value := getattr(inputs, field.name)) is not None
        }
        tables = feed["block_tables"]
        needed = np.arange(tables.shape[1]) < -(-feed["seq_lens"][:, None] // self._block_size)
        blocks, numbers = np.unique(tables[needed], return_inverse=True)
        tables[:] = -1
        tables[needed] = numbers
        for layer in range(self._num_layers):
            feed[f"kv_cache.{layer}"] = self._backend.read_kv_blocks(layer, blocks.astype(np.int32))
        return feed
