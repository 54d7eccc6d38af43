"""The decoders that are built here: one modeling file for all, and per architecture what sets it apart, and what its head gives.

Defaults are those of transformers' configuration classes, for fields that a config.json leaves out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qwenrt.plugins import ConfigError

from .json_fields import Fields, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One decoder, whatever head a checkpoint of it has."""

    name: str
    """What the names of its architectures begin with."""
    model_type: str
    qk_norm: bool = False
    """Whether each head of q and k is normalised before it is rotated."""
    qkv_bias: bool | None = None
    """Whether q, k and v have biases and o has none, whatever config.json says; None: `attention_bias` decides for all four."""
    mlp_bias: bool = False
    """Whether `mlp_bias` has a meaning."""
    sliding_window: Literal["some layers", "all layers", "no layer"] = "some layers"
    """Where `sliding_window` has a meaning; in some layers `max_window_layers` or `layer_types` says in which."""
    experts: bool = False
    """Whether MLPs are mixtures of experts."""
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    default_kv_heads: int | None = None
    """None: as many as query heads."""
    default_positions: int = 32768


FAMILIES = (
    Family(name="Qwen3", model_type="qwen3", qk_norm=True, default_head_dim=128, default_kv_heads=32),
    Family(
        name="Qwen3Moe",
        model_type="qwen3_moe",
        qk_norm=True,
        sliding_window="all layers",
        experts=True,
        default_kv_heads=4,
    ),
    Family(name="Qwen2", model_type="qwen2", qkv_bias=True, default_kv_heads=32),
    Family(
        name="Llama",
        model_type="llama",
        mlp_bias=True,
        sliding_window="no layer",
        default_positions=2048,
    ),
)

TASKS = {
    "ForCausalLM": ("generate", "embed"),
    "Model": ("embed",),
    "ForSequenceClassification": ("classify", "embed"),
}
"""By how an architecture's name ends: what an engine of it can be for, the usual first."""


def architecture_of(fields: Fields) -> tuple[Family, str]:
    """The family that a config.json names by `architectures`, or by `model_type` where it has none, and the architecture.

    Raises ConfigError naming what it found and what is supported.
    """
    names, kind = fields.values.get("architectures"), fields.values.get("model_type")
    listed = ", ".join(f"{family.name}ForCausalLM" for family in FAMILIES)
    supported = f"{listed}, and the same ending in {' or '.join(list(TASKS)[1:])}"
    if not names:
        for family in FAMILIES:
            if family.model_type == kind:
                return family, f"{family.name}ForCausalLM"
        raise ConfigError(
            f"{fields.source}: no architectures, and model_type is {shown(kind)}; supported are {supported}"
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("architectures", "a list of names")
    known = {family.name + ending: family for family in FAMILIES for ending in TASKS}
    name = next((name for name in names if name in known), None)
    if name is None:
        raise ConfigError(
            f"{fields.source}: architecture {shown(names[0])} is not supported; supported are {supported}"
        )
    if kind is not None and kind != known[name].model_type:
        raise fields.wrong("model_type", f'"{known[name].model_type}" for architecture {name}')
    return known[name], name
