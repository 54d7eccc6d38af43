"""Places for LoRA adapters: Linear nodes that take A and B of each slot as inputs of the graph."""

from __future__ import annotations

import re

import onnx_ir as ir

from qwenrt.plugins.schema import LINEAR
from qwenrt.runtime.lora import MERGED

_INPUTS = [value.name for value in LINEAR.inputs]


def add_adapters(graph: ir.Graph, max_rank: int) -> None:
    """Let the projections of every layer take adapters of up to `max_rank`.

    New inputs are `lora_indices` [T], each token's slot or -1, and for each projection M of the graph `lora_a.M` [slots, R, in]
    and `lora_b.M` [slots, R, out]. Where M is several projections in one, such as q, k and v, R is max_rank for each: B is zero
    where one's rank meets another's columns.
    """
    tokens = next(value for value in graph.inputs if value.name == "input_ids").shape
    assert tokens is not None
    indices = _input(graph, "lora_indices", ir.DataType.INT32, [tokens[0]])
    for node in graph:
        module = _module_of(node)
        if module is None:
            continue
        rank = max_rank * len(MERGED[module.rsplit(".", 1)[1]])
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None and x.shape is not None and y.shape is not None
        a = _input(graph, f"lora_a.{module}", ir.DataType.FLOAT, ["num_adapters", rank, x.shape[1]])
        b = _input(graph, f"lora_b.{module}", ir.DataType.FLOAT, ["num_adapters", rank, y.shape[1]])
        node.resize_inputs(len(_INPUTS))
        for name, value in (("adapters", indices), ("lora_a", a), ("lora_b", b)):
            node.replace_input_with(_INPUTS.index(name), value)


def _module_of(node: ir.Node) -> str | None:
    """The projection that a node is, if it is one that takes adapters."""
    weight = node.inputs[1] if node.op_type == LINEAR.name else None
    match = weight and weight.name and re.fullmatch(r"(model\.layers\.\d+\.[\w.]+\.(\w+))\.weight", weight.name)
    return match[1] if match and match[2] in MERGED else None


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: list[ir.SymbolicDim | int | str]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value
