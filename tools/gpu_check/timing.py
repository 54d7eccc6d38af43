"""Times of work on the GPU, by CUDA events around replays of a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MIN_REPLAYS, _MAX_REPLAYS = 5, 100
_SECONDS = 0.25  # of replays, where so many are not too many


def warm_up(seconds: float = 0.5) -> None:
    """Keeps the GPU busy until its clocks are up."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    while True:
        for _ in range(20):
            a @ a
        end.record()
        end.synchronize()
        if start.elapsed_time(end) > 1000 * seconds:
            return


def seconds_per_call(calls: Sequence[Callable[[], Any]]) -> float:
    """The median time of one of `calls`, which are captured as one graph and replayed; they may differ in the memory they use.

    Each has run once before the capture, so that what CUDA loads and what a library chooses when it is first called is not timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        first = _replay(graph)
        replays = min(max(int(_SECONDS / max(first, 1e-6)), _MIN_REPLAYS), _MAX_REPLAYS)
        times = [_replay(graph) for _ in range(replays)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times) / len(calls)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, both taken as vectors; NaN if there is one."""
    difference = actual.float() - expected.float()
    return float(difference.norm() / expected.float().norm())
