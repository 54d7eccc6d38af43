"""Comparing one tensor of the graph, and saying where it is off: row, sequence and position, head, column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batches import Batch
from .feeds import Array, row_place
from .graph import LOGITS, EngineGraph
from .metrics import Deviation, deviation


@dataclass(frozen=True)
class Located:
    """A tensor's deviation and its place in words."""

    deviation: Deviation
    where: str
    heads: str = ""
    """Which heads are off, where the tensor has heads and some but not all of them are."""


class Locator:
    """Compares the tensors of one batch that have a row for each token, and logits."""

    def __init__(self, graph: EngineGraph, num_heads: int, num_kv_heads: int, batch: Batch) -> None:
        self._batch = batch
        self._queries = num_heads
        self._packed = num_heads + 2 * num_kv_heads
        self._kv_heads = num_kv_heads
        # Tensors that consist of heads, and how many.
        self._heads: dict[str, int] = {}
        for node in graph.model.graph.node:
            if node.op_type == "PagedAttention":
                self._heads |= {node.output[0]: num_heads, node.input[0]: self._packed}

    def has_heads(self, name: str) -> bool:
        """Whether a tensor is compared head by head."""
        return name in self._heads

    def compare(self, name: str, actual: Array, expected: Array, limit: float) -> Located:
        """Compare a tensor [rows, columns], head by head where it has heads; rows that belong to no sequence are left out.

        limit: above which a head counts as off.
        """
        prefix = f"batch {self._batch.name}"
        if name != LOGITS:
            rows = self._batch.feed["query_start"][-1]
            actual, expected = actual[:rows], expected[:rows]
        heads = self._heads.get(name, 1)
        if heads > 1 and actual.shape == expected.shape:
            actual, expected = (tensor.reshape(len(tensor) * heads, -1) for tensor in (actual, expected))
        result = deviation(actual, expected)
        if result.row is None:
            return Located(result, prefix)
        row, head = divmod(result.row, heads)
        if name == LOGITS:
            row = int(self._batch.feed["logits_indices"][row])
        where = f"{prefix}, {row_place(self._batch.feed, row)}"
        if heads == 1:
            return Located(result, f"{where}, {'token' if name == LOGITS else 'column'} {result.column}")
        return Located(result, f"{where}, {self._head_name(head, heads)}", self._off(actual, expected, heads, limit))

    def _head_name(self, head: int, heads: int) -> str:
        if heads == self._queries:
            return f"query head {head}"
        if head < self._queries:
            return f"query head {head} of the projection"
        part, index = divmod(head - self._queries, self._kv_heads)
        return f"{('key', 'value')[part]} head {index} of the projection"

    def _off(self, actual: Array, expected: Array, heads: int, limit: float) -> str:
        """Which heads are off in some row."""
        if heads != self._queries:
            return ""
        got, want = (tensor.astype(np.float32).reshape(-1, heads, tensor.shape[-1]) for tensor in (actual, expected))
        off = ~(np.abs(got - want).max(2) <= limit * np.maximum(np.abs(want).max(2), 1e-30))
        which = np.flatnonzero(off.any(0))
        if which.size in (0, heads):
            return "all query heads are off" if which.size else ""
        return f"query head{'s' if which.size > 1 else ''} {', '.join(map(str, which))} of {heads} off"
