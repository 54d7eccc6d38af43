"""Runs a load on a server: closed loop (clients with one request each at a time) or open loop (requests when they are due)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import perf_counter

from .client import Client
from .load import Load, Work
from .trace import Trace


async def run(client: Client, load: Load, concurrency: int, on_end: Callable[[], None]) -> list[Trace]:
    """Traces of all requests, at most `concurrency` of them in flight at once; `on_end` is called after each.

    A request that is due while all clients are busy waits, and its time counts from when it was due.
    """
    queue = iter(load)
    start = perf_counter()
    traces: list[Trace] = []

    async def worker() -> None:
        for work in queue:
            due = start + work.due
            await asyncio.sleep(max(0.0, due - perf_counter()))
            trace = await client.complete(work)
            if load.rate is not None:
                trace.started = due
            traces.append(trace)
            on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, load.requests)):
            group.create_task(worker())
    return traces


def warm_up_work(load: Load) -> Iterator[Work]:
    """A request like the load's, with a prompt of its own."""
    return iter(Load(requests=1, words=load.words, new_tokens=load.new_tokens, shared_words=0, rate=None, seed=-1))
