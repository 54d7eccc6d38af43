"""Inside one part of the graph: the first value that leaves the budget, and the nodes that can be at fault.

The reference knows the values that its modules take and give. The engine's part is given the reference's input and all of its
values are looked at in the graph's order; between the last value that is right and the first that is not lie the suspects.
"""

from __future__ import annotations

from collections.abc import Collection

from .batches import Batch
from .feeds import Array
from .graph import LOGITS, Segment
from .kv import PARTS, compare_pools
from .locate import Locator
from .results import Bisection
from .runners.base import PagedRunner
from .runners.graph import GraphRunner
from .tolerances import Tolerance


def bisect(
    engine: GraphRunner, reference: PagedRunner, batch: Batch, segment: Segment, tolerance: Tolerance
) -> Bisection | None:
    """Search `segment` with one batch; None if no value that the reference knows leaves the budget."""
    graph = engine.graph
    index = graph.segments.index(segment)
    told = set(reference.tensors)
    known = [name for name in segment.results if name in told]
    expected: dict[str, Array] = {}
    boundaries = [graph.boundaries[index - 1]] if index else []
    reference.visit(batch.feed, {*known, *boundaries}, lambda name, values: expected.update({name: values.copy()}))
    given = batch.feed | {name: expected[name] for name in boundaries}
    actual = engine.run_segment(index, given, known)
    return _first_over(engine, batch, segment, tolerance, actual, expected)


def _first_over(
    engine: GraphRunner,
    batch: Batch,
    segment: Segment,
    tolerance: Tolerance,
    actual: dict[str, Array],
    expected: dict[str, Array],
) -> Bisection | None:
    model = engine.manifest.model
    locator = Locator(engine.graph, model.num_heads, model.num_kv_heads, batch)
    errors: dict[str, float] = {}
    good: list[str] = []
    for name in [name for name in actual if name in expected]:
        budget = tolerance.logits if name == LOGITS else tolerance.layer
        if name.startswith("kv_cache_out."):
            budget = tolerance.kv
            before = batch.feed[name.replace("_out", "")]
            found = compare_pools(actual[name], expected[name], before, batch.feed, engine.manifest.block_size, budget)
            _, part = max((found.parts[part].error, part) for part in PARTS)
            error, where = found.parts[part].error, f"batch {batch.name}, {part} of {found.where[part]}"
        else:
            budget = max(budget, tolerance.kv) if locator.has_heads(name) else budget
            located = locator.compare(name, actual[name], expected[name], budget)
            error, where = located.deviation.error, located.where
        errors[name] = error
        if error <= budget:
            good.append(name)
            continue
        nodes = _suspects(segment, good, name)
        last = good[-1] if good else "the part's input"
        return Bisection(segment.name, batch.name, name, error, budget, where, last, nodes, errors)
    return None


def _suspects(segment: Segment, good: Collection[str], bad: str) -> list[str]:
    """The nodes that the bad value depends on and that no good value vouches for, in the graph's order."""
    needed, suspects = {bad}, []
    for node in reversed(segment.nodes):
        if needed.intersection(node.output):
            suspects.append(f"{node.name} ({node.op_type})")
            needed |= {name for name in node.input if name not in good}
    return suspects[::-1]
