"""What one request asks of the sampler; names, defaults and meanings are vLLM's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenrt.plugins import RequestError

from .structured import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 1024
MAX_STOP_CHARS = 65_536
"""Characters of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_INT = 2**31 - 1

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    Every field is checked when the object is made; a RequestError names the field, its value and what is allowed. The order
    of work on a row of logits is: min_tokens, logit_bias, repetition, frequency and presence penalty, structured_outputs and
    thinking_budget, temperature, min_p, top_k, top_p.
    """

    temperature: float = 1.0
    """Divides the logits. Any finite value from 0; below 1e-5 the most likely token is taken (the lowest id among equals)."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities (after top_k and min_p) sum to at least this; above 0, at most 1."""
    top_k: int = -1
    """Keep the k most likely tokens, of equal ones those with the lowest ids; -1 and 0 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one; 0 to 1."""
    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt or the output are divided (positive) or multiplied (negative) by this; 0.01 to 100."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens of the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens of the output, once for each time they occur; -2 to 2."""
    seed: int | None = None
    """The same seed draws the same tokens whatever else runs; -2^63 to 2^63-1, of which -1 means None: fresh randomness."""
    max_tokens: int | None = 16
    """Generate at most so many tokens, up to 2^31-1, of which 0 needs prompt_logprobs; None for as many as the context has room
    for, which limits it anyway."""
    min_tokens: int = 0
    """So many tokens come before an end-of-text token, a stop token or a stop string may end the answer; 0 to max_tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer (stored as a tuple): at most 1,024, none empty, 65,536 characters in all."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer (stored as a tuple); at most 1,024."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string, or the text of the stop token, that ended it."""
    ignore_eos: bool = False
    """Whether to go on after an end-of-text token of the model."""
    logprobs: int | None = None
    """Give the log-probability of each token and of so many most likely ones, 0 to 20; None gives none. Before any processing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, each given those before it. Such a prompt is computed anew, whatever is cached."""
    n: int = 1
    """How many answers; 1 to 128."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of the given token ids; values from -100 to 100, at most 1,024 entries."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have."""
    thinking_budget: int | None = None
    """Close a thinking block after so many tokens, from 0; None for as many as the model takes."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": _real("temperature", self.temperature, 0.0, math.inf),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": _integer("top_k", self.top_k, -1, 2**63 - 1),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "seed": self.seed if self.seed is None else _integer("seed", self.seed, -(2**63), 2**63 - 1),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 0, MAX_INT),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_INT),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logprobs": self.logprobs
            if self.logprobs is None
            else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": self.prompt_logprobs
            if self.prompt_logprobs is None
            else _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "n": _integer("n", self.n, 1, MAX_N),
            "logit_bias": _logit_bias(self.logit_bias),
            "thinking_budget": None
            if self.thinking_budget is None
            else _integer("thinking_budget", self.thinking_budget, 0, MAX_INT),
        }
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            checked[name] = _boolean(name, getattr(self, name))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs is {_shown(self.structured_outputs)}; it must be a StructuredOutputsParams"
            )
        if checked["seed"] == -1:
            checked["seed"] = None
        if checked["max_tokens"] == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0; it must be at least 1, unless log-probabilities of the prompt are asked for "
                "(prompt_logprobs; over HTTP echo with logprobs)"
            )
        if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    def validate_for(self, vocab_size: int) -> None:
        """Raise RequestError if a token id that the request names is not below `vocab_size`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} has the token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"
                    )


def _shown(value: object) -> str:
    """`value` for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _real(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    allowed = f"a finite number from {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    if above:
        allowed = f"a number above {low:g} and at most {high:g}"
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise RequestError(f"{name} is {_shown(value)}; it must be {allowed}")
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise RequestError(f"{name} is {_shown(value)}; it must be an integer from {low} to {high}")
    return int(value)


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{name} is {_shown(value)}; it must be True or False")
    return bool(value)


def _items(name: str, value: object, most: int) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {_shown(value)}; it must be a list")
    items: list[Any] = []
    for item in value:
        if len(items) == most:
            raise RequestError(f"{name} has more than {most} entries; give at most {most}")
        items.append(item)
    return items


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else _items("stop", value, MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise RequestError(
                f"stop has the entry {_shown(stop)}; every entry must be a string of at least one character"
            )
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise RequestError(
            f"stop has {sum(map(len, stops))} characters; all entries together may have {MAX_STOP_CHARS}"
        )
    return tuple(stops)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(f"an entry of {name}", item, 0, MAX_INT) for item in _items(name, value, MAX_STOP_TOKEN_IDS))


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias is {_shown(value)}; it must be a dict of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(value)} entries; give at most {MAX_LOGIT_BIASES}")
    return {
        _integer("a token id of logit_bias", token_id, 0, MAX_INT): _real(
            f"logit_bias[{_shown(token_id)}]", bias, -100.0, 100.0
        )
        for token_id, bias in value.items()
    }
