"""A whole engine as the runtime runs it: one of its backends, KV pools written in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from qwenrt.runtime import LLM, EngineDir
from qwenrt.runtime.backends import Backend
from qwenrt.runtime.lora import LoraAdapter
from qwenrt.runtime.model_runner import StepInputs

from ..adapters import check_fits
from ..feeds import INDEX_INPUTS, Array, kv_names
from .base import PagedRunner, Visit


class BackendRunner(PagedRunner):
    """A runtime backend ("onnxruntime", "torch", "tensorrt"). It gives logits and KV pools and nothing from between."""

    def __init__(
        self, backend: str, engine: EngineDir, threads: int | None = None, adapter: LoraAdapter | None = None
    ) -> None:
        """adapter: for every token, in an engine that has places for adapters."""
        super().__init__(backend, engine.manifest)
        self._adapter = adapter if engine.manifest.max_lora_rank else None
        self._engine = engine
        self._threads = threads
        self._backend: Backend | None = None
        self._num_blocks = 0

    def deactivate_impl(self) -> None:
        """Free the engine."""
        self._backend = None
        self._num_blocks = 0

    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        """Run a step on pools that hold the feed's blocks, and hand over each wanted tensor."""
        backend = self._with_blocks(len(feed["kv_cache.0"]))
        blocks = np.arange(len(feed["kv_cache.0"]), dtype=np.int32)
        for layer, name in enumerate(kv_names(self.manifest)):
            backend.write_kv_blocks(layer, blocks, feed[name])
        # Copies: nothing that a backend does may reach the feed, which the next runner gets too.
        slots = None if self._adapter is None else np.zeros(len(feed["input_ids"]), np.int32)
        inputs = {name: feed[name].copy() for name in INDEX_INPUTS}
        logits = backend.execute(StepInputs(**inputs, lora_indices=slots))
        for layer in range(self.manifest.model.num_layers):
            if f"kv_cache_out.{layer}" in wanted:
                visit(f"kv_cache_out.{layer}", backend.read_kv_blocks(layer, blocks))
        if "logits" in wanted:
            visit("logits", logits)

    def _with_blocks(self, num_blocks: int) -> Backend:
        """The backend, loaded anew if its pools are too small."""
        if self._backend is None or num_blocks > self._num_blocks:
            self._backend = None
            llm = LLM(self._engine.path, backend=self.name, num_kv_blocks=num_blocks, threads=self._threads)
            self._backend = llm.engine.backend
            if self._adapter is not None:
                slots = self._backend.lora
                assert slots is not None
                check_fits(self._adapter, self.manifest, slots)
                slots.set(0, self._adapter)
            self._num_blocks = num_blocks
        return self._backend
