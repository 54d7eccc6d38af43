"""What is asked of a server and when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT = """the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes from `low` to `high`, all equally likely."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One size."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Work:
    """One request: the prompt, how many tokens to generate, and seconds after the start at which it is due (0: at once)."""

    prompt: str
    max_tokens: int
    due: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`requests` random requests, the same for the same seed.

    words: of each prompt; new_tokens: to generate; shared_words: how many words all prompts begin with; rate: requests a second,
    in a Poisson process, or None for as soon as a client is free.
    """

    requests: int
    words: Range
    new_tokens: Range
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
