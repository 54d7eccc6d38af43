"""The custom ops' specs, from which everything that names them is made.

The ONNX schema with its shape inference, the torch.library signature and a C++ header are all derived from the `OpSpec`s in
`OPS`. This file imports nothing outside the standard library, so a build can run it as it lies:

    python schema.py HEADER      writes the C++ header
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOMAIN = "qwenrt"
PLAN_VERSION = 1
"""Of what the TensorRT plugin writes into a plan; raise it when the fields, or what they mean, change."""

Dim = int | str | None
"""A dimension: known, symbolic, or unknown."""
Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class Value:
    """An input or output: its type is a name in `OpSpec.types`, its shape is for people."""

    name: str
    type: str
    shape: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute; required if it has no default."""

    name: str
    kind: type[int] | type[float] | type[str]
    doc: str
    default: int | float | str | None = None


@dataclass(frozen=True)
class OpSpec:
    """One custom op."""

    name: str
    version: int
    doc: str
    types: Mapping[str, tuple[str, ...]]
    """Per type variable, the element types that it may be, by their ONNX names."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[Attribute, ...]
    infer_shapes: Callable[[Sequence[Shape], Mapping[str, Any]], list[Shape]]
    """Output shapes of input shapes and attributes."""

    @property
    def torch_schema(self) -> str:
        """The op's signature in torch.library's notation."""
        parameters = [f"Tensor{'?' if value.optional else ''} {value.name}" for value in self.inputs]
        parameters += [f"{attribute.kind.__name__} {attribute.name}" for attribute in self.attributes]
        results = ", ".join("Tensor" for _ in self.outputs)
        return f"({', '.join(parameters)}) -> {results if len(self.outputs) == 1 else f'({results})'}"


INT8_SCALE_BYTES = 4
"""Of the float32 behind the integers of a row of an int8 KV pool."""


def _attention_shapes(inputs: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    return [(inputs[0][0], attributes["num_heads"] * attributes["head_dim"]), inputs[5]]


PAGED_ATTENTION = OpSpec(
    name="PagedAttention",
    version=1,
    doc=(
        "Normalises q and k per head (RMSNorm), rotates them (half-split RoPE), writes k and v into the sequences' cache blocks, "
        "and attends causally over each sequence's blocks. All writes come before all reads. Softmax and sums are float32. Rows "
        "from query_start[S] on, and sequences without rows, read and write nothing; such rows of attn are 0. An int8 pool takes "
        "each head's K and V of a token rounded to multiples of max|x| / 127, as Linear rounds its rows."
    ),
    types={
        "T": ("float", "float16", "bfloat16"),
        "T_kv": ("float", "float16", "bfloat16", "float8e4m3fn", "int8"),
        "F": ("float",),
        "I": ("int32",),
    },
    inputs=(
        Value(
            "qkv",
            "T",
            "[T, (num_heads + 2 * num_kv_heads) * head_dim]",
            "projected tokens of all sequences, back to back",
        ),
        Value("q_norm", "T", "[head_dim] or [0]", "RMSNorm weight of q; empty where the family has none"),
        Value("k_norm", "T", "[head_dim] or [0]", "RMSNorm weight of k; empty where the family has none"),
        Value("rope", "F", "[max_positions, head_dim]", "cos in the first half of the columns, sin in the second"),
        Value("positions", "I", "[T]", "absolute position of each token; a sequence's end at its seq_lens - 1"),
        Value(
            "kv_cache",
            "T_kv",
            "[num_blocks, 2, num_kv_heads, block_size, head_dim]; int8: head_dim + 4 in the place of head_dim",
            "[b, 0] is K (normed, rotated), [b, 1] V; a row of int8 ends with the float32 that its integers are multiples of",
        ),
        Value(
            "block_tables",
            "I",
            "[S, max_blocks]",
            "block of tokens [i * block_size, (i + 1) * block_size) of each sequence",
        ),
        Value("seq_lens", "I", "[S]", "context length after this step"),
        Value("query_start", "I", "[S + 1]", "sequence s owns rows query_start[s] to query_start[s + 1]"),
    ),
    outputs=(
        Value("attn", "T", "[T, num_heads * head_dim]", "attention output of each token"),
        Value("kv_cache_out", "T_kv", "as kv_cache", "the pool after the write; may be the same memory as kv_cache"),
    ),
    attributes=(
        Attribute("num_heads", int, "query heads"),
        Attribute("num_kv_heads", int, "key and value heads; divides num_heads"),
        Attribute("head_dim", int, "elements of a head; even"),
        Attribute("block_size", int, "tokens of a cache block"),
        Attribute("scale", float, "factor on q.k before the softmax"),
        Attribute("norm_eps", float, "epsilon of the RMSNorms", 1e-6),
        Attribute("sliding_window", int, "how many positions back a token sees, itself included; -1 is all", -1),
    ),
    infer_shapes=_attention_shapes,
)

_PANELS = "[N, K]; int8: [panels, depth / 4, 64]; uint8: [panels, depth / 8, 64]"
_SCALE = Value(
    "scale", "F", "[N]", "what the integers of a row of weights are multiples of; with int8 and uint8", optional=True
)
_GROUPS = Value(
    "groups", "U", "[panels, groups, 16]", "multiplier | zero point << 4 of each group; with uint8", optional=True
)
_GROUP_SCALE = Value(
    "group_scale", "F", "[panels, groups, 16]", "factor of each group of integers, beside the scale", optional=True
)
_GROUP_OFFSET = Value(
    "group_offset", "F", "[panels, groups, 16]", "what is added to that product; with group_scale", optional=True
)


def _linear_shapes(inputs: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    # Panels are filled up with zeros, so there the scales say how wide the weight is.
    scale = inputs[3] if len(inputs) > 3 else ()
    return [(inputs[0][0], scale[0] if scale else inputs[1][0])]


def _times(width: Dim, count: int) -> Dim:
    return width * count if isinstance(width, int) else None


def _half(width: Dim) -> Dim:
    return width // 2 if isinstance(width, int) else None


LINEAR = OpSpec(
    name="Linear",
    version=1,
    doc=(
        "y = x W^T + b. A float W lies as in a checkpoint; products and sums are float32. An integer W lies in panels "
        "(panels.py): int8, or 4-bit codes that stand for (code - zero point) * multiplier; each row of x is rounded to int8 "
        "with the scale max|x| / 127, sums are exact, and y = sum * (scale of x * scale of W) + b in float32. With group_scale, "
        "W = integer * group_scale + group_offset, times the scale of its row: sums are exact within a group, and each group "
        "adds its sum * group_scale, then (sum of its x) * group_offset, in float32, in order. A row of x below "
        "2^-100 throughout counts as 0; one with a NaN or an infinity gives NaN. With adapters (LoRA), (x A^T) B^T of "
        "the adapter that a row names is added to it, in float32; other rows keep their bits. A row of y does not depend, to the "
        "last bit, on which other rows are computed with it."
    ),
    types={
        "F": ("float",),
        "W": ("float", "float16", "bfloat16", "int8", "uint8"),
        "U": ("uint8",),
        "I": ("int32",),
    },
    inputs=(
        Value("x", "F", "[M, K]", "rows"),
        Value("weight", "W", _PANELS, "weight"),
        Value("bias", "F", "[N]", "bias", optional=True),
        _SCALE,
        _GROUPS,
        Value("adapters", "I", "[M]", "each row's adapter; -1: none", optional=True),
        Value("lora_a", "F", "[adapters, R, K]", "A of each adapter; with adapters", optional=True),
        Value("lora_b", "F", "[adapters, R, N]", "B^T of each, its scale among it; with adapters", optional=True),
        _GROUP_SCALE,
        _GROUP_OFFSET,
    ),
    outputs=(Value("y", "F", "[M, N]", "products"),),
    attributes=(),
    infer_shapes=_linear_shapes,
)

MIXTURE_OF_EXPERTS = OpSpec(
    name="MixtureOfExperts",
    version=1,
    doc=(
        "For each token the sum, over the top_k experts with the largest router logits, of the expert's share of the softmax of "
        "all logits times its SwiGLU: down(silu(gate(x)) * up(x)). With norm_topk_prob the shares are divided by their sum. "
        "Among equal logits the lower index goes first. An expert without tokens costs nothing; a row of y does not depend, to "
        "the last bit, on which other rows are computed with it. Integer matrices are as those of Linear, each expert in whole "
        "panels; x and the inner values are rounded to int8 row by row."
    ),
    types={
        "T": ("float", "float16", "bfloat16"),
        "F": ("float",),
        "W": ("float", "float16", "bfloat16", "int8", "uint8"),
        "U": ("uint8",),
    },
    inputs=(
        Value("x", "T", "[T, hidden]", "tokens"),
        Value("router_logits", "T", "[T, num_experts]", "how well each expert suits each token"),
        Value("gate_up", "W", "[num_experts * 2 * inner, hidden]", "of each expert the gate's rows, then the up's"),
        Value("down", "W", "[num_experts * hidden, inner]", "the experts' down projections, one below the other"),
        dataclasses.replace(_SCALE, name="gate_up_scale", shape="[num_experts * 2 * inner]"),
        dataclasses.replace(_SCALE, name="down_scale", shape="[num_experts * hidden]"),
        dataclasses.replace(_GROUPS, name="gate_up_groups"),
        dataclasses.replace(_GROUPS, name="down_groups"),
        dataclasses.replace(_GROUP_SCALE, name="gate_up_group_scale"),
        dataclasses.replace(_GROUP_SCALE, name="down_group_scale"),
        dataclasses.replace(_GROUP_OFFSET, name="gate_up_group_offset"),
        dataclasses.replace(_GROUP_OFFSET, name="down_group_offset"),
    ),
    outputs=(Value("y", "T", "[T, hidden]", "sum over each token's experts"),),
    attributes=(
        Attribute("top_k", int, "experts of a token"),
        Attribute("norm_topk_prob", int, "1: the shares of a token's experts add up to 1"),
    ),
    infer_shapes=lambda inputs, attributes: [inputs[0]],
)

EMBEDDING = OpSpec(
    name="Embedding",
    version=1,
    doc="Rows of an integer weight of Linear, in float32: the embedding look-up of a model whose head is the embedding.",
    types={"F": ("float",), "W": ("int8", "uint8"), "U": ("uint8",), "I": ("int32",)},
    inputs=(
        Value("ids", "I", "[T]", "rows"),
        Value("weight", "W", _PANELS, "weight"),
        _SCALE,
        _GROUPS,
        _GROUP_SCALE,
        _GROUP_OFFSET,
    ),
    outputs=(Value("y", "F", "[T, depth]", "rows of the weight"),),
    attributes=(Attribute("depth", int, "columns of the weight, without those that fill up its panels"),),
    infer_shapes=lambda inputs, attributes: [(inputs[0][0], attributes["depth"])],
)

SWIGLU = OpSpec(
    name="SwiGlu",
    version=1,
    doc=(
        "y = silu(gate) * up, silu(x) = x / (1 + e^-x), of one product that has the gate in the first half of its columns and up "
        "in the second (Shazeer, 2020)."
    ),
    types={"F": ("float",)},
    inputs=(Value("gate_up", "F", "[T, 2 * inner]", "gate, then up"),),
    outputs=(Value("y", "F", "[T, inner]", "silu(gate) * up"),),
    attributes=(),
    infer_shapes=lambda inputs, attributes: [(inputs[0][0], _half(inputs[0][1]))],
)


def _collective_shapes(inputs: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    rows, width = inputs[0]
    gathers = attributes["collective_operation"] == b"all_gather"
    return [(_times(rows, attributes["nb_rank"]) if gathers else rows, width)]


_GROUP_SIZE = Attribute("group_size", int, "how many ranks run this graph together")

ALL_REDUCE = OpSpec(
    name="AllReduce",
    version=1,
    doc="The sum of the x of all ranks of a tensor-parallel engine. Every rank gets the same, to the last bit.",
    types={"T": ("float", "float16", "bfloat16")},
    inputs=(Value("x", "T", "[T, width]", "this rank's addend"),),
    outputs=(Value("y", "T", "[T, width]", "sum"),),
    attributes=(_GROUP_SIZE,),
    infer_shapes=lambda inputs, attributes: [inputs[0]],
)

ALL_GATHER = OpSpec(
    name="AllGather",
    version=1,
    doc="The x of all ranks of a tensor-parallel engine, side by side in the order of the ranks.",
    types={"T": ("float", "float16", "bfloat16")},
    inputs=(Value("x", "T", "[R, width]", "this rank's columns"),),
    outputs=(Value("y", "T", "[R, group_size * width]", "all columns"),),
    attributes=(_GROUP_SIZE,),
    infer_shapes=lambda inputs, attributes: [(inputs[0][0], _times(inputs[0][1], attributes["group_size"]))],
)

DIST_COLLECTIVE = OpSpec(
    name="DistCollective",
    version=1,
    doc=(
        "What TensorRT has for AllReduce and AllGather: its ONNX parser, of 10.16 and later, makes a layer over NCCL of a node "
        "of this name, whatever its domain. all_reduce sums, all_gather puts the ranks' rows one below the other."
    ),
    types={"T": ("float", "float16", "bfloat16")},
    inputs=(Value("x", "T", "[rows, width]", "this rank's"),),
    outputs=(Value("y", "T", "[rows, width] or [nb_rank * rows, width]", "all ranks'"),),
    attributes=(
        Attribute("collective_operation", str, "all_reduce or all_gather"),
        Attribute("reduce_op", str, "sum with all_reduce, else none"),
        Attribute("nb_rank", int, "how many ranks run this graph together"),
        Attribute("root", int, "-1: these have none", -1),
    ),
    infer_shapes=_collective_shapes,
)

OPS = (PAGED_ATTENTION, LINEAR, EMBEDDING, MIXTURE_OF_EXPERTS, SWIGLU, ALL_REDUCE, ALL_GATHER, DIST_COLLECTIVE)


def register_onnx_schemas() -> None:
    """Make the ops known to the onnx package: checker, shape inference, onnxscript. Repeated calls do nothing."""
    import onnx

    for spec in OPS:
        if not onnx.defs.has(spec.name, spec.version, DOMAIN):
            onnx.defs.register_schema(_onnx_schema(spec))


def _onnx_schema(spec: OpSpec) -> Any:
    import onnx
    from onnx.defs import OpSchema

    def parameter(value: Value) -> OpSchema.FormalParameter:
        option = OpSchema.FormalParameterOption.Optional if value.optional else OpSchema.FormalParameterOption.Single
        return OpSchema.FormalParameter(value.name, value.type, f"{value.shape}: {value.doc}", param_option=option)

    def attribute(item: Attribute) -> OpSchema.Attribute:
        kind = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT, str: OpSchema.AttrType.STRING}[item.kind]
        if item.default is None:
            return OpSchema.Attribute(item.name, kind, item.doc, required=True)
        return OpSchema.Attribute(item.name, onnx.helper.make_attribute(item.name, item.default), item.doc)

    schema = OpSchema(
        spec.name,
        DOMAIN,
        spec.version,
        spec.doc,
        inputs=[parameter(value) for value in spec.inputs],
        outputs=[parameter(value) for value in spec.outputs],
        type_constraints=[(name, [f"tensor({t})" for t in types], "") for name, types in spec.types.items()],
        attributes=[attribute(item) for item in spec.attributes],
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(spec, context))
    return schema


def _infer(spec: OpSpec, context: Any) -> None:
    """ONNX type and shape inference of one node."""
    import onnx

    given = [context.get_input_type(index) for index in range(context.get_num_inputs())]
    tensors = [None if one is None else one.tensor_type for one in given]
    attributes = {}
    for item in spec.attributes:
        proto = context.get_attribute(item.name)
        attributes[item.name] = item.default if proto is None else onnx.helper.get_attribute_value(proto)
    # An optional input that is absent has no shape to wait for.
    known = all(one is None or one.HasField("shape") for one in tensors)
    shapes = spec.infer_shapes([_shape_of(one) for one in tensors], attributes) if known else [None] * len(spec.outputs)
    element_of = {
        value.type: one.elem_type for value, one in zip(spec.inputs, tensors, strict=False) if one is not None
    }
    for index, (value, shape) in enumerate(zip(spec.outputs, shapes, strict=True)):
        context.set_output_type(index, onnx.helper.make_tensor_type_proto(element_of[value.type], shape))


def _shape_of(tensor: Any) -> Shape:
    if tensor is None:
        return ()
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)


def cpp_header() -> str:
    """The specs as C++ constants, one namespace an op."""
    lines = ["// Generated from schema.py.", "#pragma once", "", "namespace qwenrt::ops {", ""]
    lines += [f'inline constexpr char kDomain[] = "{DOMAIN}";']
    lines += [f"inline constexpr int kPlanVersion = {PLAN_VERSION};", ""]
    for spec in OPS:
        lines += [f"namespace {_snake(spec.name)} {{", f'inline constexpr char kName[] = "{spec.name}";']
        lines += [f"inline constexpr int kVersion = {spec.version};"]
        for kind, values in (("Input", spec.inputs), ("Output", spec.outputs)):
            names = ", ".join(f"k{_camel(value.name)}" for value in values)
            quoted = ", ".join(f'"{value.name}"' for value in values)
            lines += [f"enum {kind} {{ {names}, kNum{kind}s }};"]
            lines += [f"inline constexpr const char* k{kind}Names[] = {{{quoted}}};"]
        lines += [f'inline constexpr char k{_camel(item.name)}Attribute[] = "{item.name}";' for item in spec.attributes]
        lines += ["}", ""]
    return "\n".join([*lines, "}  // namespace qwenrt::ops", ""])


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(cpp_header())
