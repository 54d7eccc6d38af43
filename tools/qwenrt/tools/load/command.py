"""The part of `qwenrt bench` that loads a server: `--url` and the options that go with it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from qwenrt.plugins import QwenrtError

from ..progress import spinner
from .workload import Range, Workload

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_IN_FLIGHT = 4096


class RangeType(click.ParamType[Range]):
    """A size, or two with a dash between them."""

    name = "n[-m]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Range:
        """The Range; a usage error for anything but 1 to 9,999,999 in order."""
        if isinstance(value, Range):
            return value
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", value, re.ASCII)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            self.fail(f"{value!r} is no size; write a number such as 128, or a range such as 64-256", param, ctx)
        return Range(low, high)


def load_options(function: Function) -> Function:
    """`--url` and what goes with it; `run_load` takes them."""
    size = RangeType()
    for option in (
        click.option("--timeout", type=click.FloatRange(min=0.1), default=600.0, show_default=True, help="Seconds."),
        click.option("--seed", type=int, default=0, show_default=True, help="The same seed asks the same."),
        click.option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.  [env: OPENAI_API_KEY]"),
        click.option("--model", help="Model to ask for.  [default: the first that the server names]"),
        click.option("--shared-words", type=click.IntRange(0, 10**6), default=0, help="Words all prompts begin with."),
        click.option("--new-tokens", type=size, default="64", show_default=True, help="Tokens to generate."),
        click.option("--words", type=size, default="100", show_default=True, help="Words of a prompt."),
        click.option("--requests", type=click.IntRange(1, 10**7), default=64, show_default=True, help="Of each run."),
        click.option(
            "--rate", type=click.FloatRange(min=1e-3), multiple=True, help="Requests a second (open loop). Repeatable."
        ),
        click.option(
            "--concurrency",
            type=click.IntRange(1, _MOST_IN_FLIGHT),
            multiple=True,
            help="Clients with a request each (closed loop). Repeatable.  [default: 1 and 16]",
        ),
        click.option("--url", help="Load the OpenAI-compatible server here, such as http://127.0.0.1:8000/v1."),
    ):
        function = option(function)
    return function


LOAD_ONLY = frozenset(
    {"concurrency", "rate", "requests", "words", "new_tokens", "shared_words", "model", "api_key", "seed", "timeout"}
)
"""Parameters that mean something with `--url` alone."""


def run_load(options: dict[str, Any], json_file: Path | None) -> None:
    """Run each load, print a table to stderr and JSON to the file or stdout. Raises QwenrtError if no request was answered."""
    if not re.match(r"https?://[^/]", options["url"]):
        raise click.UsageError(f"--url is {options['url']!r}; it looks like http://127.0.0.1:8000/v1")
    try:
        from .report import table
    except ImportError as error:
        raise QwenrtError(f"bench --url needs httpx ({error}); install it with: pip install 'qwenrt[serve]'") from None
    rates: tuple[float, ...] = options["rate"]
    closed = options["concurrency"] or (() if rates else (1, 16))
    loads: list[tuple[str, float | None, int]] = [(f"{count} clients", None, count) for count in closed]
    loads += [(f"{rate:g} requests/s", rate, _MOST_IN_FLIGHT) for rate in rates]
    runs = asyncio.run(_run_all(options, loads))
    text = json.dumps({"url": options["url"], "runs": runs}, indent=2, allow_nan=False) + "\n"
    if json_file:
        json_file.write_text(text)
    else:
        click.echo(text, nl=False)
    Console(stderr=True, highlight=False).print(table(options["url"], runs))
    failed = sum(run["failed"] for run in runs)
    if failed:
        first = next(iter(next(run["errors"] for run in runs if run["errors"])))
        raise QwenrtError(
            f"{failed} of {sum(run['requests'] for run in runs)} requests failed; the most frequent: {first}"
        )


async def _run_all(options: dict[str, Any], loads: list[tuple[str, float | None, int]]) -> list[dict[str, Any]]:
    from .client import Client
    from .report import summarize
    from .run import run, warm_up_work

    runs = []
    connections = max(count for _, _, count in loads)
    client = Client(
        options["url"],
        api_key=options["api_key"],
        model=options["model"],
        connections=connections,
        timeout=options["timeout"],
    )
    with spinner(f"bench {options['url']}") as line:
        async with client:
            for number, (label, rate, concurrency) in enumerate(loads):
                workload = Workload(
                    requests=options["requests"],
                    words=options["words"],
                    new_tokens=options["new_tokens"],
                    shared_words=options["shared_words"],
                    rate=rate,
                    # Another seed for each run: no prompt of one is in the prefix cache of the next.
                    seed=options["seed"] * 1000 + number,
                )
                if number == 0:
                    await client.complete(next(warm_up_work(workload)))
                done = 0

                def on_end(label: str = label) -> None:
                    nonlocal done
                    done += 1
                    line.update(f"{label}: {done} of {options['requests']}")

                traces = await run(client, workload, concurrency, on_end)
                runs.append(
                    {"load": label, "concurrency": concurrency if rate is None else None, "rate": rate}
                    | summarize(traces)
                )
    return runs
