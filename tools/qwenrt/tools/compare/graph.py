"""An engine's ONNX graph, cut at its layers: what comes before them, each of them, and what comes after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import register_onnx_schemas
from qwenrt.runtime import EngineDir

LOGITS = "logits"
ModuleTensor = tuple[str, str]
"""What a module of a decoder layer takes or gives: the module's name in the layer, and "in" or "out"."""
_MODULES = (
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
_MODULES_IN = ("post_attention_layernorm", "mlp.down_proj")
"""Modules whose results, or inputs, stand in the graph under the modules' names."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of the graph and the values that they take from outside; `layer` is None before and after the layers."""

    layer: int | None
    name: str
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    """Every value that the nodes give, in their order."""


class EngineGraph:
    """`model.onnx` of an engine folder without its weights, and the segments that it consists of."""

    def __init__(self, engine: EngineDir) -> None:
        register_onnx_schemas()
        self.folder: Path = engine.path
        self.model = onnx.load(engine.file("model.onnx"), load_external_data=False)
        graph = self.model.graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.types = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.segments = self._cut(engine.manifest.model.num_layers)
        self.boundaries = self._boundaries()

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """The layer's values that are compared, by what they are: "attention", "kv_cache", "output"."""
        segment = self.segments[layer + 1]
        (attention,) = (node for node in segment.nodes if node.op_type == "PagedAttention")
        return {
            "attention": attention.output[0],
            "kv_cache": attention.output[1],
            "output": self.boundaries[layer + 1],
        }

    def module_tensors(self, layer: int) -> dict[ModuleTensor, str]:
        """The layer's values that modules of a PyTorch decoder layer take or give, in the graph's order."""
        segment, prefix = self.segments[layer + 1], f"model.layers.{layer}."
        takes = {value: node.input[0] for node in segment.nodes for value in node.output}
        names = {
            ("self_attn.o_proj", "in"): self.layer_tensors(layer)["attention"],
            ("", "out"): self.boundaries[layer + 1],
        }
        names |= {(module, "out"): prefix + module for module in _MODULES if prefix + module in takes}
        names |= {(module, "in"): takes[prefix + module] for module in _MODULES_IN if prefix + module in takes}
        return dict(sorted(names.items(), key=lambda item: segment.results.index(item[1])))

    @property
    def tensors_of_modules(self) -> list[str]:
        """All values that a PyTorch model can tell: `module_tensors`, KV pools, boundaries; in the graph's order."""
        known = set(self.boundaries)
        for layer in range(len(self.segments) - 2):
            known |= {*self.module_tensors(layer).values(), *self.layer_tensors(layer).values()}
        return [name for segment in self.segments for name in segment.results if name in known]

    def submodel(self, segment: Segment, outputs: Iterable[str]) -> onnx.ModelProto:
        """The segment as a model of its own that gives `outputs`; its weights still lie in the engine folder."""
        used = {name for node in segment.nodes for name in node.input}
        graph = onnx.helper.make_graph(
            segment.nodes,
            segment.name,
            [self.types[name] for name in segment.inputs],
            [self.types[name] for name in outputs],
            [tensor for name, tensor in self.initializers.items() if name in used],
        )
        model = onnx.helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version, producer_name="qwenrt"
        )
        model.functions.extend(self.model.functions)
        return model

    def _cut(self, num_layers: int) -> list[Segment]:
        """Segments 0 (embedding), 1 to num_layers (layers 0 to num_layers - 1), num_layers + 1 (head)."""
        parts: list[list[onnx.NodeProto]] = [[] for _ in range(num_layers + 2)]
        reached = 0
        for node in self.model.graph.node:
            match = _IN_LAYER.match(node.name)
            place = int(match[1]) + 1 if match else (0 if reached == 0 else num_layers + 1)
            if place < reached or place > num_layers + 1:
                raise ConfigError(
                    f"{self.folder / 'model.onnx'}: node {node.name} is out of the order of the layers; export the engine again"
                )
            reached = place
            parts[place].append(node)
        names = ["embedding", *(f"layer {layer}" for layer in range(num_layers)), "head"]
        layers = [None, *range(num_layers), None]
        return [self._segment(*one) for one in zip(layers, names, parts, strict=True)]

    def _segment(self, layer: int | None, name: str, nodes: Sequence[onnx.NodeProto]) -> Segment:
        results = tuple(value for node in nodes for value in node.output if value)
        taken = dict.fromkeys(value for node in nodes for value in node.input if value)
        inputs = tuple(value for value in taken if value not in results and value not in self.initializers)
        return Segment(layer, name, tuple(nodes), inputs, results)

    def _boundaries(self) -> list[str]:
        """What each segment hands to the next: the residual stream; the last segment's is the logits."""
        boundaries = []
        for segment, after in zip(self.segments, self.segments[1:], strict=False):
            crossing = [name for name in after.inputs if name not in self.inputs]
            if len(crossing) != 1 or crossing[0] not in segment.results:
                raise ConfigError(
                    f"{self.folder / 'model.onnx'}: between {segment.name} and {after.name} passes {crossing or 'nothing'}, "
                    "which is not one residual stream; compare without --layers and --bisect"
                )
            boundaries.append(crossing[0])
        return [*boundaries, LOGITS]
