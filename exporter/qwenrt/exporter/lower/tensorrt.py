"""TensorRT and TensorRT for RTX: computes in bfloat16 or float16, in float32 where the checkpoint's own code does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from qwenrt.plugins.schema import (
    ALL_GATHER,
    ALL_REDUCE,
    DIST_COLLECTIVE,
    DOMAIN,
    MIXTURE_OF_EXPERTS,
    register_onnx_schemas,
)

from . import Lowered
from .tensorrt_weights import FORMATS, Ranges, quantize

DTYPES = ("bfloat16", "float16")
OPSET = 23
"""Where RMSNormalization is one node."""

_EXPERTS_INPUTS = 1 + [value.name for value in MIXTURE_OF_EXPERTS.inputs].index("down")
"""Of a MixtureOfExperts whose matrices are not of integers."""
_ONES = "norm.ones"
"""An initializer [hidden_size] of float32 ones: the scale of every RMSNormalization."""


def weight_formats(dtype: str) -> tuple[str, ...]:
    """How matrices may be stored where the graph computes in `dtype`, the default first."""
    return dtype, *FORMATS


def kv_dtypes(dtype: str, weights: str) -> tuple[str, ...]:
    """Types of the KV cache where the graph computes in `dtype`, the default first."""
    return dtype, "fp8"


def lower(model: ir.Model, dtype: str, weights: str, ranges: Ranges | None) -> Lowered:
    """Change a float32 trace in place into a graph of `dtype`, for a strongly typed network: every type is what the graph says.

    A norm is what transformers' Qwen3RMSNorm does: normalised in float32, rounded to `dtype`, times the weight in `dtype`. The
    RoPE table stays float32; the softmax and the sums of PagedAttention and MixtureOfExperts are float32. A router's logits have
    `dtype`, as in the checkpoint's own code. What ranks exchange goes through TensorRT's own collective layer. weights: `dtype`,
    or a format with Q/DQ nodes before the Gemms, of which fp8 and fp8-channel need `ranges`. Raises ConfigError if the matrices
    do not suit the format.
    """
    element = ir.DataType[dtype.upper()]
    for value in model.graph.initializers.values():
        if value.name != "rope":
            value.dtype = element
    for node in list(model.graph):
        if node.op_type == "RMSNormalization":
            _normalise_in_float32(model.graph, node, element)
        elif node.op_type == MIXTURE_OF_EXPERTS.name:
            node.resize_inputs(_EXPERTS_INPUTS)  # the plugin has no others, not even absent ones
    quantized = Lowered() if weights == dtype else quantize(model, weights, dtype, ranges)
    _map_collectives(model.graph)
    _cast_logits(model.graph, element)
    ones = model.graph.initializers[_ONES].shape.numpy()
    return Lowered({_ONES: np.ones(ones, np.float32), **quantized.computed}, quantized.encodings)


def _normalise_in_float32(graph: ir.Graph, node: ir.Node, element: ir.DataType) -> None:
    x, weight = node.inputs
    output = node.outputs[0]
    assert weight is not None and node.name is not None
    ones = graph.initializers.get(_ONES)
    if ones is None:
        ones = ir.Value(name=_ONES, type=ir.TensorType(ir.DataType.FLOAT), shape=weight.shape)
        graph.initializers[_ONES] = ones
    widened = _node("Cast", [x], {"to": ir.DataType.FLOAT}, f"{node.name}.widened")
    normal = _node("RMSNormalization", [widened.outputs[0], ones], dict(node.attributes), f"{node.name}.normal")
    rounded = _node("Cast", [normal.outputs[0]], {"to": element}, f"{node.name}.rounded")
    scaled = _node("Mul", [rounded.outputs[0], weight], {}, node.name)
    nodes = [widened, normal, rounded, scaled]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [output], [scaled.outputs[0]])


def _map_collectives(graph: ir.Graph) -> None:
    """Let the nodes by which ranks exchange values be those that TensorRT's parser knows, which gathers rows and not columns."""
    register_onnx_schemas()
    for node in list(graph):
        if node.op_type not in (ALL_REDUCE.name, ALL_GATHER.name):
            continue
        x, output, name = node.inputs[0], node.outputs[0], node.name
        ranks = node.attributes["group_size"].as_int()
        if node.op_type == ALL_REDUCE.name:
            nodes = [_collective(x, "all_reduce", "sum", ranks, name)]
        else:
            columns = _node("Transpose", [x], {"perm": [1, 0]}, f"{name}.columns")
            gathered = _collective(columns.outputs[0], "all_gather", "none", ranks, f"{name}.gathered")
            nodes = [columns, gathered, _node("Transpose", [gathered.outputs[0]], {"perm": [1, 0]}, name)]
        last = nodes[-1].outputs[0]
        last.shape, last.dtype = output.shape, output.dtype
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [output], [last])


def _collective(x: ir.Value | None, operation: str, reduce_op: str, ranks: int, name: str | None) -> ir.Node:
    attributes = {"collective_operation": operation, "reduce_op": reduce_op, "nb_rank": ranks, "root": -1}
    node = ir.node(DIST_COLLECTIVE.name, [x], attributes, domain=DOMAIN, version=DIST_COLLECTIVE.version, name=name)
    node.outputs[0].name = name
    return node


def _cast_logits(graph: ir.Graph, element: ir.DataType) -> None:
    logits = graph.outputs[0]
    head = logits.producer()
    assert head is not None
    cast = _node("Cast", [logits], {"to": ir.DataType.FLOAT}, "logits")
    cast.outputs[0].shape, cast.outputs[0].dtype = logits.shape, ir.DataType.FLOAT
    logits.name, logits.dtype = f"logits.{element.name.lower()}", element
    graph.insert_after(head, cast)
    graph.outputs[0] = cast.outputs[0]


def _node(op: str, inputs: list[ir.Value | None], attributes: dict[str, Any], name: str) -> ir.Node:
    """A node with one output of its name."""
    node = ir.node(op, inputs, attributes, name=name)
    node.outputs[0].name = name
    return node
