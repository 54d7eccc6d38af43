"""ONNX Runtime on the CPU: computes in float32; matrices may lie in the file in 16, 8 or 4 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from qwenrt.plugins import ConfigError
from qwenrt.plugins.panels import PANEL_WIDTH
from qwenrt.plugins.schema import DOMAIN, EMBEDDING, LINEAR, MIXTURE_OF_EXPERTS, SWIGLU, register_onnx_schemas

from ..checkpoint import Checkpoint
from . import Lowered
from .adapters import add_adapters
from .onnxruntime_weights import CHECKPOINT, FORMATS, GROUP_SIZES, Kept, KeptPanels, Panels, kept_formats

DTYPES = ("float32",)
OPSET = 23
"""Where RMSNormalization is one node."""


def weight_formats(dtype: str) -> tuple[str, ...]:
    """How matrices may be stored, the default first."""
    return "float32", "float16", "bfloat16", *FORMATS


def kv_dtypes(dtype: str, weights: str) -> tuple[str, ...]:
    """Types of the KV cache, the default first: where weights are rounded to integers, 16 bits lose nothing that counts."""
    return ("float16", "float32", "int8") if weights in FORMATS else ("float32", "float16", "int8")


def lower(
    model: ir.Model,
    weights: str,
    max_lora_rank: int,
    checkpoint: Checkpoint,
    sources: Mapping[str, tuple[str, ...]],
) -> Lowered:
    """Change a float32 trace in place for ONNX Runtime's CPU kernels, with matrices stored as `weights`.

    Every Gemm becomes a `Linear` node of ours, which reads the matrix where the file is mapped: ONNX Runtime's own kernel is fast
    only on a private packed copy, has no bfloat16, and gives a row other bits in other company. The rows that Gather looks up in
    a 16-bit embedding are cast to float32; in an integer one they are looked up by an `Embedding` node. Norms, biases, the RoPE
    table and a classifier's head stay float32: they are small. So, beside integers, do routers: what they round would choose
    other experts. What lies between a feed-forward layer's products becomes one `SwiGlu` node. max_lora_rank: of adapters that
    requests may name; 0: none. checkpoint, sources: what `weights` checkpoint keeps as it is, and which of its tensors each
    parameter is made of. Raises ConfigError for integer experts that do not fill whole panels, and integers that cannot be kept.
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
    if weights == CHECKPOINT:
        shapes = {name: _sizes(value) for name, value in matrices.items()}
        lowered = _keep(graph, matrices, kept_formats(sources, shapes, checkpoint))
    else:
        lowered = _store(graph, matrices, weights)
    if max_lora_rank:
        add_adapters(graph, max_lora_rank)
    return lowered


def _store(graph: ir.Graph, matrices: Mapping[str, ir.Value], weights: str) -> Lowered:
    """Let the matrices be stored as `weights`."""
    if weights in FORMATS:
        mixtures = _mixtures(graph)
        _check_experts(mixtures)
        routers = {_router_of(node) for node in mixtures}
        panels = {
            name: Panels(name, *_sizes(value), GROUP_SIZES.get(weights))
            for name, value in matrices.items()
            if name not in routers
        }
        for name, encoding in panels.items():
            _use_panels(graph, matrices[name], encoding)
        return Lowered(encodings=panels)
    for value in matrices.values():
        _store_floats(graph, value, ir.DataType["FLOAT" if weights == "float32" else weights.upper()])
    return Lowered()


def _keep(graph: ir.Graph, matrices: Mapping[str, ir.Value], formats: dict[str, Kept]) -> Lowered:
    """Let the matrices be stored as the checkpoint has them; of a layer's experts all alike."""
    for node in _mixtures(graph):
        # What a router rounded would choose other experts.
        if isinstance(formats[router := _router_of(node)], KeptPanels):
            formats[router] = ir.DataType.FLOAT
        pair = [value.name for value in node.inputs[2:4] if value is not None and value.name is not None]
        gate_up, down = (formats[name] for name in pair)
        if isinstance(gate_up, KeptPanels) and isinstance(down, KeptPanels):
            _check_experts([node])
            bits = max(gate_up.form.bits, down.form.bits)
            for name, kept in zip(pair, (gate_up, down), strict=True):
                formats[name] = dataclasses.replace(kept, form=dataclasses.replace(kept.form, bits=bits))
        elif gate_up != down:
            formats |= dict.fromkeys(pair, ir.DataType.FLOAT)
    panels = {name: kept for name, kept in formats.items() if isinstance(kept, KeptPanels)}
    for name, value in matrices.items():
        kept = formats[name]
        if isinstance(kept, KeptPanels):
            _use_panels(graph, value, kept)
        else:
            _store_floats(graph, value, kept)
    return Lowered(kept=panels)


def _store_floats(graph: ir.Graph, matrix: ir.Value, stored: ir.DataType) -> None:
    """Store a matrix as a float type, and let what looks its rows up give float32."""
    matrix.dtype = stored
    for node, _ in matrix.uses():
        if node.op_type == "Gather" and stored != ir.DataType.FLOAT:
            _cast_output(graph, node, stored)


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


def _use_panels(graph: ir.Graph, matrix: ir.Value, encoding: Panels | KeptPanels) -> None:
    """Store a matrix in panels, and let its nodes take them."""
    assert matrix.name is not None
    parts = encoding.initializers()
    nodes = [node for node, _ in matrix.uses()]
    for node in nodes:
        if node.op_type == "Gather":
            indices = node.inputs[1]
            node.op_type, node.domain, node.version = EMBEDDING.name, DOMAIN, EMBEDDING.version
            node.attributes.clear()
            node.attributes.add(ir.AttrInt64("depth", encoding.depth))
            node.replace_input_with(0, indices)
            node.replace_input_with(1, matrix)
        _replace_by_parts(node, matrix, parts)
    del graph.initializers[matrix.name]
    for part in parts:
        graph.initializers.add(part)


_SPECS = {spec.name: spec for spec in (LINEAR, EMBEDDING, MIXTURE_OF_EXPERTS)}


def _replace_by_parts(node: ir.Node, matrix: ir.Value, parts: list[ir.Value]) -> None:
    """Let a node take, in place of a matrix, its parts: those that the op calls what their names add to the matrix's."""
    assert matrix.name is not None
    names = [value.name for value in _SPECS[node.op_type].inputs]
    place = next(index for index, value in enumerate(node.inputs) if value is matrix)
    prefix = f"{names[place]}_" if node.op_type == MIXTURE_OF_EXPERTS.name else ""
    places = [place]
    for part in parts[1:]:
        assert part.name is not None
        places.append(names.index(prefix + part.name.removeprefix(f"{matrix.name}_")))
    node.resize_inputs(max(len(node.inputs), *(index + 1 for index in places)))
    for index, part in zip(places, parts, strict=True):
        node.replace_input_with(index, part)


def _mixtures(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == MIXTURE_OF_EXPERTS.name]


def _router_of(mixture: ir.Node) -> str:
    """The name of the matrix whose product is a mixture's logits."""
    logits = mixture.inputs[1]
    producer = None if logits is None else logits.producer()
    weight = None if producer is None else producer.inputs[1]
    assert weight is not None and isinstance(weight.name, str)
    return weight.name


def _sizes(matrix: ir.Value) -> tuple[int, int]:
    assert matrix.shape is not None
    width, depth = matrix.shape.numpy()
    return width, depth


def _check_experts(nodes: Iterable[ir.Node]) -> None:
    for node in nodes:
        sizes = [value.shape[1] for value in node.inputs[2:4] if value is not None and value.shape is not None]
        if any(not isinstance(size, int) or size % PANEL_WIDTH for size in sizes):
            raise ConfigError(
                f"experts in integers need a hidden_size and a moe_intermediate_size that are multiples of {PANEL_WIDTH}, not "
                f"{' and '.join(map(str, sizes))}; store them in float32, float16 or bfloat16"
            )


def _cast_output(graph: ir.Graph, node: ir.Node, stored: ir.DataType) -> None:
    """Let a node give `stored` and a Cast after it give float32 under the name that the node's output had."""
    output = node.outputs[0]
    result = ir.Value(name=output.name, type=ir.TensorType(ir.DataType.FLOAT), shape=output.shape)
    cast = ir.node("Cast", [output], {"to": ir.DataType.FLOAT}, outputs=[result], name=f"{node.name}.cast")
    ir.convenience.replace_all_uses_with(output, result)
    cast.replace_input_with(0, output)
    output.name, output.dtype = f"{output.name}.{stored.name.lower()}", stored
    graph.insert_after(node, cast)
