"""`qwenrt compare`: whether an engine computes what the checkpoint's model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qwenrt.plugins import QwenrtError
from qwenrt.runtime import EngineDir

from ..extras import import_with_extra
from ..progress import spinner
from .report import to_json
from .terminal import print_comparison

_TOLERANCES = ("layer", "kv", "logits", "kl", "nll")
_PATH: click.Path = click.Path(path_type=Path)
_BACKENDS = ("onnxruntime", "torch", "tensorrt", "numpy")


class _Tolerance(click.ParamType[tuple[str, float]]):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, _, text = value.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if name not in _TOLERANCES or not 0 <= number < float("inf"):
            self.fail(
                f"{value!r}; write NAME=VALUE, NAME one of {', '.join(_TOLERANCES)}, VALUE at least 0", param, ctx
            )
        return name, number


@click.command()
@click.argument("engine")
@click.option("--reference", help="The checkpoint that the engine was exported from: a folder, or a name on the hub.")
@click.option(
    "--lora",
    type=_PATH,
    help="A LoRA adapter that the reference has merged, and the engine in a slot (--max-lora-rank) or merged (export --lora).",
)
@click.option(
    "--against",
    multiple=True,
    metavar="NAME[:DTYPE]",
    help="What to compare with; repeatable: transformers, eager (our PyTorch modules), both with --reference; numpy, torch, "
    "onnxruntime (the engine's own graph).  [default: transformers; without --reference numpy]",
)
@click.option("--backend", type=click.Choice(_BACKENDS), help="What runs the engine.  [default: as qwenrt generate]")
@click.option("--layers", is_flag=True, help="Compare every layer, and show them all.")
@click.option("--bisect", is_flag=True, help="Find the node at fault in the first layer that is out of tolerance.")
@click.option(
    "--tokens", type=click.IntRange(0, 4096), default=32, show_default=True, help="Greedy tokens after each prompt."
)
@click.option("--prompts-file", type=click.File("rb"), help="Prompts for the greedy tokens, one a line.")
@click.option("--inputs", type=_PATH, help="Compare recorded batches: polygraphy's JSON, a file or a folder.")
@click.option("--save-inputs", type=_PATH, help="Save the batches in polygraphy's JSON, for its tools.")
@click.option("--perplexity", type=click.File("rb"), help="Compare the perplexity of a text file, too.")
@click.option(
    "--window", type=click.IntRange(2), default=512, show_default=True, help="Tokens in a window of --perplexity."
)
@click.option("--tolerance", type=_Tolerance(), multiple=True, help=f"Replace a tolerance: {', '.join(_TOLERANCES)}.")
@click.option("--json", "json_file", type=_PATH, help="Write all numbers as JSON.")
@click.option("--html", "html_file", type=_PATH, help="Write a report with plots, one file.")
@click.option("--threads", type=int, help="Compute threads.  [default: one a core]")
def command(
    engine: str,
    prompts_file: Any,
    perplexity: Any,
    json_file: Path | None,
    html_file: Path | None,
    layers: bool,
    **options: Any,
) -> None:
    """Compare an engine with the model that it was made of.

    Runs paged batches through the engine and a reference, and compares logits, every layer's KV cache, and greedy tokens. What
    is out of tolerance is looked into layer by layer, each with the reference's own input, until the layer at fault is found.
    The exit status is 0 if everything is within tolerance, 1 if not.

    \b
    Examples:
      qwenrt compare engines/qwen3-0.6b --reference ./Qwen3-0.6B
      qwenrt compare engines/qwen3-0.6b --reference ./Qwen3-0.6B --layers --bisect --html report.html
      qwenrt compare engines/qwen3-0.6b --reference ./Qwen3-0.6B --perplexity wiki.txt --json result.json
      qwenrt compare engines/qwen3-0.6b --against torch --against numpy
      qwenrt compare engines/adapters --reference ./Qwen3-0.6B --lora ./sql-adapter
    """
    options["prompts"] = _lines(prompts_file) if prompts_file is not None else None
    options["perplexity"] = _text(perplexity, "--perplexity") if perplexity is not None else None
    options["tolerances"] = dict(options.pop("tolerance"))
    session = import_with_extra(".compare.session", "compare")
    html = import_with_extra(".compare.html", "compare") if html_file else None
    with spinner(f"comparing {engine}") as line:
        results = session.compare_engine(EngineDir.open(engine), layers=layers, progress=line.update, **options)
    for result in results:
        print_comparison(result, layers=layers)
    if json_file:
        json_file.write_text(to_json(results), encoding="utf-8")
    if html_file and html:
        html_file.write_text(html.to_html(results), encoding="utf-8")
    for result in results:
        if not result.passed:
            raise QwenrtError(f"{engine} differs from {result.reference}: {result.cause}")


def _text(file: Any, option: str) -> str:
    try:
        text: str = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} {file.name} is not valid UTF-8 at byte {error.start}") from None
    return text


def _lines(file: Any) -> list[str]:
    lines = [line for line in _text(file, "--prompts-file").splitlines() if line.strip()]
    if not lines:
        raise click.UsageError(f"--prompts-file {file.name} has no prompts")
    return lines
