"""What `qwenrt batch` does once its command line is read (needs the extra `serve`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from qwenrt.plugins import RequestError
from qwenrt.runtime.batch import BatchReport, EngineWorker, ResultFile, Row, RowReader, Worker, run_batch
from qwenrt.runtime.cluster.session import cluster_cpus, gpus_for, ray_session, threads_for
from qwenrt.runtime.engine_dir import EngineDir

from .loading import load_llm
from .progress import rows_bar
from .signals import run_async


def answer_here(engine: str, arguments: dict[str, Any], name: str, requests: Path, answers: Path) -> None:
    """Answer the requests that `answers` lacks with an engine in this process."""
    with _opened(answers) as results:
        llm = load_llm(engine, arguments)
        _run(requests, results, lambda: [EngineWorker(llm, name)])


def answer_on_ray(
    address: str,
    workers: int | None,
    engine: str,
    arguments: dict[str, Any],
    name: str,
    requests: Path,
    answers: Path,
) -> None:
    """Answer the requests that `answers` lacks with so many engines on Ray, by default one a node."""
    path = os.path.abspath(engine)
    gpus = gpus_for(EngineDir.open(path).manifest, arguments)
    with _opened(answers) as results, ray_session(address):
        from qwenrt.runtime.cluster.batch_worker import RayWorker

        cpus = cluster_cpus()
        count = len(cpus) if workers is None else workers
        arguments = arguments | {"threads": arguments["threads"] or threads_for(count, cpus)}
        _run(requests, results, lambda: [RayWorker(path, arguments, name, gpus=gpus) for _ in range(count)])


def _opened(path: Path) -> ResultFile:
    """The output; a long one is read with a bar."""
    with rows_bar(f"reading {path.name}") as bar:
        return ResultFile(path, lambda done, total: bar(f"reading {path.name}", done, total))


def _run(requests: Path, results: ResultFile, workers: Callable[[], Sequence[Worker]]) -> None:
    """Run a job and tell how it went; raises RequestError if the output has errors.

    A bar counts bytes of the input; rows that were there already are neither done nor to be done. workers: called where an event
    loop runs.
    """
    total = requests.stat().st_size
    done = skipped = found = 0
    with rows_bar("starting") as bar:

        def show(row: Row, report: BatchReport) -> None:
            nonlocal done, skipped, found
            if report.found > found:
                found, skipped = report.found, skipped + row.size
            else:
                done += row.size
            counted = f"{report.found + report.answered + report.failed} rows, {report.failed} failed"
            bar(counted, done, total - skipped if total else None)

        async def run() -> BatchReport:
            return await run_batch(RowReader(requests), results, workers(), show)

        report = run_async(run())
    click.echo(
        f"{report.answered + report.failed} rows done, {report.failed} of them with an error; "
        f"{report.found} were there already",
        err=True,
    )
    if results.failed:
        raise RequestError(f"{results.failed} of the {results.written} rows in {results.path} tell of an error")
