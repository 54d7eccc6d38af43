"""A batch job: rows from the input to workers, and their answers to the output, until every row has one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from qwenrt.plugins import QwenrtError

from .disk_set import DiskSet
from .results import ResultFile
from .rows import Row
from .worker import Answer

WINDOW_ROWS = 4096
WINDOW_BYTES = 64 << 20
"""Input that is read ahead, to be sorted by prefix."""
RUN_ROWS = 16
"""Neighbours of a window that go to one worker, so that a shared prompt is in the prefix cache of one."""
SYNC_SECONDS = 1.0
"""How much of the output a power cut may cost."""
MAX_ATTEMPTS = 3
"""Workers that a row may be lost with before it is taken to be what kills them."""


class WorkerLostError(QwenrtError):
    """A worker ended without an answer; another one may have it."""


class Worker(Protocol):
    """What answers rows."""

    @property
    def capacity(self) -> int:
        """Rows that it should have at a time."""

    async def start(self) -> None:
        """Get ready; called before the first row, and again after it was lost. Raises WorkerLostError if it is lost already."""

    async def answer(self, url: str, body: bytes) -> Answer:
        """Answer a request; raises WorkerLostError if others must do that."""

    async def close(self) -> None:
        """End, whatever it is doing."""


@dataclass(slots=True)
class BatchReport:
    """What a run did."""

    found: int = 0
    """Rows that the output had already."""
    answered: int = 0
    """Rows that this run added with an answer."""
    failed: int = 0
    """Rows that this run added with an error."""


async def run_batch(
    rows: Iterable[Row],
    results: ResultFile,
    workers: Sequence[Worker],
    on_row: Callable[[Row, BatchReport], None] = lambda row, report: None,
) -> BatchReport:
    """Answer the rows that `results` lacks; returns when each has a line there.

    A row is in flight at one worker at a time; if that is lost, the rows that it had go to whoever is free, and those alone are
    computed again. on_row: called when a row is done, or found to be done before. Raises what ends a worker for good; the output
    then has what was done until then.
    """
    report = BatchReport()
    seen = DiskSet()
    job = _Job(_sorted_runs(_open_rows(rows, results, seen, report, on_row)), results, report, on_row)
    syncing = asyncio.ensure_future(_sync_regularly(results))
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(job.serve(worker))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        seen.close()
        results.sync()
    return report


def _open_rows(
    rows: Iterable[Row],
    results: ResultFile,
    seen: DiskSet,
    report: BatchReport,
    on_row: Callable[[Row, BatchReport], None],
) -> Iterator[Row]:
    """The requests that have no answer yet; what is no request gets its line here."""
    for row in rows:
        if row.code is None and not seen.add(row.key):
            row.code = "duplicate_custom_id"
            row.message = f"custom_id {row.custom_id!r} is that of an earlier line"
        if row in results:
            report.found += 1
        elif row.code is not None:
            results.write_error(row, row.code, row.message)
            report.failed += 1
        else:
            yield row
            continue
        on_row(row, report)


def _sorted_runs(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """The rows, a window at a time by prefix, in runs of neighbours."""
    while True:
        window: list[Row] = []
        size = 0
        for row in rows:
            window.append(row)
            size += row.size
            if len(window) == WINDOW_ROWS or size > WINDOW_BYTES:
                break
        if not window:
            return
        window.sort(key=lambda row: row.prefix)
        for start in range(0, len(window), RUN_ROWS):
            yield window[start : start + RUN_ROWS]


async def _sync_regularly(results: ResultFile) -> None:
    written = results.written
    while True:
        await asyncio.sleep(SYNC_SECONDS)
        if results.written != written:
            written = results.written
            await asyncio.to_thread(results.sync)


class _Job:
    """The rows that wait, and those that workers have."""

    def __init__(
        self,
        runs: Iterator[list[Row]],
        results: ResultFile,
        report: BatchReport,
        on_row: Callable[[Row, BatchReport], None],
    ) -> None:
        self._runs = runs
        self._returned: deque[Row] = deque()
        self._taken = 0
        """Rows that workers have, done or not known to be."""
        self._changed = asyncio.Condition()
        self._results = results
        self._report = report
        self._on_row = on_row

    async def serve(self, worker: Worker) -> None:
        """Give a worker rows until all rows are done, and get it back on its feet when it is lost."""
        losses = 0
        try:
            while True:
                written = self._results.written
                try:
                    await worker.start()
                    reason = await self._feed(worker)
                except WorkerLostError as error:
                    reason = error
                if reason is None:
                    return
                losses = 1 if self._results.written > written else losses + 1
                if losses == MAX_ATTEMPTS:
                    raise reason
        finally:
            await worker.close()

    async def _feed(self, worker: Worker) -> WorkerLostError | None:
        """Keep a worker busy; returns None when all rows are done, or why it was lost."""
        room = asyncio.Semaphore(worker.capacity)
        losses: list[WorkerLostError] = []

        async def answer(row: Row, places: int) -> None:
            try:
                self._finish(row, await worker.answer(row.url, row.body))
            except WorkerLostError as error:
                losses.append(error)
                row.attempts += 1
                self._give_back(row, error)
            finally:
                for _ in range(places):
                    room.release()
            async with self._changed:
                self._changed.notify_all()

        async with asyncio.TaskGroup() as group:
            while not losses and (run := await self._take()):
                for index, row in enumerate(run):
                    # Once more than that and a row is given up: it goes alone, so that no other row is blamed for what it does.
                    places = worker.capacity if row.attempts == MAX_ATTEMPTS - 1 else 1
                    for _ in range(places):
                        await room.acquire()
                    if losses:
                        self._returned.extend(run[index:])
                        self._taken -= len(run) - index
                        break
                    group.create_task(answer(row, places))
        async with self._changed:
            self._changed.notify_all()
        return losses[0] if losses else None

    async def _take(self) -> list[Row]:
        """The next rows; none when all are done."""
        async with self._changed:
            while True:
                if self._returned:
                    run = [self._returned.popleft() for _ in range(min(RUN_ROWS, len(self._returned)))]
                else:
                    run = next(self._runs, [])
                self._taken += len(run)
                if run or not self._taken:
                    return run
                # What others have may come back.
                await self._changed.wait()

    def _finish(self, row: Row, answer: Answer) -> None:
        self._results.write_answer(row, answer)
        if answer.status < 400:
            self._report.answered += 1
        else:
            self._report.failed += 1
        self._taken -= 1
        self._on_row(row, self._report)

    def _give_back(self, row: Row, error: WorkerLostError) -> None:
        self._taken -= 1
        if row.attempts < MAX_ATTEMPTS:
            self._returned.append(row)
            return
        self._results.write_error(row, "worker_lost", f"{MAX_ATTEMPTS} workers were lost with it; the last: {error}")
        self._report.failed += 1
        self._on_row(row, self._report)
