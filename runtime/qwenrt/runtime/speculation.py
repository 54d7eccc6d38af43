"""Speculative decoding by prompt lookup: guess the next tokens from earlier text, check all of them in one step.

A guess is kept as far as the sampler draws just these tokens, so speculation changes how many steps an answer takes and never
which tokens it has, sampled or greedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle, islice, takewhile
from typing import Any

from qwenrt.plugins import ConfigError

_FORGET = 0.98
"""Weight that the past keeps with every new observation: an estimate follows the last fifty or so."""
_PRIOR = 4.0
"""Guessed tokens that the first estimate of a request's acceptance counts for, half of them right."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """`LLM(speculative={"method": "ngram", ...})`; the names are vLLM's.

    num_speculative_tokens: guesses for one step at most. prompt_lookup_min, prompt_lookup_max: how many last tokens must have
    occurred before, as one run, for what followed them to be the guess; the longest run wins, then the latest.
    """

    method: str
    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f'speculative method is {self.method!r}, must be "ngram"')
        for name, most in (("num_speculative_tokens", 64), ("prompt_lookup_min", 16), ("prompt_lookup_max", 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"speculative {name} is {value!r}, must be 1 to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative prompt_lookup_min is {self.prompt_lookup_min}, must be at most prompt_lookup_max, "
                f"which is {self.prompt_lookup_max}"
            )

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> SpeculativeConfig:
        """Read the dictionary that `LLM` takes; raises ConfigError naming what is wrong."""
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(f"speculative has no {name!r}; it takes: {', '.join(known)}")
        if "method" not in value:
            raise ConfigError('speculative has no method; it must be "ngram"')
        return cls(**value)


class PromptLookup:
    """The runs of tokens of one sequence and what followed them: an index that grows with the text."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """`count` tokens that may follow `token_ids`, which has only grown since the last call; none if its end is new."""
        for end in range(self._indexed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._next[tuple(token_ids[end - length : end])] = end
        self._indexed = max(self._indexed, len(token_ids) - 1)
        for length in self._lengths:
            start = self._next.get(tuple(token_ids[-length:])) if length <= len(token_ids) else None
            if start is not None:
                # A text that repeats itself goes on repeating past its end.
                return list(islice(cycle(token_ids[start:]), count))
        return []


@dataclass(slots=True)
class Acceptance:
    """How likely one request's guesses are right, from those of late."""

    _right: float = _PRIOR / 2
    _all: float = _PRIOR

    @property
    def rate(self) -> float:
        """Estimated share of guesses that are right, given that the ones before them were."""
        return self._right / self._all

    def record(self, guessed: int, accepted: int) -> None:
        """Count a checked guess; guesses after the first wrong one say nothing."""
        self._right = self._right * _FORGET + accepted
        self._all = self._all * _FORGET + min(accepted + 1, guessed)

    def fade(self) -> None:
        """Let the estimate of a request that does not guess drift back, so that it guesses again some time."""
        self._right = self._right * _FORGET + (1 - _FORGET) * _PRIOR / 2
        self._all = self._all * _FORGET + (1 - _FORGET) * _PRIOR


@dataclass(slots=True)
class StepCost:
    """Seconds of a step as `fixed + per_token * tokens`: a least-squares line through the late steps, by running sums."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def record(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [old * _FORGET + value for old, value in zip(self._sums, new, strict=True)]

    def line(self) -> tuple[float, float] | None:
        """(fixed, per_token) in seconds, neither negative; None before steps of several sizes were seen."""
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread <= 1e-6 * max(xx * weight, 1e-12):
            return None
        per_token = max((weight * xy - x * y) / spread, 0.0)
        return max((y - per_token * x) / weight, 0.0), per_token

    def best_guess(self, most: int, rate: float, sequences: int) -> int:
        """How many tokens to guess, 0 to `most`, for one of `sequences` requests whose guesses are right with chance `rate`.

        Checking k guesses costs k * per_token and gains, for each of the expected sum of rate^i right ones, the sequence's share
        of a step: fixed / sequences + per_token.
        """
        line = self.line()
        if line is None:
            return most
        fixed, per_token = line
        best, best_gain, right = 0, 0.0, 0.0
        for count in range(1, most + 1):
            right += rate**count
            gain = right * (fixed / sequences + per_token) - count * per_token
            if gain > best_gain:
                best, best_gain = count, gain
        return best


@dataclass(slots=True)
class SpeculationStats:
    """Guesses so far, under vLLM's names."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with a guess gave on average, the one that it gives anyhow included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class Speculator:
    """What all requests of an engine share: the configuration, the cost of steps, the statistics."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.cost = StepCost()
        self.stats = SpeculationStats()


class Drafter:
    """The guesses of one request; `never` holds the tokens that end it."""

    def __init__(self, speculator: Speculator, never: Collection[int]) -> None:
        self._shared = speculator
        self._never = never
        self._lookup = PromptLookup(speculator.config)
        self._acceptance = Acceptance()

    def propose(self, token_ids: Sequence[int], *, room: int, sequences: int) -> list[int]:
        """Tokens to check after `token_ids`, at most `room`; none where checking does not pay in a step of `sequences`."""
        most = min(self._shared.config.num_speculative_tokens, room)
        count = self._shared.cost.best_guess(most, self._acceptance.rate, sequences)
        if count == 0:
            self._acceptance.fade()
            return []
        return list(takewhile(lambda token: token not in self._never, self._lookup.propose(token_ids, count)))

    def record(self, guessed: int, accepted: int) -> None:
        """Count a guess that was checked."""
        self._acceptance.record(guessed, accepted)
        stats = self._shared.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += guessed
        stats.num_accepted_tokens += accepted
