"""Options of the commands that run an engine, made into an `LLM` and its `SamplingParams`."""

from __future__ import annotations

from typing import Any

import click

from qwenrt.runtime import LLM, RequestError, RequestOutput, SamplingParams

from .progress import spinner

_ENGINE_OPTIONS = (
    "backend",
    "device",
    "threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_kv_blocks",
    "kv_memory",
    "gpu_memory_fraction",
    "enable_prefix_caching",
    "max_loras",
)


def engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `options.engine_options` added out of a command's options, as keyword arguments of LLM."""
    arguments = {name: options.pop(name) for name in _ENGINE_OPTIONS}
    guesses = options.pop("speculative_tokens")
    if guesses is not None:
        arguments["speculative"] = {"method": "ngram", "num_speculative_tokens": guesses}
    return arguments


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """SamplingParams of what `options.sampling_options` added; a wrong value is bad usage."""
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise click.UsageError(str(error)) from None


def load_llm(engine: str, arguments: dict[str, Any]) -> LLM:
    """Load an engine folder, showing a spinner."""
    with spinner(f"loading {engine}"):
        return LLM(engine, **arguments)


def abort_reason(output: RequestOutput) -> str | None:
    """Why the engine gave up on one of the answers; None if it did not."""
    reasons = [str(answer.stop_reason) for answer in output.outputs if answer.finish_reason == "abort"]
    return reasons[0] if reasons else None


def check_text(text: str, what: str) -> str:
    """The text itself; a usage error where the shell passed bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{what} is not valid UTF-8") from None
    return text
