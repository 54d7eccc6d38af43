"""`qwenrt batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from .extras import import_with_extra
from .loading import engine_arguments
from .options import COUNT, engine_options, ray_option


@click.command()
@click.argument("engine")
@click.argument("requests", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("answers", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--served-model-name", help="What requests call the model.  [default: the folder's name]")
@ray_option
@click.option("--workers", type=COUNT, help="With --ray: engines that share the rows.  [default: one a node]")
@engine_options
def command(
    engine: str,
    requests: Path,
    answers: Path,
    served_model_name: str | None,
    ray_address: str | None,
    workers: int | None,
    **options: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A line of IN.jsonl is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; url is one of the server's
    (chat/completions, completions, embeddings, responses) and body what the server takes. OUT.jsonl gets a line for each, in any
    order: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. A line that is no request gets one
    too, with an error that has its number; the others go on, and the exit status is then 1.

    Rows that OUT.jsonl has are not computed again: after an interruption, whatever it was, the same command goes on. A
    killed process loses the rows in flight, a power cut also those of about the last second.

    With --ray, each worker is a process with an engine of its own, and ENGINE a path that all nodes have. A worker that is lost
    is replaced, and the rows that it had go to the others.

    \b
    Examples:
      qwenrt batch engines/qwen3-0.6b requests.jsonl answers.jsonl
      qwenrt batch engines/qwen3-0.6b requests.jsonl answers.jsonl --served-model-name gpt-4o-mini --kv-memory 4GiB
      qwenrt batch /shared/qwen3-0.6b requests.jsonl answers.jsonl --ray 10.0.0.1:6379 --workers 8
    """
    if workers is not None and ray_address is None:
        raise click.UsageError("--workers needs --ray")
    if answers.exists() and requests.samefile(answers):
        raise click.UsageError("IN.jsonl and OUT.jsonl are the same file")
    arguments = engine_arguments(options)
    name = served_model_name or Path(os.path.abspath(engine)).name
    jobs = import_with_extra(".batch_job", "serve")
    if ray_address is None:
        jobs.answer_here(engine, arguments, name, requests, answers)
    else:
        jobs.answer_on_ray(ray_address, workers, engine, arguments, name, requests, answers)
