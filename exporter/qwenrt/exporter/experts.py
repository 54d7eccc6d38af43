"""Mixtures of experts: which layers have them, how many, and how tokens are shared out among them."""

from __future__ import annotations

import dataclasses

from qwenrt.plugins import ConfigError

from .json_fields import Fields

_MAX_EXPERTS_IN_ALL = 1 << 16
"""Experts of all layers together; each is three tensors. Qwen3-Coder-480B has 9920."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a decoder; `layers` has, for each layer, whether its MLP is a mixture of experts or a plain one."""

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool

    @classmethod
    def from_fields(cls, fields: Fields, num_layers: int) -> ExpertsSpec | None:
        """Read the fields of a Qwen3-MoE config.json, with the defaults of transformers; None if no layer has experts."""
        name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
        num_experts = fields.integer(name, 128, low=0, high=_MAX_EXPERTS_IN_ALL)
        if num_experts == 0:
            return None
        step = fields.integer("decoder_sparse_step", 1)
        plain = fields.values.get("mlp_only_layers")
        if plain is not None and not (isinstance(plain, list) and all(type(layer) is int for layer in plain)):
            raise fields.wrong("mlp_only_layers", "a list of layer numbers or null")
        layers = tuple((layer + 1) % step == 0 and layer not in (plain or ()) for layer in range(num_layers))
        if not any(layers):
            return None
        if num_experts * sum(layers) > _MAX_EXPERTS_IN_ALL:
            raise ConfigError(
                f"{fields.source}: {name} is {num_experts} in {sum(layers)} layers, at most {_MAX_EXPERTS_IN_ALL} experts in "
                "all layers together are supported"
            )
        return cls(
            layers=layers,
            num_experts=num_experts,
            top_k=fields.integer("num_experts_per_tok", 8, high=num_experts),
            intermediate_size=fields.integer("moe_intermediate_size", 768, high=1 << 22),
            norm_topk_prob=fields.boolean("norm_topk_prob", False),
        )
