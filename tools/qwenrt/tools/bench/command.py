"""`qwenrt bench`: speed and memory of an engine, each measurement in a process of its own, or a server's under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from qwenrt.plugins import QwenrtError
from qwenrt.runtime import EngineDir

from ..extras import import_with_extra
from ..load.command import (
    LOAD_ONLY,
    SERVER_ONLY,
    LoadRun,
    check_all_answered,
    load_options,
    mix_runs,
    run_load,
    slo_of,
)
from ..load.load import Load
from ..load.report import table as load_table
from ..load.trace import latencies
from ..loading import engine_arguments
from ..options import engine_options
from ..progress import Spinner, spinner
from .report import Report
from .workloads import WORKLOADS, Workload

USUAL = ("prefill", "decode", "batch")


@click.command()
@click.argument("engine", required=False)
@click.option(
    "--workload",
    "workloads",
    type=click.Choice([*WORKLOADS, "mix"]),
    multiple=True,
    help="What to measure. Repeatable.  [default: prefill, decode and batch]",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON to a file, not to stdout.")
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Draw throughput, latencies and the parts of a step into this folder, as PNG.",
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each measurement.")
@engine_options
@load_options
@click.pass_context
def command(ctx: click.Context, /, engine: str | None, **options: Any) -> None:
    """Measure an engine's speed and memory, or a server's under load.

    Random prompts, greedy, past any end of text. Workloads: prefill (512 tokens); decode (128 tokens after 16, alone);
    long-context (32 after 4096); batch (16 requests of 128 + 64 together); shared-prefix (16 of 1024 shared + 32 + 32); mix
    (requests of ShareGPT-like lengths at a rate). A smaller engine gets smaller work, and the result says which. Each measurement
    runs in a fresh process; the values are medians of its runs. What memory and units can do at most is measured around them, to
    say what share of that is reached. JSON goes to stdout or the file, a table to stderr.

    With --url, any OpenAI-compatible server is loaded instead: streamed completions of random prompts, closed loop
    (--concurrency) or open loop (--rate), with throughput, time to first token and time between tokens.

    \b
    Examples:
      qwenrt bench engines/qwen3-0.6b > bench.json
      qwenrt bench engines/qwen3-0.6b --workload batch --concurrency 1 --concurrency 4 --concurrency 16 --plots plots
      qwenrt bench engines/qwen3-0.6b --workload mix --rate 0.5 --slo-ttft 1000 --slo-tpot 100
      qwenrt bench --url http://127.0.0.1:8000/v1 --concurrency 16 --words 64-256 --new-tokens 128
    """
    _check(ctx, engine, options)
    plots = import_with_extra(".bench.plots", "plots") if options["plots"] else None
    if engine is None:
        runs, traces = run_load(options)
        _put(options["json_file"], {"url": options["url"], "runs": runs}, load_table(options["url"], runs))
        if plots:
            samples = {run["load"]: latencies(one) for run, one in zip(runs, traces, strict=True)}
            plots.draw(options["plots"], plots.of_server(runs, samples))
        check_all_answered(runs)
    else:
        report = _Measurements(engine, options).report()
        _put(options["json_file"], report.result, report.table())
        if plots:
            plots.draw(options["plots"], plots.of_engine(report.result["workloads"], report.samples))


def _check(ctx: click.Context, engine: str | None, options: dict[str, Any]) -> None:
    """Refuse options that do not go together, and places that cannot be written to."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if (engine is None) == (options["url"] is None):
        raise click.UsageError("give an ENGINE folder, or --url with a server's address")
    chosen = options["workloads"] or USUAL
    wrong: set[str] = set()
    if engine is None:
        wrong, why = given - {"url", "json_file", "plots", "concurrency"} - SERVER_ONLY - LOAD_ONLY, "about a server"
    elif given & SERVER_ONLY:
        wrong, why = given & SERVER_ONLY, "about an engine folder"
    elif "mix" not in chosen:
        batch = "batch" in chosen
        wrong, why = given & (LOAD_ONLY if batch else LOAD_ONLY | {"concurrency"}), "without --workload mix"
    if wrong:
        name = next(param for param in ctx.command.params if param.name in wrong)
        raise click.UsageError(f"{name.opts[0]} says nothing {why}")
    file = options["json_file"]
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise click.UsageError(f"--json {file} is no file that could be written")


def _put(file: Path | None, result: dict[str, Any], table: Table) -> None:
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if file:
        file.write_text(text)
    else:
        click.echo(text, nl=False)
    Console(stderr=True, highlight=False).print(table)


class _Measurements:
    """The processes that measure an engine, in turn."""

    def __init__(self, engine: str, options: dict[str, Any]) -> None:
        self._folder = EngineDir.open(engine)
        self._options = options
        self._arguments = engine_arguments(options)
        self._threads = self._arguments["threads"] or len(os.sched_getaffinity(0))
        self._common = {
            "engine": engine,
            "arguments": self._arguments,
            "threads": self._threads,
            "repeats": options["repeats"],
        }

    def report(self) -> Report:
        """Run them all. What the machine can do is measured before and after the workloads."""
        chosen = list(dict.fromkeys(self._options["workloads"] or USUAL))
        sized = [(name, one) for name in chosen if name != "mix" for one in self._sized(name)]
        mixes = mix_runs(self._options) if "mix" in chosen else []
        loads = self._options["repeats"]
        with spinner("bench") as line:
            run = _Runner(self._common, line, loads + len(sized) + len(mixes) + 2)
            load = [run("load") for _ in range(loads)]
            before = run("machine")
            found = [run("workload", name, workload=asdict(workload)) for name, workload in sized]
            found_mixes = [run("mix", f"mix, {mix.label}", **_mix_spec(mix)) for mix in mixes]
            machine = [before, run("machine")]
        report = Report(self._folder, self._arguments, self._threads, machine)
        report.add_loads(load)
        for (name, _), raw in zip(sized, found, strict=True):
            report.add_workload(name, raw)
        for mix, raw in zip(mixes, found_mixes, strict=True):
            report.add_mix(mix.place, raw, slo_of(self._options))
        return report

    def _sized(self, name: str) -> list[Workload]:
        """The workload, or workload batch once for each number of sequences asked for."""
        if name != "batch":
            return [WORKLOADS[name]]
        counts = self._options["concurrency"] or (WORKLOADS[name].sequences,)
        return [replace(WORKLOADS[name], sequences=count) for count in counts]


def _mix_spec(mix: LoadRun) -> dict[str, Any]:
    load = mix.load
    plain = {
        field.name: getattr(load, field.name) for field in fields(Load) if field.name not in ("words", "new_tokens")
    }
    return {
        "load": plain,
        "sizes": {"words": asdict(load.words), "new_tokens": asdict(load.new_tokens)},  # type: ignore[call-overload]
        "concurrency": mix.concurrency,
    }


class _Runner:
    """Starts a worker for each measurement and waits for it, saying how far it is."""

    def __init__(self, common: dict[str, Any], line: Spinner, total: int) -> None:
        self._common, self._line, self._total, self._done = common, line, total, 0

    def __call__(self, measure: str, name: str | None = None, **spec: Any) -> dict[str, Any]:
        """What the worker found; raises QwenrtError with its last line if it failed."""
        self._done += 1
        self._line.update(f"{name or measure} ({self._done} of {self._total})")
        text = json.dumps(self._common | {"measure": measure} | spec)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if measure == "machine":
            environment["OPENBLAS_NUM_THREADS"] = "1"
        stdin, ours = os.pipe()
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"{__package__}.worker", text],
                env=environment,
                stdin=stdin,
                capture_output=True,
                text=True,
            )
        finally:
            os.close(stdin)
            os.close(ours)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise QwenrtError(f"measuring {name or measure} failed: {last}")
        result: dict[str, Any] = json.loads(done.stdout)
        return result
