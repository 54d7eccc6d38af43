"""`qwenrt export`: checkpoint in, engine folder out."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import click

from qwenrt.exporter import export
from qwenrt.runtime.engine_dir import TASKS

from .build import build_notices, plan_options
from .options import COUNT
from .progress import stages_bar

_BY_TARGET = "[default: float32 for onnxruntime, else bfloat16]"
_DEFAULTS = {name: parameter.default for name, parameter in signature(export).parameters.items()}


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target",
    type=click.Choice(["onnxruntime", "tensorrt", "tensorrt-rtx"]),
    default=_DEFAULTS["target"],
    show_default=True,
    help="What runs the engine.",
)
@click.option(
    "--task",
    type=click.Choice(TASKS),
    help="What the engine is for.  [default: what the checkpoint is made for]",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help=f"What is computed in.  {_BY_TARGET}"
)
@click.option(
    "--weights",
    type=click.Choice(
        ["float32", "float16", "bfloat16", "int8", "int4", "int4-g64", "int4-g128", "checkpoint", "fp8", "fp8-channel"]
    ),
    help=(
        "How matrices are stored; checkpoint: a quantised one's integers, as they are.  [default: the checkpoint's float type; "
        "on a GPU --dtype]"
    ),
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "fp8"]),
    help="Type of the KV cache.  [default: as --dtype]",
)
@click.option(
    "--lora",
    type=click.Path(path_type=Path),
    help="Merge the LoRA adapter in this folder (adapter_config.json, adapter_model.safetensors) into the matrices.",
)
@click.option(
    "--max-lora-rank",
    type=click.IntRange(0),
    default=_DEFAULTS["max_lora_rank"],
    show_default=True,
    help="Let requests name LoRA adapters of up to this rank when the engine runs (onnxruntime).",
)
@click.option(
    "--tp",
    type=COUNT,
    default=_DEFAULTS["tp"],
    show_default=True,
    help="Split the model over so many ranks (tensor parallelism); backend torch runs them, each on a GPU or in a CPU process.",
)
@click.option(
    "--block-size", type=COUNT, default=_DEFAULTS["block_size"], show_default=True, help="Tokens in a KV block."
)
@click.option("--max-model-len", type=COUNT, help="Tokens in a sequence.  [default: the model's positions]")
@click.option(
    "--max-num-seqs", type=COUNT, default=_DEFAULTS["max_num_seqs"], show_default=True, help="Sequences in a step."
)
@click.option(
    "--max-num-batched-tokens",
    type=COUNT,
    default=_DEFAULTS["max_num_batched_tokens"],
    show_default=True,
    help="Tokens in a step.",
)
@plan_options
@click.option("--force", is_flag=True, help="Replace an engine folder at OUT.")
def command(model: str, out: Path, force: bool, **options: Any) -> None:
    """Turn a checkpoint into an engine folder.

    MODEL is a folder with a Qwen3 checkpoint (config.json, safetensors, tokenizer), the name of one on the Hugging Face hub, or a
    GGUF file. OUT appears only once it is complete. Prints the folder.

    Target tensorrt builds a plan for the GPU in this machine. Where TensorRT or the GPU is missing the folder has all but the
    plan, which `qwenrt build` makes from it on another machine. Target tensorrt-rtx builds plans on any machine.

    \b
    Examples:
      qwenrt export ./Qwen3-0.6B engines/qwen3-0.6b
      qwenrt export Qwen/Qwen3-0.6B engines/qwen3-0.6b --max-model-len 4096
      qwenrt export ./Qwen3-0.6B-Q8_0.gguf engines/qwen3-0.6b --weights int8
      qwenrt export ./Qwen3-4B-AWQ engines/qwen3-4b --weights checkpoint
      qwenrt export ./Qwen3-Embedding-0.6B engines/embedding
      qwenrt export ./Qwen3-0.6B engines/small-cache --kv-dtype float16 --force
      qwenrt export ./Qwen3-0.6B engines/tuned --lora ./adapter
      qwenrt export ./Qwen3-0.6B engines/two-ranks --tp 2
      qwenrt export ./Qwen3-0.6B engines/gpu --target tensorrt
      qwenrt export ./Qwen3-0.6B engines/rtx --target tensorrt-rtx --compute-capability 8.9
    """
    with build_notices() as notice, stages_bar(f"exporting {model}") as progress:
        export(model, out, overwrite=force, progress=progress, notice=notice, **options)
    click.echo(out)
