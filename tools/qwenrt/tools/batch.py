"""`qwenrt batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenrt.plugins import ConfigError, RequestError

from .loading import engine_arguments, load_llm
from .options import engine_options
from .progress import rows_bar

if TYPE_CHECKING:
    from qwenrt.runtime.batch import BatchReport, ResultFile, Row, RowReader


@click.command()
@click.argument("engine")
@click.argument("requests", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("answers", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--served-model-name", help="What requests call the model.  [default: the folder's name]")
@engine_options
def command(engine: str, requests: Path, answers: Path, served_model_name: str | None, **options: Any) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A line of IN.jsonl is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; url is one of the server's
    (chat/completions, completions, embeddings, responses) and body what the server takes. OUT.jsonl gets a line for each, in any
    order: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. A line that is no request gets one
    too, with an error that has its number; the others go on, and the exit status is then 1.

    Rows that OUT.jsonl has are not computed again: run the same command after an interruption, whatever it was, and it goes on. A
    killed process loses the rows in flight, a power cut also those of about the last second.

    \b
    Examples:
      qwenrt batch engines/qwen3-0.6b requests.jsonl answers.jsonl
      qwenrt batch engines/qwen3-0.6b requests.jsonl answers.jsonl --served-model-name gpt-4o-mini --kv-memory 4GiB
    """
    try:
        from qwenrt.runtime.batch import EngineWorker, ResultFile, RowReader, run_batch
    except ModuleNotFoundError as error:
        raise ConfigError(f"qwenrt batch needs the module {error.name}; run: pip install 'qwenrt[serve]'") from None
    arguments = engine_arguments(options)
    if answers.exists() and requests.samefile(answers):
        raise click.UsageError("IN.jsonl and OUT.jsonl are the same file")
    name = served_model_name or Path(os.path.abspath(engine)).name

    async def run(results: ResultFile, show: Callable[[Row, BatchReport], None]) -> BatchReport:
        workers = [EngineWorker(llm, name)]
        return await run_batch(RowReader(requests), results, workers, show)

    with _opened(ResultFile, answers) as results:
        llm = load_llm(engine, arguments)
        report = _run(RowReader(requests), lambda show: asyncio.run(run(results, show)))
        _tell(report, results)


def _opened(kind: type[ResultFile], path: Path) -> ResultFile:
    """The output; a long one is read with a bar."""
    with rows_bar(f"reading {path.name}") as bar:
        return kind(path, lambda done, total: bar(f"reading {path.name}", done, total))


def _run(requests: RowReader, run: Callable[[Callable[[Row, BatchReport], None]], BatchReport]) -> BatchReport:
    """Run a job with a bar that counts bytes of the input; rows that were there already are neither done nor to be done."""
    total = requests.path.stat().st_size
    done = skipped = found = 0

    with rows_bar("answering") as bar:

        def show(row: Row, report: BatchReport) -> None:
            nonlocal done, skipped, found
            if report.found > found:
                found, skipped = report.found, skipped + row.size
            else:
                done += row.size
            counted = f"{report.found + report.answered + report.failed} rows, {report.failed} failed"
            bar(counted, done, total - skipped if total else None)

        return run(show)


def _tell(report: BatchReport, results: ResultFile) -> None:
    click.echo(
        f"{report.answered + report.failed} rows done, {report.failed} of them with an error; {report.found} were there already",
        err=True,
    )
    if results.failed:
        raise RequestError(f"{results.failed} of the {results.written} rows in {results.path} tell of an error")
