"""What the measurements add up to: the result of `qwenrt bench ENGINE`, and its table."""

from __future__ import annotations

import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from qwenrt.runtime import EngineDir

from ..load.trace import Seconds, Slo, Trace, latencies, median_summary, summarize
from .roofline import CostModel, Machine, Step
from .steps import PARTS

Raw = dict[str, Any]
"""What a worker has printed: per name a value, or one for each run."""


class Report:
    """The result of measurements of an engine, `result` as JSON has it."""

    def __init__(self, folder: EngineDir, arguments: dict[str, Any], threads: int, machine: list[Raw]) -> None:
        self._costs = CostModel(folder)
        rates = {name: _spread([rate for one in machine for rate in one[name]]) for name in machine[0]}
        self._machine = Machine(
            read=1e9 * rates["read_gb_s"]["median"],
            float32=1e9 * rates["float32_gflop_s"]["median"],
            int8=1e9 * rates["int8_gop_s"]["median"],
        )
        manifest = folder.manifest
        self.result: dict[str, Any] = {
            "engine": {
                "path": str(folder.path),
                "architecture": manifest.model.architecture,
                "parameters": manifest.model.num_parameters,
                "target": manifest.target,
                "dtype": manifest.dtype,
                "weights": manifest.weights,
                "kv_dtype": manifest.kv_dtype,
                "block_size": manifest.block_size,
                "bytes": sum(entry.size for entry in manifest.files.values()),
                "weight_bytes_per_step": self._costs.weight_bytes,
            },
            "options": {name: value for name, value in arguments.items() if value is not None},
            "machine": {
                "cpu": _cpu_model(),
                "cpus": len(os.sched_getaffinity(0)),
                "threads": threads,
                "python": platform.python_version(),
                "onnxruntime": version("onnxruntime"),
            }
            | rates,
            "workloads": [],
        }
        self.samples: dict[str, dict[str, Seconds]] = {}
        """Latencies of all requests by the workload's label, in seconds."""

    def add_loads(self, loads: list[Raw]) -> None:
        """Seconds that loading the engine took, each time in a fresh process."""
        self.result["load"] = {"load_s": _spread([one["load_s"] for one in loads])}

    def add_workload(self, name: str, raw: Raw) -> None:
        """A workload of fixed size."""
        spreads = {key: _spread(raw[key]) for key in ("tokens_per_s", "ttft_s", "wall_s", "cached_share", "other_cpus")}
        sizes = {key: raw[key] for key in ("sequences", "shared_tokens", "prompt_tokens", "new_tokens", "rate")}
        self._add(
            {"workload": name, "label": _label(name, sizes)} | sizes | spreads,
            raw,
            decoding_alone=raw["rate"] == "decode",
        )

    def add_mix(self, place: dict[str, Any], raw: Raw, slo: Slo) -> None:
        """A load of requests that come by and by: medians of its runs."""
        summary = median_summary([summarize(_traces(run), slo) for run in raw["traces"]])
        entry = {"workload": "mix", "label": f"mix, {place['load']}"} | place | summary
        self._add(entry | {"other_cpus": _spread(raw["other_cpus"])}, raw, decoding_alone=False)

    def _add(self, entry: dict[str, Any], raw: Raw, *, decoding_alone: bool) -> None:
        memory = {name: raw[name] for name in ("peak_rss_bytes", "kv_pool_bytes")}
        roofline = self._roofline(raw, decoding_alone=decoding_alone)
        self.result["workloads"].append(entry | _decoding(raw) | roofline | memory)
        self.samples[entry["label"]] = latencies([trace for run in raw["traces"] for trace in _traces(run)])

    def _roofline(self, raw: Raw, *, decoding_alone: bool) -> dict[str, Any]:
        """Of each run: the least time of its steps by what they took, and the part of that least time that memory sets."""
        shares, by_memory = [], []
        for run in raw["steps"]:
            steps = [step for step in run if step["decodes"] or not decoding_alone]
            least = [self._least(step) for step in steps]
            total = sum(max(one) for one in least)
            if total:
                shares.append(total / sum(step["seconds"] for step in steps))
                by_memory.append(sum(memory for memory, products in least if memory >= products) / total)
        if not shares:
            return {}
        return {"roofline_share": _spread(shares), "roofline_by_memory": statistics.median(by_memory)}

    def _least(self, step: dict[str, Any]) -> tuple[float, float]:
        cost = Step(**{name: value for name, value in step.items() if name not in ("seconds", "decodes")})
        return cost.least_seconds(self._machine, integer=self._costs.integer)

    def table(self) -> Table:
        """What a person wants to see of it."""
        result = self.result
        table = Table("measurement", "median", "min", "max", title=Text(result["engine"]["path"]))
        for column in table.columns[1:]:
            column.justify = "right"
        _row(table, "load", result["load"]["load_s"], "s")
        for entry in result["workloads"]:
            table.add_section()
            _add_workload(table, entry)
        table.add_section()
        machine = result["machine"]
        _row(table, "memory read bandwidth", machine["read_gb_s"], "GB/s")
        _row(table, "float32 products", machine["float32_gflop_s"], "GFLOP/s")
        _row(table, "int8 products (MLAS)", machine["int8_gop_s"], "GOP/s")
        others = [run for entry in result["workloads"] for run in entry["other_cpus"]["runs"]]
        _row(table, "CPUs that others used meanwhile", _spread(others), "")
        table.add_row("engine folder", f"{result['engine']['bytes'] / 2**20:.0f} MiB", "", "")
        return table


def _add_workload(table: Table, entry: dict[str, Any]) -> None:
    if entry["workload"] == "mix":
        table.add_row(entry["label"], "", "", "")
        table.add_row("  output", f"{entry['output_tokens_per_s']:.4g} tok/s", "", "")
        table.add_row("  within the SLO", f"{entry['goodput_per_s']:.4g} requests/s", "", "")
        for label, name in (("to first token", "ttft_ms"), ("between tokens", "itl_ms")):
            if times := entry[name]:
                cells = " / ".join(f"{times[f'p{p}']:.4g}" for p in (50, 95, 99))
                table.add_row(f"  {label}, p50 / p95 / p99", f"{cells} ms", "", "")
    else:
        _row(table, entry["label"], entry["tokens_per_s"], "tok/s")
        _row(table, "  time to first token", entry["ttft_s"], "s")
        if entry["shared_tokens"]:
            _row(table, "  prompt tokens cached", entry["cached_share"], "%", 100)
    if "step_ms" in entry:
        _row(table, "  decoding", entry["decode_tokens_per_s"], "tok/s")
        _row(table, "  one step", entry["step_ms"], "ms")
        outside = [1 - share for share in entry["share_execute"]["runs"]]
        _row(table, "  share outside the backend", _spread(outside), "%", 100)
    if "roofline_share" in entry:
        bound = "memory" if entry["roofline_by_memory"] >= 0.5 else "products"
        _row(table, f"  reached of the roof of {bound}", entry["roofline_share"], "%", 100)
    table.add_row("  peak memory", f"{entry['peak_rss_bytes'] / 2**20:.0f} MiB", "", "")
    table.add_row("  KV pool", f"{entry['kv_pool_bytes'] / 2**20:.0f} MiB", "", "")


def _row(table: Table, label: str, spread: dict[str, Any], unit: str, scale: float = 1.0) -> None:
    table.add_row(label, *(f"{spread[name] * scale:.4g} {unit}" for name in ("median", "min", "max")))


def _decoding(raw: Raw) -> dict[str, Any]:
    """Speed, length and parts of the steps in which all requests decode; nothing if a run had none."""
    runs = raw["decode_steps"]
    if not all(run["steps"] for run in runs):
        return {}
    shares = {f"share_{part}": [run[part] / run["wall"] for run in runs] for part in PARTS}
    shares["share_other"] = [1 - sum(parts) for parts in zip(*shares.values(), strict=True)]
    rates = {
        "decode_tokens_per_s": [run["tokens"] / run["wall"] for run in runs],
        "step_ms": [1000 * run["wall"] / run["steps"] for run in runs],
    }
    return {name: _spread(values) for name, values in (rates | shares).items()}


def _traces(run: list[dict[str, Any]]) -> list[Trace]:
    return [Trace(**trace) for trace in run]


def _label(name: str, sizes: dict[str, Any]) -> str:
    """Such as "batch, 16 x (128 + 64)"."""
    shared = f"{sizes['shared_tokens']} shared + " if sizes["shared_tokens"] else ""
    tokens = f"{shared}{sizes['prompt_tokens']} + {sizes['new_tokens']}"
    return f"{name}, {sizes['sequences']} x ({tokens})" if sizes["sequences"] > 1 else f"{name}, {tokens}"


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
