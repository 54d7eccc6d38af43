"""The part of `qwenrt bench` that says what a load is, and puts it on a server: `--url` and the options that go with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from qwenrt.plugins import QwenrtError

from ..progress import spinner
from ..signals import run_async
from .load import SHAREGPT_ANSWERS, SHAREGPT_PROMPTS, Load, LogNormal, Range, Sizes
from .trace import Slo, Trace, summarize

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_IN_FLIGHT = 4096


class SizesType(click.ParamType[Sizes]):
    """A size, two with a dash between them, or a log-normal distribution."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sizes:
        """The distribution; a usage error for anything but sizes of 1 to 9,999,999 in order."""
        if isinstance(value, Range | LogNormal):
            return value
        if match := re.fullmatch(r"lognormal:(\d{1,7}):(\d{1,2}(?:\.\d{1,9})?):(\d{1,7})", value, re.ASCII):
            median, sigma, most = int(match[1]), float(match[2]), int(match[3])
            if 1 <= median <= most:
                return LogNormal(median, sigma, most)
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", value, re.ASCII)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            self.fail(
                f"{value!r} is no size; write a number such as 128, a range such as 64-256, or lognormal:MEDIAN:SIGMA:MOST "
                "such as lognormal:88:1.1:1024",
                param,
                ctx,
            )
        return Range(low, high)


def load_options(function: Function) -> Function:
    """What a load is; `loads_of` takes them."""
    size = SizesType()
    milliseconds = click.FloatRange(min=0, min_open=True)
    for option in (
        click.option("--timeout", type=click.FloatRange(min=0.1), default=600.0, show_default=True, help="Seconds."),
        click.option("--seed", type=int, default=0, show_default=True, help="The same seed asks the same."),
        click.option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.  [env: OPENAI_API_KEY]"),
        click.option("--model", help="Model to ask for.  [default: the first that the server names]"),
        click.option(
            "--slo-tpot",
            type=milliseconds,
            default=200.0,
            show_default=True,
            help="Goodput counts requests that took no more milliseconds a token after the first, on average.",
        ),
        click.option(
            "--slo-ttft",
            type=milliseconds,
            default=2000.0,
            show_default=True,
            help="Goodput counts requests whose first token came within so many milliseconds.",
        ),
        click.option("--shared-words", type=click.IntRange(0, 10**6), default=0, help="Words all prompts begin with."),
        click.option(
            "--new-tokens", type=size, help="Tokens to generate.  [default: 64; workload mix: as ShareGPT's answers]"
        ),
        click.option("--words", type=size, help="Words of a prompt.  [default: 100; workload mix: as ShareGPT's]"),
        click.option("--requests", type=click.IntRange(1, 10**7), default=64, show_default=True, help="Of each run."),
        click.option(
            "--rate",
            type=click.FloatRange(min=1e-3),
            multiple=True,
            help="Requests a second (open loop, Poisson). Repeatable.  [default: 1 for workload mix]",
        ),
        click.option(
            "--concurrency",
            type=click.IntRange(1, _MOST_IN_FLIGHT),
            multiple=True,
            help="Clients with a request each (closed loop), or sequences of workload batch. Repeatable.  [default: 1 and 16 for "
            "--url, 16 for batch]",
        ),
        click.option("--url", help="Load the OpenAI-compatible server here, such as http://127.0.0.1:8000/v1."),
    ):
        function = option(function)
    return function


SERVER_ONLY = frozenset({"model", "api_key", "timeout"})
"""Parameters that mean something with `--url` alone."""

LOAD_ONLY = frozenset({"rate", "requests", "words", "new_tokens", "shared_words", "slo_ttft", "slo_tpot", "seed"})
"""Parameters that mean something with `--url` and for workload mix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """A load, how many of its requests may be in flight, and what it is called."""

    label: str
    load: Load
    concurrency: int

    @property
    def place(self) -> dict[str, Any]:
        """What a result says of it."""
        closed = self.load.rate is None
        return {
            "load": self.label,
            "concurrency": self.concurrency if closed else None,
            "rate": self.load.rate,
        }


def slo_of(options: dict[str, Any]) -> Slo:
    """The Slo that the options ask for."""
    return Slo(ttft=options["slo_ttft"] / 1000, tpot=options["slo_tpot"] / 1000)


def server_runs(options: dict[str, Any]) -> list[LoadRun]:
    """The runs of `--url`: closed loops with 1 and 16 clients unless told otherwise."""
    closed = options["concurrency"] or (() if options["rate"] else (1, 16))
    return _runs(options, closed, options["rate"], Range(100, 100), Range(64, 64))


def mix_runs(options: dict[str, Any]) -> list[LoadRun]:
    """The runs of workload mix: sizes like ShareGPT's at a request a second unless told otherwise."""
    rates = options["rate"] or (() if options["concurrency"] else (1.0,))
    return _runs(options, options["concurrency"], rates, SHAREGPT_PROMPTS, SHAREGPT_ANSWERS)


def _runs(
    options: dict[str, Any], closed: tuple[int, ...], rates: tuple[float, ...], words: Sizes, new_tokens: Sizes
) -> list[LoadRun]:
    kinds: list[tuple[str, float | None, int]] = [(f"{count} clients", None, count) for count in closed]
    kinds += [(f"{rate:g} requests/s", rate, _MOST_IN_FLIGHT) for rate in rates]
    return [
        LoadRun(
            label=label,
            concurrency=concurrency,
            load=Load(
                requests=options["requests"],
                words=options["words"] or words,
                new_tokens=options["new_tokens"] or new_tokens,
                shared_words=options["shared_words"],
                rate=rate,
                # Another seed for each run: no prompt of one is in the prefix cache of the next.
                seed=options["seed"] * 1000 + number,
            ),
        )
        for number, (label, rate, concurrency) in enumerate(kinds)
    ]


def run_load(options: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[Trace]]]:
    """Put each load on the server; the summary and the traces of each."""
    if not re.match(r"https?://[^/]", options["url"]):
        raise click.UsageError(f"--url is {options['url']!r}; it looks like http://127.0.0.1:8000/v1")
    runs = server_runs(options)
    traces = run_async(_run_all(options, runs))
    slo = slo_of(options)
    return [run.place | summarize(of_run, slo) for run, of_run in zip(runs, traces, strict=True)], traces


def check_all_answered(runs: list[dict[str, Any]]) -> None:
    """Raise QwenrtError, with the most frequent reason, if any request failed."""
    failed = sum(run["failed"] for run in runs)
    if failed:
        first = next(iter(next(run["errors"] for run in runs if run["errors"])))
        raise QwenrtError(
            f"{failed} of {sum(run['requests'] for run in runs)} requests failed; the most frequent: {first}"
        )


async def _run_all(options: dict[str, Any], runs: list[LoadRun]) -> list[list[Trace]]:
    try:
        from .client import Client
    except ImportError as error:
        raise QwenrtError(f"bench --url needs httpx ({error}); install it with: pip install 'qwenrt[serve]'") from None
    from .run import run, warm_up_work

    traces: list[list[Trace]] = []
    client = Client(
        options["url"],
        api_key=options["api_key"],
        model=options["model"],
        connections=max(one.concurrency for one in runs),
        timeout=options["timeout"],
    )
    with spinner(f"bench {options['url']}") as line:
        async with client:
            await client.complete(next(warm_up_work(runs[0].load)))
            for one in runs:
                done = 0

                def on_end(one: LoadRun = one) -> None:
                    nonlocal done
                    done += 1
                    line.update(f"{one.label}: {done} of {one.load.requests}")

                traces.append(await run(client, one.load, one.concurrency, on_end))
    return traces
