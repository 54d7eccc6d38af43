"""`qwenrt bench`: speed and memory of an engine, each measurement in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qwenrt.plugins import QwenrtError
from qwenrt.runtime import EngineDir

from .load.command import LOAD_ONLY, load_options, run_load
from .loading import engine_arguments
from .options import engine_options
from .progress import Spinner, spinner


@click.command()
@click.argument("engine", required=False)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the JSON to a file, not to stdout.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each measurement.")
@engine_options
@load_options
@click.pass_context
def command(ctx: click.Context, /, engine: str | None, json_file: Path | None, repeats: int, **options: Any) -> None:
    """Measure an engine's speed and memory, or a server's under load.

    Random prompts, greedy, no end-of-text: prefill of 512 tokens; decoding 128 tokens after 16 alone; 16 requests of 128 + 64
    tokens together. A smaller engine gets smaller work, and the result says which. Each measurement runs in a fresh process; the
    values are medians of its runs. The read bandwidth of memory is measured around them, to say what share of it decoding
    reaches. JSON goes to stdout or the file, a table to stderr.

    With --url, any OpenAI-compatible server is loaded instead: streamed completions of random prompts, closed loop
    (--concurrency) or open loop (--rate), with throughput, time to first token and time between tokens.

    \b
    Examples:
      qwenrt bench engines/qwen3-0.6b > bench.json
      qwenrt bench engines/qwen3-0.6b --json bench.json --threads 2 --repeats 5
      qwenrt bench --url http://127.0.0.1:8000/v1 --concurrency 16 --words 64-256 --new-tokens 128
    """
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if (engine is None) == (options["url"] is None):
        raise click.UsageError("give an ENGINE folder, or --url with a server's address")
    wrong = given - {"url", "json_file"} - LOAD_ONLY if engine is None else given & LOAD_ONLY
    if wrong:
        name = sorted(wrong)[0].replace("_", "-")
        raise click.UsageError(f"--{name} says nothing about {'a server' if engine is None else 'an engine folder'}")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise click.UsageError(f"--json {json_file} is no file that could be written")
    if engine is None:
        run_load(options, json_file)
        return
    folder = EngineDir.open(engine)
    arguments = engine_arguments(options)
    threads = arguments["threads"] or len(os.sched_getaffinity(0))
    with spinner("bench") as line:
        raw = _measure_all(engine, arguments, threads, repeats, line)
    result = _summary(folder, arguments, threads, raw)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if json_file:
        json_file.write_text(text)
    else:
        click.echo(text, nl=False)
    Console(stderr=True, highlight=False).print(_table(result))


def _measure_all(
    engine: str, arguments: dict[str, Any], threads: int, repeats: int, line: Spinner
) -> dict[str, list[dict[str, Any]]]:
    """Results of every measurement's processes, by measurement."""
    order = ["bandwidth", *["load"] * repeats, "prefill", "bandwidth", "decode", "bandwidth", "batch"]
    raw: dict[str, list[dict[str, Any]]] = {}
    for number, measure in enumerate(order, 1):
        line.update(f"{measure} ({number} of {len(order)})")
        spec = {"measure": measure, "threads": threads, "repeats": repeats, "engine": engine, "arguments": arguments}
        raw.setdefault(measure, []).append(_worker(spec))
    return raw


def _worker(spec: dict[str, Any]) -> dict[str, Any]:
    command_line = [sys.executable, "-m", f"{__package__}.bench_worker", json.dumps(spec)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if spec["measure"] == "bandwidth":
        environment["OPENBLAS_NUM_THREADS"] = "1"
    stdin, ours = os.pipe()
    try:
        done = subprocess.run(command_line, env=environment, stdin=stdin, capture_output=True, text=True)
    finally:
        os.close(stdin)
        os.close(ours)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise QwenrtError(f"measuring {spec['measure']} failed: {last}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _summary(
    folder: EngineDir, arguments: dict[str, Any], threads: int, raw: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    manifest = folder.manifest
    prefill, decode, batch = (_stats(raw[name][0]) for name in ("prefill", "decode", "batch"))
    bandwidth = _spread([rate for one in raw["bandwidth"] for rate in one["read_gb_s"]])
    model = manifest.model
    gathered = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    share = (model.num_active_parameters - gathered) / model.num_parameters
    read = round(share * manifest.files["model.safetensors"].size)
    decode["weight_bytes_per_token"] = read
    decode["read_gb_s"] = read * decode["tokens_per_s"]["median"] / 1e9
    decode["bandwidth_share"] = decode["read_gb_s"] / bandwidth["median"]
    return {
        "engine": {
            "path": str(folder.path),
            "architecture": model.architecture,
            "parameters": model.num_parameters,
            "target": manifest.target,
            "dtype": manifest.dtype,
            "weights": manifest.weights,
            "kv_dtype": manifest.kv_dtype,
            "block_size": manifest.block_size,
            "bytes": sum(entry.size for entry in manifest.files.values()),
        },
        "options": {name: value for name, value in arguments.items() if value is not None},
        "machine": {
            "cpu": _cpu_model(),
            "cpus": len(os.sched_getaffinity(0)),
            "threads": threads,
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
            "read_gb_s": bandwidth,
        },
        "load": {"load_s": _spread([one["load_s"] for one in raw["load"]])},
        "prefill": prefill,
        "decode": decode,
        "batch": batch,
    }


def _stats(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _spread(value) if isinstance(value, list) else value for name, value in raw.items() if name != "load_s"
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _table(result: dict[str, Any]) -> Table:
    prefill, decode, batch = result["prefill"], result["decode"], result["batch"]
    table = Table("measurement", "median", "min", "max", title=Text(result["engine"]["path"]))
    for column in table.columns[1:]:
        column.justify = "right"

    def row(label: str, spread: dict[str, Any], unit: str, scale: float = 1.0) -> None:
        table.add_row(label, *(f"{spread[name] * scale:.4g} {unit}" for name in ("median", "min", "max")))

    row("load", result["load"]["load_s"], "s")
    row(f"time to first token, {prefill['tokens']} tokens", prefill["ttft_s"], "s")
    row("prefill", prefill["tokens_per_s"], "tok/s")
    row("decode, batch 1", decode["tokens_per_s"], "tok/s")
    sizes = f"{batch['sequences']} x ({batch['prompt_tokens']} + {batch['new_tokens']})"
    row(f"output, {sizes}", batch["output_tokens_per_s"], "tok/s")
    if "decode_tokens_per_s" in batch:
        row(f"decode, batch {batch['sequences']}", batch["decode_tokens_per_s"], "tok/s")
        row("  one step", batch["step_ms"], "ms")
        for name in ("schedule", "prepare", "execute", "sample", "process", "other"):
            row(f"  share of {name}", batch[f"share_{name}"], "%", 100)
    row("memory read bandwidth", result["machine"]["read_gb_s"], "GB/s")
    table.add_row("  reached by decode, batch 1", f"{100 * decode['bandwidth_share']:.4g} %", "", "")
    others = [run for part in (prefill, decode, batch) for run in part["other_cpus"]["runs"]]
    row(
        "CPUs that others used meanwhile",
        {"median": statistics.median(others), "min": min(others), "max": max(others)},
        "",
    )
    for label, part in (("peak memory, batch 1", decode), (f"peak memory, batch {batch['sequences']}", batch)):
        table.add_row(label, f"{part['peak_rss_bytes'] / 2**20:.0f} MiB", "", "")
    table.add_row("  KV pool", f"{batch['kv_pool_bytes'] / 2**20:.0f} MiB", "", "")
    table.add_row("  engine folder", f"{result['engine']['bytes'] / 2**20:.0f} MiB", "", "")
    return table
