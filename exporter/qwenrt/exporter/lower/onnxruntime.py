"""ONNX Runtime on the CPU: computes in float32; matrices may lie in the file as float32, float16 or bfloat16."""

from __future__ import annotations

import onnx_ir as ir

from qwenrt.plugins.schema import DOMAIN, LINEAR, register_onnx_schemas

from . import Lowered

DTYPES = ("float32",)
OPSET = 23
"""Where RMSNormalization is one node."""


def weight_formats(dtype: str) -> tuple[str, ...]:
    """How matrices may be stored, the default first."""
    return "float32", "float16", "bfloat16"


def kv_dtypes(dtype: str) -> tuple[str, ...]:
    """Types of the KV cache, the default first."""
    return "float32", "float16"


def lower(model: ir.Model, weights: str) -> Lowered:
    """Change a float32 trace in place for ONNX Runtime's CPU kernels, with matrices stored as `weights`.

    Every Gemm becomes a `Linear` node of ours, which reads the matrix where the file is mapped: ONNX Runtime's own kernel is fast
    only on a private packed copy, has no bfloat16, and gives a row other bits in other company. The rows that Gather looks up in
    a 16-bit embedding are cast to float32. Norms, biases and the RoPE table stay float32: they are small.
    """
    register_onnx_schemas()
    stored = ir.DataType["FLOAT" if weights == "float32" else weights.upper()]
    for value in model.graph.initializers.values():
        if value.shape is not None and len(value.shape) == 2 and value.name != "rope":
            value.dtype = stored
    model.graph.opset_imports.setdefault(DOMAIN, LINEAR.version)
    for node in list(model.graph):
        if node.op_type == "Gemm":
            node.op_type, node.domain, node.version = LINEAR.name, DOMAIN, LINEAR.version
            node.attributes.clear()
        elif (
            node.op_type == "Gather"
            and stored != ir.DataType.FLOAT
            and node.inputs[0] in model.graph.initializers.values()
        ):
            _cast_output(model.graph, node, stored)
    return Lowered()


def _cast_output(graph: ir.Graph, node: ir.Node, stored: ir.DataType) -> None:
    """Let a node give `stored` and a Cast after it give float32 under the name that the node's output had."""
    output = node.outputs[0]
    result = ir.Value(name=output.name, type=ir.TensorType(ir.DataType.FLOAT), shape=output.shape)
    cast = ir.node("Cast", [output], {"to": ir.DataType.FLOAT}, outputs=[result], name=f"{node.name}.cast")
    ir.convenience.replace_all_uses_with(output, result)
    cast.replace_input_with(0, output)
    output.name, output.dtype = f"{output.name}.{stored.name.lower()}", stored
    graph.insert_after(node, cast)
