"""What a comparison found, as plain data: the terminal's table, the JSON and the HTML report all show this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One measure against its tolerance."""

    measure: str
    """What was measured, "logits" or "layer 2 K"."""
    value: float
    """The worst that was found; inf where something is not finite or missing."""
    limit: float
    where: str = ""
    """Batch, layer, row and head of the worst value, for people."""
    note: str = ""
    """What is wrong beside the number, and what that points to."""
    part: str = ""
    """The part of the graph whose own error this is: "embedding", "layer 2", "head"; empty for the engine as a whole."""

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit; NaN is not."""
        return self.value <= self.limit

    @property
    def description(self) -> str:
        """Measure, value against limit, place and note in one line."""
        size = f"{number(self.value)} (at most {number(self.limit)})" if math.isfinite(self.value) else ""
        parts = [" ".join(filter(None, (self.measure, size))), self.where, self.note]
        return ": ".join(filter(None, parts))


@dataclass(frozen=True)
class LayerErrors:
    """One part of the graph, given the reference's input to it ("own"), and at the end of the engine's own stream."""

    name: str
    layer: int | None
    own: dict[str, float]
    """Relative error by tensor: "output", and in a layer "attention", "K" and "V"."""
    accumulated: float
    """Of the output, when the engine's own errors are carried from layer to layer."""


@dataclass(frozen=True)
class LogitErrors:
    """One batch's logits, row by row: what the plots show."""

    batch: str
    positions: list[int]
    kl: list[float]
    top1: float
    """Share of rows whose most likely token is the same."""
    top5: float
    """Share of the reference's five most likely tokens that are among the engine's five."""
    max_abs: float
    cosine_distance: float
    histogram: list[int]
    """Of log10 of the absolute errors, in `HISTOGRAM_EDGES`; the first bin takes what is smaller."""


HISTOGRAM_EDGES = [-9.0 + 0.25 * index for index in range(41)]


@dataclass(frozen=True)
class Divergence:
    """Greedy decoding of one prompt."""

    prompt: str
    num_tokens: int
    position: int | None
    """The first generated token that the reference would not have chosen; None if there is none."""
    engine_token: str = ""
    reference_token: str = ""
    margin: float = 0.0
    """There, by how much the reference's logit of its own token is above that of the engine's, relative to its largest logit."""
    agreement: float = 1.0
    """Share of all positions at which the reference, after the engine's own tokens, would choose the engine's next one."""
    kl: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Perplexity:
    """Of one text under both."""

    num_tokens: int
    engine: float
    engine_error: float
    """Standard error of the perplexity."""
    reference: float
    reference_error: float
    nll_difference: float
    """Mean over tokens of the engine's negative log-likelihood less the reference's, in nats."""
    nll_difference_error: float
    """Standard error of that mean, from the tokens' differences."""


@dataclass(frozen=True)
class Bisection:
    """The first value inside one part of the graph that leaves the budget, given the reference's input to that part."""

    part: str
    batch: str
    tensor: str
    error: float
    budget: float
    where: str
    last_good: str
    nodes: list[str]
    """The nodes between the last good value and the bad one, "name (operator)": one of them is at fault."""
    errors: dict[str, float]
    """Every value that was compared, in the graph's order."""


@dataclass
class Comparison:
    """An engine against one reference."""

    engine: str
    backend: str
    reference: str
    formats: str
    tolerances: dict[str, float]
    checks: list[Check] = field(default_factory=list)
    logits: list[LogitErrors] = field(default_factory=list)
    layers: list[LayerErrors] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    perplexity: Perplexity | None = None
    bisection: Bisection | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there are checks and all of them passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The failed checks: first those of single parts of the graph, in its order, for they are the cause of the others."""
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: not check.part)

    @property
    def cause(self) -> str:
        """The first failure, and whether it is a part's own; empty if there is none."""
        if not self.failures:
            return "" if self.passed else "nothing was compared"
        first = self.failures[0]
        if not first.part:
            return first.description
        parts = {check.part for check in self.failures if check.part}
        which = "only" if len(parts) == 1 else f"first of {len(parts)}"
        noun = "part" if len(parts) == 1 else "parts"
        return f"{first.part} is the {which} {noun} out of tolerance by itself: {first.description}"

    @property
    def verdict(self) -> str:
        """One line: PASS, or FAIL and the first cause."""
        if self.passed:
            return f"PASS: all {len(self.checks)} checks against {self.reference}"
        return f"FAIL: {len(self.failures)} of {len(self.checks)} checks against {self.reference}: {self.cause}"


def number(value: float) -> str:
    """Two digits, which is all that an error has to say."""
    return f"{value:.1e}" if value else "0"
