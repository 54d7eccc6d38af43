"""What engine.json says of a TensorRT plan: for which machine it was built, and which steps it takes."""

from __future__ import annotations

import dataclasses
import re

from qwenrt.plugins import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Smallest, usual and largest size of a dimension."""

    min: int
    opt: int
    max: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """One optimisation profile: the sizes of the steps that it takes."""

    name: str
    num_tokens: Range
    num_seqs: Range
    num_logits: Range
    max_blocks: Range
    num_blocks: Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A serialised TensorRT engine; `profiles` are in TensorRT's order, the first for decoding and the second for the rest.

    `rank` is that of the graph that it was built from, 0 in an engine of one rank.
    """

    file: str
    rank: int = 0
    compute_capability: str
    tensorrt_version: str
    plan_version: int
    stripped: bool
    activation_bytes: int
    profiles: tuple[Profile, ...]

    def check(self) -> None:
        """Raise ConfigError naming the field that no plan of ours can have."""
        if not re.fullmatch(r"\d{1,2}\.\d", self.compute_capability):
            raise ConfigError(
                f"compute_capability of {self.file} is {self.compute_capability!r}, must be such as '8.9'"
            )
        if not self.profiles:
            raise ConfigError(f"{self.file} has no profiles")
        for profile in self.profiles:
            for name, size in vars(profile).items():
                if isinstance(size, Range) and not 1 <= size.min <= size.opt <= size.max < 2**31:
                    raise ConfigError(
                        f"{name} of profile {profile.name} of {self.file} is {size.min} to {size.max}, usually {size.opt}; "
                        "must be 1 <= min <= opt <= max"
                    )
