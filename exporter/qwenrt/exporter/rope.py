"""Rotary position embedding: the frequencies of each scaling kind and the cos/sin table that an engine carries.

The formulas are those of Hugging Face transformers (`modeling_rope_utils`), evaluated in float64:
plain RoPE     https://arxiv.org/abs/2104.09864
YaRN           https://arxiv.org/abs/2309.00071, with its attention factor on both cos and sin
linear         position interpolation, https://arxiv.org/abs/2306.15595
dynamic        "NTK-aware" scaling of theta by the length of the sequence
llama3         the frequency smoothing of Llama 3.1
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from .json_fields import Fields, shown

DEFAULT_THETA = 10_000.0
"""What transformers takes where no field names a theta."""

_TABLE_CHUNK = 4096
"""Rows of the table whose float64 angles are in memory at a time."""

_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}
"""The supported kinds, and the fields that only they have."""

_COMMON_KEYS = frozenset(
    {"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """A kind of RoPE and its parameters; those that the kind does not use keep their defaults."""

    theta: float = DEFAULT_THETA
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_fields(cls, config: Fields, max_position_embeddings: int) -> RopeSpec:
        """Read `rope_theta` with `rope_scaling` (old) or `rope_parameters` (new) from a config.json.

        As transformers 5 does: `rope_scaling` wins over `rope_parameters`, a theta inside either wins over the one at the top
        level, `type` is the old name of `rope_type`. Raises ConfigError for other kinds and for fields that a kind does not have.
        """
        theta = config.number("rope_theta", DEFAULT_THETA, low=1.001, high=1e18)
        fields = config.object("rope_scaling") or config.object("rope_parameters")
        for source in (config, fields) if fields else (config,):
            if source.number("partial_rotary_factor", 1.0, low=0.0, high=1.0) != 1.0:
                raise source.wrong("partial_rotary_factor", "1 or absent: Qwen3 rotates whole heads")
        if fields is None:
            return cls(theta=theta)
        theta = fields.number("rope_theta", theta, low=1.001, high=1e18)
        kind = fields.values.get("rope_type", fields.values.get("type", "default"))
        if not isinstance(kind, str) or kind not in _KEYS:
            raise ConfigError(f"{fields.source}: rope_type is {shown(kind)}, supported are {', '.join(_KEYS)}")
        unknown = sorted(name for name in fields.values.keys() - _KEYS[kind] - _COMMON_KEYS if fields.has(name))
        if unknown:
            raise ConfigError(f"{fields.source}: {shown(unknown[0])} means nothing to rope_type {kind}; remove it")
        if kind == "default":
            return cls(theta=theta)
        return cls._scaled(fields, kind, theta, max_position_embeddings)

    @classmethod
    def _scaled(cls, fields: Fields, kind: str, theta: float, max_position_embeddings: int) -> RopeSpec:
        original = fields.integer("original_max_position_embeddings", max_position_embeddings)
        if kind == "dynamic":
            original = max_position_embeddings
        if kind == "yarn" and not fields.has("factor"):
            factor = max(1.0, max_position_embeddings / original)
        else:
            factor = fields.number("factor", low=1.0, high=1e6)
        spec = cls(theta=theta, type=kind, factor=factor, original_max_positions=original)
        if kind == "yarn":
            return dataclasses.replace(
                spec,
                attention_factor=_yarn_attention_factor(fields, factor),
                beta_fast=_optional(fields, "beta_fast", 32.0),
                beta_slow=_optional(fields, "beta_slow", 1.0),
                truncate=fields.boolean("truncate", True),
            )
        if kind == "llama3":
            low = fields.number("low_freq_factor", low=1e-6, high=1e6)
            high = fields.number("high_freq_factor", low=1e-6, high=1e6)
            if high <= low:
                raise fields.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
            return dataclasses.replace(spec, low_freq_factor=low, high_freq_factor=high)
        return spec

    @property
    def scaled_positions(self) -> int:
        """Positions that linear or YaRN scaling was made for, factor times the original ones; 0 for other kinds."""
        return int(self.factor * self.original_max_positions) if self.type in ("linear", "yarn") else 0

    def inverse_frequencies(self, head_dim: int, num_positions: int = 0) -> npt.NDArray[np.float64]:
        """Radians a position for each of the head_dim / 2 rotated pairs, in sequences of up to `num_positions` tokens.

        Only dynamic scaling depends on the length. transformers changes the frequencies of a sequence while it grows and leaves
        its cached keys as they are; here they are those of the longest sequence, for every sequence: transformers' own where
        nothing is longer than max_position_embeddings, and for a prompt of that longest length.
        """
        if self.type == "dynamic" and num_positions > self.original_max_positions:
            stretch = self.factor * num_positions / self.original_max_positions - (self.factor - 1)
            scaled = self.theta * stretch ** (head_dim / max(head_dim - 2, 1))
            return dataclasses.replace(self, theta=scaled, type="default").inverse_frequencies(head_dim)
        plain = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "yarn":
            return self._yarn(plain, head_dim)
        if self.type == "llama3":
            return self._llama3(plain)
        return plain

    def table(self, num_positions: int, head_dim: int) -> npt.NDArray[np.float32]:
        """cos in the first head_dim / 2 columns and sin in the last, [num_positions, head_dim], attention factor included."""
        frequencies = self.inverse_frequencies(head_dim, num_positions)
        result = np.empty((num_positions, head_dim), np.float32)
        for start in range(0, num_positions, _TABLE_CHUNK):
            rows = result[start : start + _TABLE_CHUNK]
            angles = np.arange(start, start + len(rows), dtype=np.float64)[:, None] * frequencies
            rows[:, : head_dim // 2] = np.cos(angles) * self.attention_factor
            rows[:, head_dim // 2 :] = np.sin(angles) * self.attention_factor
        return result

    def _yarn(self, plain: npt.NDArray[np.float64], head_dim: int) -> npt.NDArray[np.float64]:
        """Interpolate the pairs that turn fewer than beta_slow times in the original context, keep those above beta_fast."""

        def pair_turning(turns: float) -> float:
            return head_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        interpolated: npt.NDArray[np.float64] = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
        return plain / self.factor * interpolated + plain * (1 - interpolated)

    def _llama3(self, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Keep short wavelengths, divide long ones by `factor`, blend in between."""
        turns = self.original_max_positions * plain / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain / self.factor * (1 - kept) + plain * kept


def _optional(fields: Fields, name: str, default: float) -> float:
    """A number that transformers replaces by its default where it is null or 0."""
    value = fields.number(name, low=0.0, high=1e6) if fields.has(name) else 0.0
    if 0.0 < value < 1e-6:
        raise fields.wrong(name, "0 or a number from 1e-06 to 1e+06")
    return value or default


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    if fields.has("attention_factor"):
        return fields.number("attention_factor", low=1e-6, high=1e6)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = _optional(fields, "mscale", 0.0), _optional(fields, "mscale_all_dim", 0.0)
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)
