"""An engine's own graph, run segment by segment, so that no more than one segment's tensors are in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from qwenrt.runtime import EngineDir
from qwenrt.runtime.lora import LoraAdapter

from ..adapters import AdapterInputs
from ..feeds import Array
from ..graph import EngineGraph, Segment
from .base import PagedRunner, Visit


class Executor(Protocol):
    """Runs a part of the graph."""

    def run(
        self, graph: EngineGraph, segment: Segment, values: Mapping[str, Array], outputs: Sequence[str]
    ) -> list[Array]:
        """The values called `outputs` of the segment, given all of its inputs; the inputs are left as they are."""


class GraphRunner(PagedRunner):
    """The engine's graph by an executor; every tensor of the graph can be had, one segment's at a time are in memory."""

    def __init__(
        self,
        name: str,
        engine: EngineDir,
        executor: Executor,
        outputs: Sequence[str] | None = None,
        adapter: LoraAdapter | None = None,
    ) -> None:
        """adapter: for every token, in a graph that has places for adapters."""
        super().__init__(name, engine.manifest, outputs)
        self.graph = EngineGraph(engine)
        self.executor = executor
        self._adapters = AdapterInputs(self.graph, engine.manifest, adapter) if engine.manifest.max_lora_rank else None

    @property
    def tensors(self) -> list[str]:
        """Every value of the graph."""
        return [name for segment in self.graph.segments for name in segment.results]

    def run_segment(self, index: int, values: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """`outputs` of one segment of `graph.segments`, given its inputs by name, but for those of adapters; more is no harm."""
        segment = self.graph.segments[index]
        if self._adapters is not None:
            values = {**values, **self._adapters.for_tokens(len(values["input_ids"]))}
        given = {name: values[name] for name in segment.inputs}
        return dict(zip(outputs, self.executor.run(self.graph, segment, given, outputs), strict=True))

    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        """Run a step and hand over each wanted tensor, in the order in which they are computed, as soon as it is there."""
        values = dict(feed)
        for index, (segment, boundary) in enumerate(zip(self.graph.segments, self.graph.boundaries, strict=True)):
            outputs = [name for name in segment.results if name in wanted or name == boundary]
            results = self.run_segment(index, values, outputs)
            values[boundary] = results[boundary]
            for name in outputs:
                if name in wanted:
                    visit(name, results[name])
