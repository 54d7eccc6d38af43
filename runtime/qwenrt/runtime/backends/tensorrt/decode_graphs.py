"""Steps in which each sequence has one token, as CUDA graphs: one for each padded number of sequences."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from contextlib import ExitStack

from .device import Device, give_back
from .execution import Execution, Shape
from .plan_loader import DECODE, LoadedPlan
from .step_buffers import StepSizes


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that there are graphs for: 1, 2, 4, 8, then every eighth, and `max_num_seqs` itself."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """A graph for each of `padded_sizes`, each from a context of its own, as TensorRT asks; tables have `max_blocks` columns."""

    def __init__(
        self, loaded: LoadedPlan, memory: tuple[int, int], stream: int, max_num_seqs: int, max_blocks: int
    ) -> None:
        """Make the contexts; `capture` makes the graphs, when the KV pool is there."""
        self._sizes = padded_sizes(max_num_seqs)
        self._max_blocks = max_blocks
        self._stream = stream
        self._executions = [Execution(loaded, DECODE, memory, stream, fixed_shapes=True) for _ in self._sizes]
        self._graphs: list[int | None] = []

    def capture(
        self,
        device: Device,
        addresses: Mapping[str, int],
        shapes: Mapping[str, Shape],
        resources: ExitStack,
    ) -> None:
        """Bind each context, run it on what the buffers hold (padding), and capture it; `resources` gives the graphs back."""
        for size, execution in zip(self._sizes, self._executions, strict=True):
            sizes = self._step_sizes(size)
            execution.bind(addresses, {**shapes, **sizes.shapes})
            graph = execution.capture(device)
            self._graphs.append(graph)
            if graph is not None:
                give_back(resources, device.destroy_graph, graph)

    def sizes_for(self, num_seqs: int) -> StepSizes:
        """The padded sizes of a step of `num_seqs` sequences."""
        return self._step_sizes(self._sizes[bisect.bisect_left(self._sizes, num_seqs)])

    def run(self, device: Device, sizes: StepSizes) -> None:
        """Queue a step of exactly these sizes."""
        index = self._sizes.index(sizes.num_seqs)
        graph = self._graphs[index]
        if graph is None:
            self._executions[index].enqueue()
        else:
            device.launch(graph, self._stream)

    def _step_sizes(self, size: int) -> StepSizes:
        return StepSizes(size, size, size, self._max_blocks)
