"""PyTorch, eager: runs the graph of the engine folder node by node, PagedAttention through its torch.library op.

The graph is the one that every other engine gets, so what is compared between engines is the engine and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError

from ..engine_dir import EngineDir
from ..model_runner import StepInputs

try:
    import onnx
    import safetensors
    import torch
    import torch.nn.functional as F
    from onnx import numpy_helper

    from qwenrt.plugins import torch_experts, torch_op
except ImportError as error:
    raise ConfigError(f"backend torch needs {error.name}; install it with: pip install 'qwenrt[export]'") from error

Tensor = torch.Tensor
_DTYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
}


def _gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    assert axis == 0
    return F.embedding(indices, data) if data.dim() == 2 else data[indices]


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    transB: int = 0,
    transA: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    assert not transA and alpha == beta == 1.0
    return F.linear(a, b if transB else b.T, c)


def _split(data: Tensor, sizes: Tensor | None = None, *, axis: int = 0, num_outputs: int = 0) -> tuple[Tensor, ...]:
    if sizes is None:
        return torch.chunk(data, num_outputs, dim=axis)
    return torch.split_with_sizes(data, sizes.tolist(), dim=axis)


def _rms_norm(data: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    assert axis in (-1, data.dim() - 1) and stash_type == 1
    return F.rms_norm(data, scale.shape, scale, epsilon)


def _linear(data: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(data, weight.to(data.dtype), bias)


def _paged_attention(*tensors: Tensor, **attributes: Any) -> tuple[Tensor, Tensor]:
    return torch_op.paged_attention_in_place(*tensors, **attributes), tensors[torch_op.KV_CACHE]


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "Cast": lambda data, *, to, saturate=1: data.to(_DTYPES[to]),
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "RMSNormalization": _rms_norm,
    "Sigmoid": torch.sigmoid,
    "Split": _split,
    "qwenrt::Linear": _linear,
    "qwenrt::MixtureOfExperts": torch_experts.mixture_of_experts,
    "qwenrt::PagedAttention": _paged_attention,
}


class Program:
    """Nodes of an ONNX graph, in their order, as torch calls."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Raises ConfigError if there is an operator that is not known."""
        self._calls = [_compile(node) for node in nodes]
        self._uses = Counter(name for _, input_names, _ in self._calls for name in input_names)

    @torch.inference_mode()
    def run(self, values: dict[str, Tensor], keep: Collection[str]) -> dict[str, Tensor]:
        """The values called `keep`, computed from `values` by name; others are dropped after their last use."""
        uses = self._uses.copy()
        for call, input_names, output_names in self._calls:
            results = call(*[values[name] if name else None for name in input_names])
            values.update(zip(output_names, results if isinstance(results, tuple) else (results,), strict=True))
            for name in input_names:
                uses[name] -= 1
                if not uses[name] and name not in keep:
                    values.pop(name, None)
        return {name: values[name] for name in keep}


class TorchBackend:
    """The ONNX graph of an engine as a list of torch calls; weights are mapped from model.safetensors."""

    def __init__(self, engine: EngineDir, *, num_kv_blocks: int, threads: int) -> None:
        torch.set_num_threads(threads)
        manifest, spec = engine.manifest, engine.manifest.model
        graph = onnx.load(engine.file("model.onnx"), load_external_data=False).graph
        self._constants = load_constants(engine, graph.initializer)
        self._program = Program(graph.node)
        shape = (num_kv_blocks, 2, spec.num_kv_heads, manifest.block_size, spec.head_dim)
        self._kv_caches = {
            f"kv_cache.{layer}": torch.zeros(shape, dtype=getattr(torch, manifest.kv_dtype))
            for layer in range(spec.num_layers)
        }

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call."""
        values: dict[str, Tensor] = {
            field.name: torch.from_numpy(getattr(inputs, field.name)) for field in dataclasses.fields(inputs)
        }
        values |= self._constants
        values |= self._kv_caches
        logits: npt.NDArray[np.float32] = self._program.run(values, ("logits",))["logits"].numpy()
        return logits

    def read_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, head_dim]."""
        pool: npt.NDArray[Any] = self._kv_caches[f"kv_cache.{layer}"].numpy()
        return pool[blocks]

    def write_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""
        self._kv_caches[f"kv_cache.{layer}"].numpy()[blocks] = values


def load_constants(engine: EngineDir, initializers: Iterable[onnx.TensorProto]) -> dict[str, Tensor]:
    """Initializers of a graph by name: small ones from the graph itself, the rest mapped from the safetensors file."""
    constants = {}
    with safetensors.safe_open(engine.file("model.safetensors"), framework="pt") as weights:
        for initializer in initializers:
            if initializer.data_location == onnx.TensorProto.EXTERNAL:
                constants[initializer.name] = weights.get_tensor(initializer.name)
            else:
                constants[initializer.name] = torch.from_numpy(numpy_helper.to_array(initializer).copy())
    return constants


def _compile(node: onnx.NodeProto) -> tuple[Callable[..., Any], list[str], list[str]]:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    operator = _OPERATORS.get(name)
    if operator is None:
        raise ConfigError(
            f"backend torch does not know the operator {name} of node {node.name}; use backend onnxruntime"
        )
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return functools.partial(operator, **attributes), list(node.input), list(node.output)
