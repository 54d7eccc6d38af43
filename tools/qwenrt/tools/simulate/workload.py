"""Which requests come and when: from a trace file, or drawn from distributions."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError

from ..load.load import Sizes

_MOST_TOKENS = 1 << 24
_MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, in seconds, what its prompt is made of, and how many tokens it generates.

    pieces: (id, count) pairs, `count` equal tokens each. Equal beginnings have equal tokens, which is all that the prefix cache
    asks of them; ids of text that is not known are negative.
    """

    due: float
    pieces: tuple[tuple[int, int], ...]
    new_tokens: int

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.pieces)

    def token_ids(self) -> list[int]:
        """The prompt."""
        token_ids: list[int] = []
        for value, count in self.pieces:
            token_ids += [value] * count
        return token_ids


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`requests` random requests, the same for the same seed, in a Poisson process of `rate` a second.

    prompt, new: tokens of each request's own prompt and answer. Before its own a prompt has `shared` tokens, the same in one of
    `prefixes` groups of requests.
    """

    requests: int
    rate: float
    prompt: Sizes
    new: Sizes
    shared: int = 0
    prefixes: int = 1
    seed: int = 0

    def __iter__(self) -> Iterator[Arrival]:
        rng = random.Random(self.seed)
        due = 0.0
        for number in range(self.requests):
            due += rng.expovariate(self.rate)
            own = (-1 - self.prefixes - number, self.prompt.draw(rng))
            shared = ((-1 - rng.randrange(self.prefixes), self.shared),) if self.shared else ()
            yield Arrival(due, (*shared, own), self.new.draw(rng))


@dataclass(frozen=True)
class Trace:
    """The requests of a JSONL file, one object a line, in order of time; see tools/README.md for the fields."""

    path: Path
    time_scale: float = 1.0
    """What times of the file are multiplied with: 0.5 makes the load twice as dense."""

    def __iter__(self) -> Iterator[Arrival]:
        """Raises ConfigError naming the line that is wrong."""
        names: dict[str, int] = {}
        fresh = itertools.count(1)
        last = 0.0
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        arrival = _parse(json.loads(line), names, fresh, self.time_scale)
                    except (ValueError, TypeError, KeyError, RecursionError) as error:
                        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
                        raise ConfigError(f"line {number} of {self.path}: {what}") from None
                    if arrival.due < last:
                        raise ConfigError(
                            f"line {number} of {self.path} is earlier than the line before; sort the file"
                        )
                    last = arrival.due
                    yield arrival
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {self.path}: {error}") from None


def _parse(value: Any, names: dict[str, int], fresh: Iterator[int], scale: float) -> Arrival:
    """An arrival from one object: our fields, or those of the Mooncake traces."""
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    if "timestamp" in value:
        return _parse_mooncake(value, names, fresh, scale)
    due, new = _number("arrival", value["arrival"]), _count("output", value["output"])
    prompt = value["prompt"]
    if isinstance(prompt, list):
        if not prompt or any(type(token) is not int or not 0 <= token < 2**31 for token in prompt):
            raise ValueError("prompt must be a number of tokens, or a list of token ids")
        runs = ((token, sum(1 for _ in run)) for token, run in itertools.groupby(prompt))
        return Arrival(due * scale, tuple(runs), new)
    own = _count("prompt", prompt)
    pieces = []
    for name, count in value.get("prefixes", ()):
        pieces.append((_negative(str(name), names, fresh), _count("a prefix", count)))
        own -= count
    if own < 0:
        raise ValueError(f"prompt has {prompt} tokens, its prefixes have {prompt - own}")
    if own:
        pieces.append((-next(fresh), own))
    return Arrival(due * scale, tuple(pieces), new)


def _parse_mooncake(value: dict[str, Any], names: dict[str, int], fresh: Iterator[int], scale: float) -> Arrival:
    """timestamp (ms), input_length, output_length, hash_ids: an id for each block of 512 prompt tokens and all before it."""
    left = _count("input_length", value["input_length"])
    pieces = []
    for name in value["hash_ids"]:
        count = min(left, _MOONCAKE_BLOCK)
        if count:
            pieces.append((_negative(str(name), names, fresh), count))
        left -= count
    if left:
        pieces.append((-next(fresh), left))
    due = _number("timestamp", value["timestamp"]) / 1000
    return Arrival(due * scale, tuple(pieces), _count("output_length", value["output_length"]))


def _negative(name: str, names: dict[str, int], fresh: Iterator[int]) -> int:
    if name not in names:
        names[name] = -next(fresh)
    return names[name]


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} is {value!r}, must be a number of tokens from 1 to {_MOST_TOKENS}")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}, must be a time from 0 on")
    return float(value)  # type: ignore[arg-type]
