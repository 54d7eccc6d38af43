"""Runs a workload: closed loop (so many clients, each with one request at a time) or open loop (requests when they are due)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import perf_counter

from .client import Client, Trace
from .workload import Work, Workload


async def run(client: Client, workload: Workload, concurrency: int, on_end: Callable[[], None]) -> list[Trace]:
    """Traces of all requests, at most `concurrency` of them in flight at once; `on_end` is called after each.

    A request that is due while all clients are busy waits, and its time counts from when it was due.
    """
    queue = iter(workload)
    start = perf_counter()
    traces: list[Trace] = []

    async def worker() -> None:
        for work in queue:
            due = start + work.due
            await asyncio.sleep(max(0.0, due - perf_counter()))
            trace = await client.complete(work)
            if workload.rate is not None:
                trace.started = due
            traces.append(trace)
            on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, workload.requests)):
            group.create_task(worker())
    return traces


def warm_up_work(workload: Workload) -> Iterator[Work]:
    """A request like the workload's, with a prompt of its own."""
    return iter(
        Workload(requests=1, words=workload.words, new_tokens=workload.new_tokens, shared_words=0, rate=None, seed=-1)
    )
