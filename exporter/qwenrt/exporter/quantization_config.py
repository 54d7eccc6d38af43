"""The quantization_config of a config.json: how the matrices of a quantised checkpoint are stored."""

from __future__ import annotations

import dataclasses

from qwenrt.plugins import ConfigError

from .json_fields import Fields, shown

METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_REFUSED = {
    "bitsandbytes": "its codes have a meaning only inside its CUDA kernels",
}
"""Methods that people have checkpoints of, and why they are not read."""
_MAX_GROUP = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """A method and its parameters; those that a method does not have keep their defaults.

    Which matrices are quantised, the tensors of the checkpoint say. `bits` is the width of a code (0: each
    tensor has its own), `group_size` the number of
    columns that share a scale (0: all), `block` the rows and columns that share one where scales are for blocks, `zero_offset`
    what GPTQ takes off the zero points that it stores.
    """

    method: str
    bits: int = 8
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    zero_offset: int = 0

    @classmethod
    def from_fields(cls, config: Fields) -> Quantization | None:
        """Read quantization_config (or compression_config, its old name); None where there is none.

        Raises ConfigError naming a method or parameter that is not supported.
        """
        name = "quantization_config" if config.has("quantization_config") else "compression_config"
        if not config.has(name):
            return None
        fields = config.object(name) or Fields({}, f"{config.source}: {name}")
        method = fields.values.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            reason = f": {_REFUSED[method]}" if isinstance(method, str) and method in _REFUSED else ""
            raise ConfigError(
                f"{fields.source}: quant_method is {shown(method)}, supported are {', '.join(METHODS)}{reason}; "
                "give another checkpoint of the model"
            )
        read = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
        return read[method](fields)

    def __str__(self) -> str:
        bits = f", {self.bits} bits" if self.bits else ""
        groups = f", groups of {self.group_size}" if self.group_size else ""
        return self.method + bits + groups


def _fp8(fields: Fields) -> Quantization:
    fields.choice("fmt", ("e4m3",), "e4m3")
    block = fields.values.get("weight_block_size")
    if block is None:
        return Quantization(method="fp8")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= _MAX_GROUP for n in block):
        raise fields.wrong("weight_block_size", "two positive integers or null")
    return Quantization(method="fp8", block=(block[0], block[1]))


def _awq(fields: Fields) -> Quantization:
    version = fields.values.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.wrong("version", '"gemm"')
    bits = fields.integer("bits" if fields.has("bits") else "w_bit", 4)
    if bits != 4:
        raise fields.wrong("bits" if fields.has("bits") else "w_bit", "4")
    return Quantization(method="awq", bits=bits, group_size=_group_size(fields, "group_size", "q_group_size"))


def _gptq(fields: Fields) -> Quantization:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.wrong("bits", "4 or 8")
    layout = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Quantization(
        method="gptq", bits=bits, group_size=_group_size(fields, "group_size"), zero_offset=int(layout == "gptq")
    )


def _compressed_tensors(fields: Fields) -> Quantization:
    layout = fields.choice("format", _COMPRESSED_FORMATS, "pack-quantized")
    sparsity = fields.object("sparsity_config")
    if sparsity:
        sparsity.choice("format", ("dense",), "dense")
    groups = fields.object("config_groups")
    if groups is None:
        raise fields.wrong("config_groups", "an object with the weights' parameters")
    found = {_compressed_group(groups, name, layout) for name in groups.values}
    if len(found) != 1:
        raise ConfigError(f"{groups.source} has {len(found)} different schemes for weights, one is supported")
    return found.pop()


def _compressed_group(groups: Fields, name: str, layout: str) -> Quantization:
    group = groups.object(name)
    weights = group.object("weights") if group else None
    if group is None or weights is None:
        raise groups.wrong(name, "an object with the parameters of its weights")
    group.choice("format", (layout,), layout)
    kind = weights.choice("type", ("int", "float"), "int")
    bits = weights.integer("num_bits", 8)
    if bits != 8 and not (kind == "int" and bits == 4):
        raise weights.wrong("num_bits", "4 or 8" if kind == "int" else "8")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    block = weights.values.get("block_structure") if strategy == "block" else None
    if strategy == "block":
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(n) is int and 0 < n <= _MAX_GROUP for n in block)
        ):
            raise weights.wrong("block_structure", "two positive integers")
        return Quantization(method="compressed-tensors", bits=bits, block=(block[0], block[1]))
    size = weights.integer("group_size", high=_MAX_GROUP) if strategy == "group" else 0
    return Quantization(method="compressed-tensors", bits=bits, group_size=size)


def _group_size(fields: Fields, *names: str) -> int:
    """Columns in a group; -1 in the file is all of them, 0 here."""
    name = next((name for name in names if fields.has(name)), names[0])
    value = fields.integer(name, 128, low=-1, high=_MAX_GROUP)
    if value == 0:
        raise fields.wrong(name, "-1 or a positive integer")
    return max(value, 0)
