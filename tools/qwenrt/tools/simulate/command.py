"""`qwenrt simulate`: what engines would do under a load, without running a model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console

from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import MANIFEST_NAME, EngineManifest, Limits

from ..extras import import_with_extra
from ..load.command import SizesType
from ..load.trace import Slo
from ..options import BYTE_SIZE, COUNT
from ..progress import spinner
from .cost_model import CostModel, weight_bytes_of
from .fit import fit, steps_of_bench
from .replica import EngineShape
from .report import summarize, table, utilisation
from .search import fewest_replicas
from .simulation import POLICIES, Cluster, Results, Simulation
from .workload import Trace, Workload

_MEASURE_SECONDS = 10.0


@click.command()
@click.argument("engine", type=click.Path(exists=True, path_type=Path))
@click.option("--replicas", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Engines.")
@click.option(
    "--find-replicas",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Search the fewest replicas with which that share of the requests keeps the SLO, such as 0.99.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="least-outstanding",
    show_default=True,
    help="How the router shares requests among replicas.",
)
@click.option(
    "--max-imbalance",
    type=click.IntRange(min=0),
    default=8192,
    show_default=True,
    help="Policy prefix: tokens that a prefix's home may have more to do than the least busy replica.",
)
@click.option(
    "--rate", type=click.FloatRange(min=1e-3), default=1.0, show_default=True, help="Requests a second, Poisson."
)
@click.option("--requests", type=click.IntRange(1, 10**8), default=1000, show_default=True)
@click.option("--prompt-tokens", type=SizesType(), default="128-512", show_default=True, help="Of each prompt's own.")
@click.option("--new-tokens", type=SizesType(), default="64-256", show_default=True, help="Tokens to generate.")
@click.option("--shared-tokens", type=click.IntRange(min=0), default=0, help="Tokens that prompts begin with, besides.")
@click.option("--prefixes", type=COUNT, default=1, show_default=True, help="So many different --shared-tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same requests.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSONL of requests instead."
)
@click.option(
    "--time-scale", type=click.FloatRange(min=1e-6), default=1.0, help="Stretch the trace's times; 0.5: twice the load."
)
@click.option(
    "--cost", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A cost model that --save-cost wrote."
)
@click.option(
    "--bench",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of qwenrt bench ENGINE to fit to.",
)
@click.option("--save-cost", type=click.Path(dir_okay=False, path_type=Path), help="Write the cost model here.")
@click.option("--bandwidth", type=BYTE_SIZE, help="Hardware: bytes a second from memory, such as 3TB.")
@click.option("--flops", type=click.FloatRange(min=1), help="Hardware: operations a second, such as 6e14.")
@click.option("--overhead", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Hardware: ms a step.")
@click.option("--max-num-seqs", type=COUNT, help="Sequences in a step.  [default: the engine's]")
@click.option("--max-num-batched-tokens", type=COUNT, help="Tokens in a step.  [default: the engine's]")
@click.option("--max-model-len", type=COUNT, help="Tokens in a sequence.  [default: the engine's]")
@click.option("--num-kv-blocks", type=COUNT, help="KV blocks of a replica.  [default: all sequences at full length]")
@click.option("--kv-memory", type=BYTE_SIZE, help="Memory for them instead.")
@click.option("--prefix-caching/--no-prefix-caching", "enable_prefix_caching", default=True)
@click.option(
    "--slo-ttft", type=click.FloatRange(min=0), default=2000.0, show_default=True, help="ms to the first token."
)
@click.option("--slo-tpot", type=click.FloatRange(min=0), default=200.0, show_default=True, help="ms a token after it.")
@click.option(
    "--validate", is_flag=True, help="Run the same requests on the engine here too, and tell the differences."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="JSON to a file, not stdout."
)
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Write PNG plots into this folder.")
def command(engine: Path, json_file: Path | None, plots: Path | None, **options: Any) -> None:
    """Predict latencies and throughput of one engine or many under a load.

    The scheduler, the KV blocks, the prefix cache and the router are the real ones; only the model is not run: a step takes what
    a cost model says. It is fitted to steps of ENGINE, measured on this machine, unless --cost, --bench, or --bandwidth and
    --flops of another machine say what steps cost: then ENGINE's engine.json alone is enough. JSON goes to stdout or the file,
    a table to stderr.

    \b
    Examples:
      qwenrt simulate engines/qwen3-0.6b --rate 2 --requests 500 --save-cost here.json
      qwenrt simulate engines/qwen3-0.6b --cost here.json --rate 40 --find-replicas 0.99 --slo-ttft 1500
      qwenrt simulate engines/qwen3-8b/engine.json --bandwidth 2.8TB --flops 5e14 --kv-memory 50GiB --rate 30
      qwenrt simulate engines/qwen3-0.6b --cost here.json --trace requests.jsonl --replicas 8 --policy prefix --plots plots
    """
    if options["trace"] is None and options["time_scale"] != 1.0:
        raise click.UsageError("--time-scale says nothing without --trace")
    if (options["bandwidth"] is None) != (options["flops"] is None):
        raise click.UsageError("--bandwidth and --flops go together")
    sources = [name for name in ("cost", "bench", "bandwidth") if options[name]]
    if len(sources) > 1:
        raise click.UsageError(f"--{sources[0]} and --{sources[1]} both say what a step costs; give one of them")
    if options["validate"] and (sources or options["replicas"] != 1 or options["find_replicas"]):
        raise click.UsageError(
            "--validate measures one engine here: it goes with none of --cost, --bench, --bandwidth and --replicas"
        )
    draw = import_with_extra(".simulate.plots", "plots").draw if plots else None
    manifest = EngineManifest.from_file(engine / MANIFEST_NAME if engine.is_dir() else engine)
    shape = _shape(manifest, options)
    arrivals = _arrivals(options)
    real: Results | None = None
    with spinner("simulate") as line:
        if options["cost"]:
            cost = CostModel.from_file(options["cost"])
        elif options["bench"]:
            cost = fit(steps_of_bench(options["bench"]))
        elif options["bandwidth"]:
            cost = _of_hardware(manifest, options)
        else:
            from .measure import measure

            cost, real = measure(
                engine, shape, _MEASURE_SECONDS, arrivals if options["validate"] else None, line.update
            )
        if options["save_cost"]:
            options["save_cost"].write_text(cost.to_json())
        cluster = Cluster(
            engine=shape,
            cost=cost,
            replicas=options["replicas"],
            policy=options["policy"],
            max_imbalance=options["max_imbalance"],
        )
        slo = Slo(ttft=options["slo_ttft"] / 1000, tpot=options["slo_tpot"] / 1000)
        tries: dict[int, float] = {}
        started = perf_counter()
        if options["find_replicas"]:

            def on_try(count: int, share: float) -> None:
                tries[count] = share
                line.update(f"{count} replicas: {100 * share:.2f} %")

            count, results = fewest_replicas(cluster, arrivals, slo, options["find_replicas"], on_try)
            cluster = dataclasses.replace(cluster, replicas=count)
        else:
            results = Simulation(cluster, lambda number: line.update(f"{number} requests")).run(arrivals)
        took = perf_counter() - started
    columns = {"simulated": summarize(results, slo) | utilisation(results, cluster)}
    if real is not None:
        columns["measured"] = summarize(real, slo)
    if draw is not None and results.ttft:
        draw(plots, results, cluster)
    result = {
        "engine": dataclasses.asdict(shape),
        "cost": dataclasses.asdict(cost),
        "policy": cluster.policy,
        "slo_ms": {"ttft": options["slo_ttft"], "tpot": options["slo_tpot"]},
        "simulation_s": took,
        "share_by_replicas": {str(count): tries[count] for count in sorted(tries)},
    } | columns
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if json_file:
        json_file.write_text(text)
    else:
        click.echo(text, nl=False)
    replicas = f"{cluster.replicas} replica{'s' * (cluster.replicas > 1)}"
    Console(file=sys.stderr, highlight=False).print(table(f"{manifest.model.architecture}, {replicas}", columns))


def _arrivals(options: dict[str, Any]) -> Trace | Workload:
    if options["trace"]:
        return Trace(options["trace"], options["time_scale"])
    return Workload(
        requests=options["requests"],
        rate=options["rate"],
        prompt=options["prompt_tokens"],
        new=options["new_tokens"],
        shared=options["shared_tokens"],
        prefixes=options["prefixes"],
        seed=options["seed"],
    )


def _shape(manifest: EngineManifest, options: dict[str, Any]) -> EngineShape:
    """What the schedulers get; limits may be other than the engine's, since another export could have them."""
    names = [field.name for field in dataclasses.fields(Limits)]
    limits = dataclasses.replace(manifest.limits, **{name: options[name] for name in names if options[name]})
    if limits.max_num_seqs > limits.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs is {limits.max_num_seqs} and max_num_batched_tokens {limits.max_num_batched_tokens}; a step takes a "
            "token of every sequence, so lower max_num_seqs"
        )
    blocks = options["num_kv_blocks"] or limits.max_num_seqs * -(-limits.max_model_len // manifest.block_size)
    if options["kv_memory"]:
        if options["num_kv_blocks"]:
            raise click.UsageError("give --num-kv-blocks or --kv-memory")
        blocks = options["kv_memory"] // (manifest.kv_bytes_per_token * manifest.block_size)
        if not blocks:
            raise ConfigError(f"kv_memory is {options['kv_memory']} bytes, less than one KV block of this engine")
    return EngineShape(
        limits=limits,
        block_size=manifest.block_size,
        num_kv_blocks=blocks,
        enable_prefix_caching=options["enable_prefix_caching"],
    )


def _of_hardware(manifest: EngineManifest, options: dict[str, Any]) -> CostModel:
    return CostModel.of_hardware(
        manifest,
        weight_bytes_of(manifest),
        bandwidth=options["bandwidth"],
        flops=options["flops"],
        overhead=options["overhead"] / 1000,
    )
