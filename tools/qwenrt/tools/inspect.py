"""`qwenrt inspect`: what an engine folder or a checkpoint holds, and whether its files are as they should be."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qwenrt.exporter.export import model_spec
from qwenrt.exporter.source import source_of
from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import MANIFEST_NAME, EngineManifest, FileEntry, sha256_of

from .errors import printable
from .progress import spinner

_GIB = 1 << 30
_STYLES = {"ok": "green", "not": "yellow"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verify", is_flag=True, help="Read every file whole and compare its SHA-256 with the manifest.")
def command(path: Path, as_json: bool, verify: bool) -> None:
    """Show what an engine folder or a checkpoint holds.

    A checkpoint is a folder or a GGUF file. Architecture, parameters, dtypes, sizes, limits, the KV cache's bytes per token, and
    each file's state. The exit status is 1 if a file is missing or wrong.

    \b
    Examples:
      qwenrt inspect engines/qwen3-0.6b
      qwenrt inspect engines/qwen3-0.6b --verify
      qwenrt inspect ./Qwen3-0.6B --json
    """
    if not path.exists():
        raise ConfigError(f"{path} is no folder and no GGUF file; give an engine folder or a checkpoint")
    with spinner(f"reading {path}") as line:
        if (path / MANIFEST_NAME).is_file():
            report = inspect_engine(path, verify=verify, progress=line.update)
        elif path.is_file() or (path / "config.json").is_file():
            report = inspect_checkpoint(path)
        else:
            raise ConfigError(
                f"{path} has neither {MANIFEST_NAME} nor config.json; give an engine folder or a checkpoint"
            )
    if as_json:
        click.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(report)
    wrong = [file["name"] for file in report["files"] if not file["state"].startswith(("ok", "not used"))]
    if wrong:
        remedy = "export the engine again" if report["kind"] == "engine" else "download the checkpoint again"
        raise ConfigError(f"{path}: wrong or missing: {', '.join(wrong)}; {remedy}")


def inspect_engine(path: Path, *, verify: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """The report on an engine folder; raises ConfigError if its manifest cannot be read."""
    manifest = EngineManifest.from_file(path / MANIFEST_NAME)
    files = []
    for name, entry in manifest.files.items():
        progress(f"reading {path / name}")
        files.append({"name": name, "size": entry.size, "state": _engine_file_state(path / name, entry, verify)})
    values = dataclasses.asdict(manifest)
    del values["files"]
    return {
        "kind": "engine",
        "path": str(path),
        **values,
        "kv_bytes_per_token": manifest.kv_bytes_per_token,
        "kv_tokens_per_gib": _GIB // (manifest.kv_bytes_per_token * manifest.block_size) * manifest.block_size,
        "total_bytes": sum(entry.size for entry in manifest.files.values()),
        "files": files,
    }


def _engine_file_state(path: Path, entry: FileEntry, verify: bool) -> str:
    if path.is_symlink():
        return "a link, not a file"
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != entry.size:
        return f"{size} bytes, the manifest says {entry.size}"
    if not verify:
        return "ok (size)"
    return "ok (SHA-256)" if sha256_of(path) == entry.sha256 else "changed (SHA-256 differs)"


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """The report on a checkpoint, for float32 K and V; raises ConfigError if its config or its weights cannot be read."""
    source = source_of(path)
    config, checkpoint = source.config, source.checkpoint()
    checkpoint.check(config)
    dtypes: Counter[str] = Counter()
    weight_files: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] += info.end - info.start
        weight_files[info.file.name] += 1
    files = []
    folder, names = (path.parent, {path.name}) if path.is_file() else (path, {entry.name for entry in path.iterdir()})
    for name in sorted(names if path.is_file() else names | {"tokenizer.json", "tokenizer_config.json"}):
        file = folder / name
        if name in weight_files:
            state = f"ok ({weight_files[name]} tensors)"
        elif not file.exists():
            state = "missing"
        else:
            state = "not used" if name.endswith(_WEIGHT_SUFFIXES) or file.is_dir() else "ok"
        files.append({"name": name, "size": file.stat().st_size if file.is_file() else None, "state": state})
    kv_bytes = config.num_layers * 2 * config.kv_size * 4
    return {
        "kind": "checkpoint",
        "path": str(path),
        "task": config.task,
        "labels": list(config.labels),
        "model": dataclasses.asdict(model_spec(config)),
        "dtypes": dict(dtypes),
        "quantization": str(config.quantization) if config.quantization else None,
        "kv_dtype": "float32",
        "eos_token_ids": list(config.eos_token_ids),
        "kv_bytes_per_token": kv_bytes,
        "kv_tokens_per_gib": _GIB // kv_bytes,
        "total_bytes": sum(file["size"] or 0 for file in files),
        "files": files,
    }


def _print(report: dict[str, Any]) -> None:
    model, plans = report["model"], report.get("plans", [])
    heads = f"{model['num_heads']} query, {model['num_kv_heads']} key/value, of {model['head_dim']}"
    shape = {
        "architecture": model["architecture"],
        "task": report["task"] + (f", {len(report['labels'])} labels" if report["labels"] else ""),
        "parameters": f"{model['num_parameters']:,}, {model['num_active_parameters']:,} of them for each token",
        "layers": model["num_layers"],
        "hidden, intermediate size": f"{model['hidden_size']}, {model['intermediate_size']}",
        "experts": f"{model['num_experts']}, {model['num_experts_per_token']} for each token, of intermediate size "
        f"{model['moe_intermediate_size']}",
        "attention heads": heads + (", biased" if model["attention_bias"] else ""),
        "vocabulary": f"{model['vocab_size']:,}" + (", tied" if model["tie_word_embeddings"] else ", not tied"),
        "positions": f"{model['max_position_embeddings']:,}",
        "RoPE": f"{model['rope_type']}, theta {model['rope_theta']:,.15g}",
        "end-of-text tokens": ", ".join(map(str, report["eos_token_ids"])),
    }
    if not model["num_experts"]:
        del shape["experts"]
        shape["parameters"] = f"{model['num_parameters']:,}"
    if report["kind"] == "engine":
        limits = report["limits"]
        shape |= {
            "target": f"{report['target']}, opset {report['opset']}, PagedAttention version {report['plugin_version']}",
            "made by": report["producer"],
            "computes in": report["dtype"],
            "weights": report["weights"],
            "tensor parallel": f"{report['tp']} ranks",
            "limits": f"{limits['max_num_seqs']} sequences and {limits['max_num_batched_tokens']} tokens a step, "
            f"{limits['max_model_len']} tokens a sequence",
        }
        if report["tp"] == 1:
            del shape["tensor parallel"]
        if report["target"] != "onnxruntime" and not plans:
            shape["plans"] = f"none; build one with: qwenrt build {report['path']}"
    else:
        shape["weights"] = ", ".join(f"{name} {_size(size)}" for name, size in report["dtypes"].items())
        if report["quantization"]:
            shape["weights"] += f" ({report['quantization']})"
    shape["KV cache"] = (
        f"{report['kv_dtype']}, {report['kv_bytes_per_token']:,} bytes a token, {report['kv_tokens_per_gib']:,} tokens in 1 GiB"
        + (f", blocks of {report['block_size']}" if "block_size" in report else "")
    )
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in shape.items():
        facts.add_row(name, Text(printable(str(value))))
    files = Table("file", "size", "state", box=None, padding=(0, 2, 0, 0))
    files.columns[1].justify = "right"
    for file in report["files"]:
        state = printable(file["state"])
        size = "" if file["size"] is None else _size(file["size"])
        files.add_row(Text(printable(file["name"])), size, Text(state, _STYLES.get(state.split()[0], "red")))
    files.add_row("", _size(report["total_bytes"]), "in all")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    parts = [Text(f"{report['kind']} {printable(report['path'])}", "bold"), "", facts, "", files]
    if plans:
        parts += ["", _plan_table(report), "", _profile_table(plans)]
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _plan_table(report: dict[str, Any]) -> Table:
    """For which GPU each plan is, what built it, and the GPU memory that it takes beside the KV cache."""
    sizes = {file["name"]: file["size"] for file in report["files"]}
    table = Table("plan", "GPU", "TensorRT", "plugin", "weights", "activations", box=None, padding=(0, 2, 0, 0))
    for plan in report["plans"]:
        weights = sizes["model.safetensors" if plan["stripped"] else plan["file"]]
        table.add_row(
            Text(printable(plan["file"])),
            f"compute capability {printable(plan['compute_capability'])}",
            Text(printable(plan["tensorrt_version"])),
            f"plan version {plan['plan_version']}",
            f"{_size(weights)} {'from model.safetensors' if plan['stripped'] else 'inside'}",
            _size(plan["activation_bytes"]),
        )
    return table


def _profile_table(plans: list[dict[str, Any]]) -> Table:
    """The steps that plans take, smallest to largest (usual); plans with the same profiles share their rows."""
    dimensions = ("num_tokens", "num_seqs", "num_logits", "max_blocks", "num_blocks")
    titles = ("tokens", "sequences", "logits rows", "blocks a sequence", "blocks in the pool")
    table = Table("profile", *titles, box=None, padding=(0, 2, 0, 0))
    seen: list[dict[str, Any]] = []
    for profile in (profile for plan in plans for profile in plan["profiles"]):
        if profile not in seen:
            seen.append(profile)
            ranges = [profile[name] for name in dimensions]
            cells = [f"{size['min']:,} to {size['max']:,} ({size['opt']:,})" for size in ranges]
            table.add_row(Text(printable(profile["name"])), *cells)
    return table


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
