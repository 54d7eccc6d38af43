"""Tensor parallelism: how a decoder's matrices are split over ranks, and where each rank finds its own in the one weight file.

As in Megatron-LM (Shoeybi et al., 2019): q, k, v, gate and up are split by output (column-parallel), o and down by input
(row-parallel) and their products summed over the ranks, the head by words of the vocabulary. Experts are split inside, each as
an MLP is. Norms, routers and the embedding are every rank's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

from qwenrt.plugins import ConfigError

from .config import ModelConfig
from .weights import Part

_BY_OUTPUT = ("qkv_proj", "q_proj", "gate_up_proj", "lm_head")
_BY_INPUT = ("o_proj", "down_proj")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """`size` ranks, each with its own heads; `kv_parts` counts the ranks whose K/V heads differ: others share theirs."""

    size: int = 1
    kv_parts: int = 1

    @classmethod
    def of(cls, config: ModelConfig, size: int) -> Self:
        """How `size` ranks hold a decoder; raises ConfigError naming the sizes that it allows if this is none of them."""
        if type(size) is not int or (obstacle := _obstacle(config, size)):
            fits = [n for n in range(1, config.num_heads + 1) if not _obstacle(config, n)]
            reason = f", which does not divide {obstacle}" if type(size) is int and size > 0 else ""
            raise ConfigError(f"tp is {size!r}{reason}; for this model it must be {_alternatives(fits)}")
        return cls(size, min(size, config.num_kv_heads))

    @property
    def shares_kv(self) -> bool:
        """Whether there are more ranks than K/V heads, so that several have the same one."""
        return self.kv_parts < self.size

    def rank_view(self, config: ModelConfig) -> ModelConfig:
        """The decoder as one rank has it: its heads and its part of the MLPs."""
        experts = config.experts
        if experts is not None:
            experts = dataclasses.replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.kv_parts,
            intermediate_size=config.intermediate_size // self.size,
            experts=experts,
        )

    def parts(self, parameter: str) -> int:
        """How many different slices of a parameter the ranks have, by its name; rank r has slice r * parts // size."""
        if _module_of(parameter) == "kv_proj":
            return self.kv_parts
        whole = _axis(parameter) is None
        return 1 if whole else self.size

    def sources(self, parameters: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[Part, ...]]:
        """What the weight file holds for each parameter: the ranks' slices, one below the other.

        parameters: the checkpoint tensors that each is made of, as `modeling.parameter_sources` has them.
        """
        found = {}
        for name, tensors in parameters.items():
            count, axis = self.parts(name), _axis(name) or 0
            found[name] = tuple(Part(tensor, axis, index, count) for index in range(count) for tensor in tensors)
        return found

    def place(self, parameter: str, rank: int, tied: bool) -> tuple[str, int, int]:
        """The tensor of the weight file that holds a rank's slice of a parameter, the slice's number, and how many it has.

        tied: whether the head's rows are those of the embedding.
        """
        count = self.parts(parameter)
        tensor = _EMBEDDING if tied and parameter == _HEAD else parameter
        return tensor, rank * count // self.size, count


ONE_RANK = TensorParallel()
"""A decoder that is not split."""


def _module_of(parameter: str) -> str:
    """The last module of a parameter's name."""
    module, _, kind = parameter.rpartition(".")
    return (module if kind in ("weight", "bias") else parameter).rpartition(".")[2]


def _axis(parameter: str) -> int | None:
    """Along which axis a parameter is split; None: not at all."""
    module = _module_of(parameter)
    if module in (*_BY_OUTPUT, "kv_proj"):
        return 0
    # The bias of a product that is summed over the ranks is added once, to the sum.
    return 1 if module in _BY_INPUT and not parameter.endswith(".bias") else None


def _obstacle(config: ModelConfig, size: int) -> str | None:
    """What of a decoder cannot be split into `size`; None if all can."""
    sizes = {"num_attention_heads": config.num_heads}
    if config.experts is None or not all(config.experts.layers):
        sizes["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
    if config.task == "generate":
        sizes["vocab_size"] = config.vocab_size
    for name, value in sizes.items():
        if size < 1 or value % size:
            return f"{name} ({value})"
    kv_heads = config.num_kv_heads
    return f"num_key_value_heads ({kv_heads}) and is no multiple of it" if kv_heads % size and size % kv_heads else None


def _alternatives(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
