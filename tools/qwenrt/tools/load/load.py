"""What is asked and when, in words: a load means the same to an engine in this process and to any server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Protocol

_TEXT = """the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them"""
_WORDS = _TEXT.split()


class Sizes(Protocol):
    """A distribution of sizes, of 1 or more."""

    def draw(self, rng: random.Random) -> int:
        """One size."""


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes from `low` to `high`, all equally likely."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One size."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Sizes whose logarithm is normal, with `sigma` around that of `median`, cut to `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One size."""
        return min(self.most, max(1, round(rng.lognormvariate(log(self.median), self.sigma))))


SHAREGPT_PROMPTS = LogNormal(88, 1.1, 1024)
SHAREGPT_ANSWERS = LogNormal(225, 0.9, 1024)
"""The means, 161 and 338 but for the cut, are those of ShareGPT in W. Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", 2023 (figure 11); the shape is ours."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: the prompt, how many tokens to generate, and seconds after the start at which it is due (0: at once)."""

    prompt: str
    max_tokens: int
    due: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` random requests, the same for the same seed.

    words: of each prompt; new_tokens: to generate; shared_words: how many words all prompts begin with; rate: requests a second,
    in a Poisson process, or None for as soon as a client is free.
    """

    requests: int
    words: Sizes
    new_tokens: Sizes
    shared_words: int
    rate: float | None
    seed: int

    def __iter__(self) -> Iterator[Work]:
        rng = random.Random(self.seed)
        shared = _text(rng, self.shared_words)
        due = 0.0
        for _ in range(self.requests):
            if self.rate is not None:
                due += rng.expovariate(self.rate)
            yield Work(shared + _text(rng, self.words.draw(rng)), self.new_tokens.draw(rng), due)


def _text(rng: random.Random, words: int) -> str:
    return "".join(f"{word} " for word in rng.choices(_WORDS, k=words))
