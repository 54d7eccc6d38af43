"""What all runners have in common: polygraphy's interface, and handing tensors over one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineManifest

from ..feeds import INDEX_INPUTS, Array, check_feed, kv_dtype, kv_names, kv_shape

Visit = Callable[[str, Array], None]
"""Takes a tensor's name and its values, float32 or as the runner has them; they are valid until it returns."""


class PagedRunner(BaseRunner):  # type: ignore[misc]
    """A polygraphy runner of whole steps: takes a feed, gives logits and KV pools (and what else is named in `outputs`).

    Every runner takes the same named inputs and names its outputs as the engine's graph does, so that
    `polygraphy.comparator.Comparator` and `qwenrt compare` can put any two side by side. A feed is never changed. Raises
    ConfigError for a feed that no runtime could make.
    """

    def __init__(self, name: str, manifest: EngineManifest, outputs: Sequence[str] | None = None) -> None:
        super().__init__(name=name)
        self.manifest = manifest
        self.outputs = list(outputs) if outputs is not None else self.results

    @property
    def results(self) -> list[str]:
        """The outputs that every engine has: logits, and the KV pools after the step."""
        return ["logits", *(f"kv_cache_out.{layer}" for layer in range(self.manifest.model.num_layers))]

    @property
    def tensors(self) -> list[str]:
        """Everything that can be had of this runner, in the graph's order."""
        return self.results

    @abstractmethod
    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        """Run a step and hand over each wanted tensor, in the order in which they are computed, as soon as it is there."""

    def get_input_metadata_impl(self) -> TensorMetadata:
        """polygraphy's description of the inputs; None stands for a size that a feed is free to choose."""
        metadata = TensorMetadata()
        for name in INDEX_INPUTS:
            metadata.add(name, np.dtype(np.int32), (None, None) if name == "block_tables" else (None,))
        for name in kv_names(self.manifest):
            metadata.add(name, kv_dtype(self.manifest), (None, *kv_shape(self.manifest, 0)[1:]))
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        """polygraphy's entry: all of `outputs` at once."""
        check_feed(feed_dict, self.manifest)
        self.check_has(self.outputs)
        results: dict[str, Array] = {}
        start = perf_counter()
        self.visit(feed_dict, self.outputs, lambda name, values: results.update({name: values.copy()}))
        self.inference_time = perf_counter() - start
        return OrderedDict((name, results[name]) for name in self.outputs)

    def check_has(self, names: Collection[str]) -> None:
        """Raise ConfigError, naming a tensor that this runner does not have."""
        missing = [name for name in names if name not in self.tensors]
        if missing:
            raise ConfigError(
                f"{self.name} has no tensor {missing[0]}; it has logits, kv_cache_out.0 and {len(self.tensors) - 2} more: "
                "see polygraphy inspect model model.onnx --show layers"
            )
