"""ONNX Runtime on the CPU: computes in float32; matrices may lie in the file in 16, 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from qwenrt.plugins import ConfigError
from qwenrt.plugins.panels import PANEL_WIDTH
from qwenrt.plugins.schema import DOMAIN, EMBEDDING, LINEAR, MIXTURE_OF_EXPERTS, SWIGLU, register_onnx_schemas

from . import Lowered
from .adapters import add_adapters
from .onnxruntime_weights import FORMATS, GROUP_SIZES, Panels

DTYPES = ("float32",)
OPSET = 23
"""Where RMSNormalization is one node."""


def weight_formats(dtype: str) -> tuple[str, ...]:
    """How matrices may be stored, the default first."""
    return "float32", "float16", "bfloat16", *FORMATS


def kv_dtypes(dtype: str, weights: str) -> tuple[str, ...]:
    """Types of the KV cache, the default first: where weights are rounded to integers, 16 bits lose nothing that counts."""
    return ("float16", "float32") if weights in FORMATS else ("float32", "float16")


def lower(model: ir.Model, weights: str, max_lora_rank: int = 0) -> Lowered:
    """Change a float32 trace in place for ONNX Runtime's CPU kernels, with matrices stored as `weights`.

    Every Gemm becomes a `Linear` node of ours, which reads the matrix where the file is mapped: ONNX Runtime's own kernel is fast
    only on a private packed copy, has no bfloat16, and gives a row other bits in other company. The rows that Gather looks up in
    a 16-bit embedding are cast to float32; in an integer one they are looked up by an `Embedding` node. Norms, biases, the RoPE
    table and a classifier's head stay float32: they are small. So, beside integers, do routers: what they round would choose
    other experts. What lies between a feed-forward layer's products becomes one `SwiGlu` node. max_lora_rank: of adapters that
    requests may name; 0: none. Raises ConfigError for integer experts that do not fill whole panels.
    """
    register_onnx_schemas()
    graph = model.graph
    graph.opset_imports.setdefault(DOMAIN, LINEAR.version)
    matrices = {
        name: value
        for name, value in graph.initializers.items()
        if value.shape is not None and len(value.shape) == 2 and name not in ("rope", "score.weight")
    }
    for node in graph:
        if node.op_type == "Gemm":
            node.op_type, node.domain, node.version = LINEAR.name, DOMAIN, LINEAR.version
            node.attributes.clear()
    _fuse_swiglu(graph)
    lowered = _store(graph, matrices, weights)
    if max_lora_rank:
        add_adapters(graph, max_lora_rank)
    return lowered


def _store(graph: ir.Graph, matrices: Mapping[str, ir.Value], weights: str) -> Lowered:
    """Let the matrices be stored as `weights`."""
    if weights in FORMATS:
        mixtures = [node for node in graph if node.op_type == MIXTURE_OF_EXPERTS.name]
        _check_experts(mixtures)
        routers = {_producer_of(node.inputs[1]).inputs[1] for node in mixtures}
        panels = {name: value for name, value in matrices.items() if value not in routers}
        return Lowered(encodings={name: _use_panels(graph, value, weights) for name, value in panels.items()})
    stored = ir.DataType["FLOAT" if weights == "float32" else weights.upper()]
    for value in matrices.values():
        value.dtype = stored
        for node, _ in value.uses():
            if node.op_type == "Gather" and stored != ir.DataType.FLOAT:
                _cast_output(graph, node, stored)
    return Lowered()


def _fuse_swiglu(graph: ir.Graph) -> None:
    """Let one node compute silu(gate) * up where a Split, a Sigmoid and two Muls do; it keeps the name of the last."""
    for split in [node for node in graph if node.op_type == "Split" and len(node.outputs) == 2]:
        gate, up = split.outputs
        users = {node.op_type: node for node, _ in gate.uses()}
        if users.keys() != {"Sigmoid", "Mul"} or set(users["Mul"].inputs) != {gate, users["Sigmoid"].outputs[0]}:
            continue
        silu = users["Mul"].outputs[0]
        last = [node for node, _ in silu.uses()]
        if len(last) != 1 or last[0].op_type != "Mul" or set(last[0].inputs) != {silu, up}:
            continue
        node = last[0]
        node.op_type, node.domain, node.version = SWIGLU.name, DOMAIN, SWIGLU.version
        node.resize_inputs(1)
        node.replace_input_with(0, split.inputs[0])
        graph.remove([users["Mul"], users["Sigmoid"], split], safe=True)


def _use_panels(graph: ir.Graph, matrix: ir.Value, weights: str) -> Panels:
    """Store a matrix in panels, and let its nodes take them."""
    assert matrix.name is not None and matrix.shape is not None
    width, depth = matrix.shape.numpy()
    encoding = Panels(matrix.name, width, depth, GROUP_SIZES.get(weights))
    parts = encoding.initializers()
    nodes = [node for node, _ in matrix.uses()]
    for node in nodes:
        if node.op_type == MIXTURE_OF_EXPERTS.name:
            inputs = _expert_inputs(node, matrix, parts)
        elif node.op_type == "Gather":
            node.op_type, node.domain, node.version = EMBEDDING.name, DOMAIN, EMBEDDING.version
            inputs = [node.inputs[1], *parts]
            node.attributes.clear()
            node.attributes.add(ir.AttrInt64("depth", depth))
        else:
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            inputs = [node.inputs[0], parts[0], bias, *parts[1:]]
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
    del graph.initializers[matrix.name]
    for part in parts:
        graph.initializers.add(part)
    return encoding


def _producer_of(value: ir.Value | None) -> ir.Node:
    producer = None if value is None else value.producer()
    assert producer is not None
    return producer


def _check_experts(nodes: Iterable[ir.Node]) -> None:
    for node in nodes:
        sizes = [value.shape[1] for value in node.inputs[2:4] if value is not None and value.shape is not None]
        if any(not isinstance(size, int) or size % PANEL_WIDTH for size in sizes):
            raise ConfigError(
                f"experts in integers need a hidden_size and a moe_intermediate_size that are multiples of {PANEL_WIDTH}, not "
                f"{' and '.join(map(str, sizes))}; store them in float32, float16 or bfloat16"
            )


def _expert_inputs(node: ir.Node, matrix: ir.Value, parts: list[ir.Value]) -> list[ir.Value | None]:
    """The inputs of a MixtureOfExperts with one of its matrices replaced by its parts."""
    names = [value.name for value in MIXTURE_OF_EXPERTS.inputs]
    inputs = [*node.inputs, *[None] * (len(names) - len(node.inputs))]
    place = next(index for index, value in enumerate(inputs) if value is matrix)
    for suffix, part in zip(("", "_scale", "_groups"), parts, strict=False):
        inputs[names.index(names[place] + suffix)] = part
    return inputs


def _cast_output(graph: ir.Graph, node: ir.Node, stored: ir.DataType) -> None:
    """Let a node give `stored` and a Cast after it give float32 under the name that the node's output had."""
    output = node.outputs[0]
    result = ir.Value(name=output.name, type=ir.TensorType(ir.DataType.FLOAT), shape=output.shape)
    cast = ir.node("Cast", [output], {"to": ir.DataType.FLOAT}, outputs=[result], name=f"{node.name}.cast")
    ir.convenience.replace_all_uses_with(output, result)
    cast.replace_input_with(0, output)
    output.name, output.dtype = f"{output.name}.{stored.name.lower()}", stored
    graph.insert_after(node, cast)
