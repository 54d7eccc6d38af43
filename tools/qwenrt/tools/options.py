"""Option types and option groups that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

_UNITS = {"": 1, "B": 1} | {
    unit: base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in ((f"{prefix}B", 1000), (f"{prefix}IB", 1024))
}


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1GiB (1024 based), 500MB (1000 based) or plain bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes as an int; a usage error for anything else than a positive size."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", value, re.ASCII)
        unit = _UNITS.get(match[2].upper()) if match else None
        size = int(float(match[1]) * unit) if match and unit else 0
        if not 0 < size < 2**63:
            self.fail(
                f"{value!r} is no size; write bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB", param, ctx
            )
        return size


BYTE_SIZE = ByteSize()
COUNT = click.IntRange(min=1)


def engine_options(function: Function) -> Function:
    """The options that say how an engine is loaded; `engine_arguments` takes them."""
    for option in (
        click.option(
            "--prefix-caching/--no-prefix-caching",
            "enable_prefix_caching",
            default=True,
            help="Reuse the KV cache of equal prompt beginnings.",
        ),
        click.option("--kv-memory", type=BYTE_SIZE, help="Memory for the KV cache, such as 1GiB."),
        click.option(
            "--gpu-memory-fraction",
            type=float,
            help="How much of a GPU's memory may be in use with the KV cache, instead of --kv-memory.  [default: 0.9]",
        ),
        click.option("--num-kv-blocks", type=COUNT, help="Size of the KV cache in blocks, instead of --kv-memory."),
        click.option("--max-model-len", type=COUNT, help="Lower the engine's limit: tokens in a sequence."),
        click.option("--max-num-batched-tokens", type=COUNT, help="Lower the engine's limit: tokens in a step."),
        click.option("--max-num-seqs", type=COUNT, help="Lower the engine's limit: sequences in a step."),
        click.option(
            "--speculative-tokens",
            type=int,
            help="Guess so many tokens from earlier text and check them in one step; answers stay the same.",
        ),
        click.option(
            "--max-loras", type=COUNT, default=4, show_default=True, help="LoRA adapters that a step may use."
        ),
        click.option("--threads", type=COUNT, help="Compute threads.  [default: one a core]"),
        click.option("--device", help="cpu, cuda or cuda:N.  [default: that of the backend]"),
        click.option(
            "--backend",
            type=click.Choice(["onnxruntime", "torch", "tensorrt"]),
            help="What executes the engine.  [default: what it was exported for]",
        ),
    ):
        function = option(function)
    return function


def ray_option(function: Function) -> Function:
    """Where Ray is, for the commands that can run on it."""
    return click.option(
        "--ray",
        "ray_address",
        metavar="ADDRESS",
        help="Run on the Ray cluster at this address; local: on one that is started on this machine.",
    )(function)


def sampling_options(function: Function) -> Function:
    """The options that make up a SamplingParams; `sampling_params` takes them."""
    for option in (
        click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
        click.option(
            "--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Stop at this token. Repeatable."
        ),
        click.option("--stop", multiple=True, help="Stop before this text. Repeatable."),
        click.option("--frequency-penalty", type=float, default=0.0),
        click.option("--presence-penalty", type=float, default=0.0),
        click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less."),
        click.option("--seed", type=int, help="The same seed gives the same text."),
        click.option(
            "--min-p", type=float, default=0.0, help="Drop tokens below this share of the best one's probability."
        ),
        click.option("--top-k", type=int, default=-1, help="Sample among the k most likely tokens only."),
        click.option(
            "--top-p", type=float, default=1.0, help="Sample among the most likely tokens up to this probability."
        ),
        click.option(
            "--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token."
        ),
        click.option("--min-tokens", type=int, default=0, help="Do not end before that many tokens."),
        click.option("--max-tokens", type=int, default=256, show_default=True, help="Tokens to generate at most."),
    ):
        function = option(function)
    return function
