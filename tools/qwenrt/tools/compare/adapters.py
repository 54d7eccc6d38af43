"""A LoRA adapter under comparison: what an engine's graph takes for it."""

from __future__ import annotations

import numpy as np

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineManifest
from qwenrt.runtime.adapters import INDICES, LoraStacks
from qwenrt.runtime.lora import LoraAdapter

from .feeds import Feed
from .graph import EngineGraph


class AdapterInputs:
    """The inputs for adapters of a graph that has places for them: one slot, with `adapter` for every token, or for none."""

    def __init__(self, graph: EngineGraph, manifest: EngineManifest, adapter: LoraAdapter | None) -> None:
        """Raises ConfigError if the adapter does not fit the places."""
        shapes = {}
        for name in graph.inputs:
            dims = graph.types[name].type.tensor_type.shape.dim
            if len(dims) == 3:  # slots, and a matrix of each
                shapes[name] = dims[1].dim_value, dims[2].dim_value
        self._stacks = LoraStacks(manifest.model, shapes, 1)
        self._slot = -1
        if adapter is not None:
            check_fits(adapter, manifest, self._stacks)
            self._stacks.set(0, adapter)
            self._slot = 0

    def for_tokens(self, num_tokens: int) -> Feed:
        """By the graph's names."""
        return {INDICES: np.full(num_tokens, self._slot, np.int32), **self._stacks.arrays}


def check_fits(adapter: LoraAdapter, manifest: EngineManifest, stacks: LoraStacks) -> None:
    """Raise ConfigError unless an engine's slots take the adapter."""
    if adapter.rank > manifest.max_lora_rank:
        raise ConfigError(
            f"adapter {adapter.path} has rank {adapter.rank}, this engine takes {manifest.max_lora_rank} at most; export it "
            "again with a higher --max-lora-rank"
        )
    adapter.check(stacks.shapes)
