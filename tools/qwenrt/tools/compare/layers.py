"""Layer by layer: each part of the engine's graph is given what the reference gives to it, so that its error is its own.

The reference runs once and tells of its tensors as it computes them; when one of the graph's parts is complete, the engine
computes that part, the tensors are compared and dropped. Beside that the engine's own stream runs through all parts, which shows
how errors add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .batches import Batch
from .feeds import Array
from .graph import LOGITS, Segment
from .kv import pool_checks
from .locate import Locator
from .results import Check, LayerErrors
from .runners.base import PagedRunner
from .runners.graph import GraphRunner
from .tolerances import Tolerance


@dataclass
class LayerWalk:
    """What a walk over all parts found."""

    errors: list[LayerErrors] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def first_bad(self) -> str | None:
        """The name of the first part that is out of tolerance by itself."""
        return next((check.part for check in self.checks if not check.passed), None)


def compare_layers(engine: GraphRunner, reference: PagedRunner, batch: Batch, tolerance: Tolerance) -> LayerWalk:
    """Walk over all parts of the engine's graph with one batch."""
    walker = _Walker(engine, batch, tolerance)
    reference.visit(batch.feed, set(walker.segment_of), walker.visit)
    walker.finish()
    return walker.walk


class _Walker:
    def __init__(self, engine: GraphRunner, batch: Batch, tolerance: Tolerance) -> None:
        model = engine.manifest.model
        self.engine, self.batch, self.tolerance = engine, batch, tolerance
        self.graph = engine.graph
        self.walk = LayerWalk()
        self.segment_of: dict[str, int] = {name: index for index, name in enumerate(self.graph.boundaries)}
        for layer in range(model.num_layers):
            self.segment_of |= dict.fromkeys(self.graph.layer_tensors(layer).values(), layer + 1)
        self._locator = Locator(self.graph, model.num_heads, model.num_kv_heads, batch)
        self._index = 0
        self._expected: dict[str, Array] = {}
        # Values at the last boundary: the reference's, and the engine's own.
        self._reference_in: dict[str, Array] = {}
        self._engine_in: dict[str, Array] = {}

    def visit(self, name: str, values: Array) -> None:
        """Take a tensor of the reference; parts come in order."""
        while self.segment_of[name] > self._index:
            self._compare_segment()
        self._expected[name] = values.copy()

    def finish(self) -> None:
        """No more tensors come."""
        while self._index < len(self.graph.segments):
            self._compare_segment()

    def _compare_segment(self) -> None:
        index, segment = self._index, self.graph.segments[self._index]
        boundary = self.graph.boundaries[index]
        wanted = [name for name in segment.results if self.segment_of.get(name) == index]
        own = self.engine.run_segment(index, self.batch.feed | self._reference_in, wanted)
        carried = self.engine.run_segment(index, self.batch.feed | self._engine_in, [boundary])[boundary]
        checks = self._checks(segment, boundary, own)
        accumulated = self._locator.compare(boundary, carried, self._expected[boundary], 0.0).deviation.error
        errors = {check.measure.rsplit(" ", 1)[-1]: check.value for check in checks}
        self.walk.checks += checks
        self.walk.errors.append(LayerErrors(segment.name, segment.layer, errors, accumulated))
        self._reference_in = {boundary: self._expected[boundary]}
        self._engine_in = {boundary: carried}
        self._expected = {}
        self._index += 1

    def _checks(self, segment: Segment, boundary: str, own: dict[str, Array]) -> list[Check]:
        """In a layer: K, V and slots, attention, output; before and after the layers only the output."""
        checks: list[Check] = []
        if segment.layer is not None:
            names = self.graph.layer_tensors(segment.layer)
            pool, attention = names["kv_cache"], names["attention"]
            if pool in self._expected:
                checks += pool_checks(
                    own[pool],
                    self._expected[pool],
                    segment.layer,
                    self.batch,
                    self.engine.manifest.block_size,
                    self.tolerance.kv,
                    name=segment.name,
                    part=segment.name,
                )
            if attention in self._expected:
                agree = "K and V agree, " if all(check.passed for check in checks) else ""
                checks.append(self._attention_check(segment, attention, own[attention], agree))
        limit = self.tolerance.logits if boundary == LOGITS else self.tolerance.layer
        found = self._locator.compare(boundary, own[boundary], self._expected[boundary], limit)
        result = found.deviation
        return [*checks, Check(f"{segment.name} output", result.error, limit, found.where, result.note, segment.name)]

    def _attention_check(self, segment: Segment, name: str, actual: Array, agree: str) -> Check:
        """Attention's result head by head."""
        limit = self.tolerance.kv
        found = self._locator.compare(name, actual, self._expected[name], limit)
        result, note = found.deviation, found.deviation.note
        if result.finite and not result.error <= limit:
            note = agree + found.heads
            if agree:
                note += ": look at q_norm, RoPE of q, the heads' grouping (GQA), the mask"
        return Check(f"{segment.name} attention", result.error, limit, found.where, note, segment.name)


def worst_errors(walks: Sequence[LayerWalk]) -> list[LayerErrors]:
    """The largest errors of each part over several batches."""
    merged = []
    for parts in zip(*(walk.errors for walk in walks), strict=True):
        own = {
            name: max(part.own.get(name, 0.0) for part in parts)
            for name in dict.fromkeys(n for p in parts for n in p.own)
        }
        accumulated = max(part.accumulated for part in parts)
        merged.append(LayerErrors(parts[0].name, parts[0].layer, own, accumulated))
    return merged
