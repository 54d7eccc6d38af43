"""PyTorch, eager, on the CPU or on CUDA: runs the graph of the engine folder node by node, PagedAttention over our own kernels.

The graph is the one that every other engine gets, so what is compared between engines is the engine and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS

from ..adapters import INDICES, LoraStacks
from ..engine_dir import EngineDir, Limits
from ..kv_budget import KvBudget
from ..model_runner import StepInputs
from . import KV_DTYPES

try:
    import onnx
    import torch
    import torch.nn.functional as F
    from onnx import numpy_helper

    from qwenrt.plugins import torch_experts, torch_op

    from .rank_group import RankGroup
except ImportError as error:
    raise ConfigError(f"backend torch needs {error.name}; install it with: pip install 'qwenrt[export]'") from error

Tensor = torch.Tensor
_DTYPES: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT8: torch.uint8,
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


def _linear(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    groups: Tensor | None = None,
    adapters: Tensor | None = None,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *group_parts: Tensor | None,
) -> Tensor:
    if scale is not None or groups is not None:
        raise ConfigError("matrices of integers are not computed in PyTorch; use backend onnxruntime")
    y = F.linear(data, weight.to(data.dtype), bias)
    if adapters is not None and lora_a is not None and lora_b is not None:
        for adapter in sorted(set(adapters.tolist()) - {-1}):
            rows = torch.where(adapters == adapter)[0]
            y[rows] += F.linear(data[rows], lora_a[adapter]) @ lora_b[adapter]
    return y


def _mixture_of_experts(*tensors: Tensor | None, **attributes: int) -> Tensor:
    left_out = [None] * (len(MIXTURE_OF_EXPERTS.inputs) - len(tensors))
    y: Tensor = torch_experts.mixture_of_experts(*tensors, *left_out, **attributes)
    return y


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _paged_attention(*tensors: Tensor, **attributes: Any) -> tuple[Tensor, Tensor]:
    return torch_op.paged_attention_in_place(*tensors, **attributes), tensors[torch_op.KV_CACHE]


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "Cast": lambda data, *, to, saturate=1: data.to(_DTYPES[to]),
    "Concat": lambda *tensors, axis: torch.cat(tensors, axis),
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "RMSNormalization": _rms_norm,
    "Sigmoid": torch.sigmoid,
    "Split": _split,
    "Transpose": lambda data, *, perm: data.permute(perm),
    "qwenrt::Linear": _linear,
    "qwenrt::MixtureOfExperts": _mixture_of_experts,
    "qwenrt::PagedAttention": _paged_attention,
    "qwenrt::SwiGlu": _swiglu,
}


class Program:
    """Nodes of an ONNX graph, in their order, as torch calls."""

    def __init__(self, nodes: Iterable[onnx.NodeProto], group: RankGroup | None = None) -> None:
        """Raises ConfigError if there is an operator that is not known. group: of ranks that run these nodes together."""
        operators = _OPERATORS
        if group is not None:
            operators = {
                **_OPERATORS,
                "qwenrt::AllReduce": group.all_reduce,
                "qwenrt::AllGather": group.all_gather,
                "qwenrt::DistCollective": group.dist_collective,
            }
        self._calls = [_compile(node, operators) for node in nodes]
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
    """The ONNX graph of an engine as a list of torch calls; weights are mapped from model.safetensors, and copied where the
    graph computes in a wider type than theirs.

    group: of an engine that is split over ranks, makes the group of them, of which this is number `rank`.
    """

    def __init__(
        self,
        engine: EngineDir,
        *,
        device: str,
        limits: Limits,
        budget: KvBudget,
        threads: int,
        max_loras: int = 1,
        rank: int = 0,
        group: Callable[[torch.device], RankGroup] | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        manifest, spec = engine.manifest, engine.manifest.model
        self._device = torch.device(device)
        check_device(self._device, engine)
        self._group = None if group is None else group(self._device)
        graph = onnx.load(engine.file(manifest.graph_name(rank)), load_external_data=False).graph
        self._program = Program(graph.node, self._group)
        constants = load_constants(engine, graph.initializer)
        widen = manifest.dtype == "float32"
        self._constants = {
            name: tensor.to(self._device, torch.float32 if widen and tensor.is_floating_point() else tensor.dtype)
            for name, tensor in constants.items()
        }
        shapes = {value.name: _last_sizes(value) for value in graph.input}
        self.lora = LoraStacks(spec, shapes, max_loras) if manifest.max_lora_rank else None
        if self.lora is not None:
            # On the CPU these are the stacks themselves, whatever is put into them later.
            self._constants |= {name: torch.from_numpy(array) for name, array in self.lora.arrays.items()}
        self._cache_shape = (2, manifest.rank_kv_heads, manifest.block_size, manifest.kv_row)
        self._numpy_dtype = np.dtype(KV_DTYPES[manifest.kv_dtype])
        self._cache_dtype = getattr(torch, self._numpy_dtype.name)
        self._num_layers = spec.num_layers
        if self._device.type == "cuda":
            # PyTorch keeps the memory that the largest step took, so what is free then is what the pool can have.
            self._kv_caches = self._make_pool(1)
            self.execute(_padding_step(limits))
            self.num_kv_blocks = budget.blocks_on_gpu(manifest, limits, *torch.cuda.mem_get_info(self._device))
        else:
            self.num_kv_blocks = budget.blocks_on_host(manifest, limits)
        if self._group is not None:
            self.num_kv_blocks = self._group.smallest(self.num_kv_blocks)
        self._kv_caches = self._make_pool(self.num_kv_blocks)

    def _make_pool(self, num_blocks: int) -> dict[str, Tensor]:
        return {
            f"kv_cache.{layer}": torch.zeros(
                num_blocks, *self._cache_shape, dtype=self._cache_dtype, device=self._device
            )
            for layer in range(self._num_layers)
        }

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call. Raises DeviceError if the GPU fails."""
        try:
            values: dict[str, Tensor] = {
                field.name: torch.from_numpy(getattr(inputs, field.name)).to(self._device)
                for field in dataclasses.fields(inputs)
                if getattr(inputs, field.name) is not None
            }
            if self.lora is not None:
                values.setdefault(INDICES, torch.full((len(inputs.input_ids),), -1, dtype=torch.int32))
            values |= self._constants
            values |= self._kv_caches
            logits: npt.NDArray[np.float32] = self._program.run(values, ("logits",))["logits"].cpu().numpy()
        except RuntimeError as error:
            if self._device.type == "cpu":
                raise
            raise DeviceError(f"PyTorch on {self._device}: {error}") from error
        return logits

    def abort(self) -> None:
        """Let a step that waits for another rank fail."""
        if self._group is not None:
            self._group.abort()

    def read_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, head_dim]."""
        values = self._kv_caches[f"kv_cache.{layer}"][self._index(blocks)].cpu()
        return values.view(torch.uint8).numpy().view(self._numpy_dtype)

    def write_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""
        source = torch.from_numpy(np.array(values, self._numpy_dtype).view(np.uint8)).view(self._cache_dtype)
        self._kv_caches[f"kv_cache.{layer}"][self._index(blocks)] = source.to(self._device)

    def _index(self, blocks: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device)


def _last_sizes(value: onnx.ValueInfoProto) -> tuple[int, int]:
    """The last two dimensions of a graph's input; 0 for those that are not known or not there."""
    sizes = [0, 0, *(dim.dim_value for dim in value.type.tensor_type.shape.dim)]
    return sizes[-2], sizes[-1]


def check_device(device: torch.device, engine: EngineDir) -> None:
    """Raise ConfigError if the device is not there, or the op has no kernel on it for this engine's type."""
    dtype = engine.manifest.dtype
    if device.type == "cpu":
        if dtype != "float32":
            raise ConfigError(
                f"{engine.path} is an engine in {dtype}, backend torch on the CPU computes in float32; give device cuda, or "
                "export it again with --target onnxruntime"
            )
        return
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", which is built for the CPU alone"
        raise ConfigError(
            f"device is {device}, and there is no GPU for PyTorch {torch.__version__}{build}; give device cpu"
        )
    if (count := torch.cuda.device_count()) <= (device.index or 0):
        raise ConfigError(f"device is {device}, this machine has {count}: cuda:0 to cuda:{count - 1}")
    if dtype not in ("float16", "bfloat16"):
        raise ConfigError(
            f"{engine.path} is an engine in {dtype}, the CUDA kernels compute in float16 or bfloat16; export it with "
            "--target tensorrt (backend torch needs no plan)"
        )


def _padding_step(limits: Limits) -> StepInputs:
    """As many rows as a step can have, all of them padding: nothing is read from the pool or written to it."""
    rows = np.zeros(limits.max_num_batched_tokens, np.int32)
    sequences = np.zeros(limits.max_num_seqs, np.int32)
    return StepInputs(
        input_ids=rows,
        positions=rows,
        block_tables=np.full((limits.max_num_seqs, 1), -1, np.int32),
        seq_lens=sequences,
        query_start=np.zeros(limits.max_num_seqs + 1, np.int32),
        logits_indices=sequences,
    )


def load_constants(engine: EngineDir, initializers: Iterable[onnx.TensorProto]) -> dict[str, Tensor]:
    """Initializers of a graph by name: small ones from the graph itself, the rest mapped from the safetensors file.

    Raises ConfigError if the graph looks for one where that file has none.
    """
    path = engine.file("model.safetensors")
    weights = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    constants = {}
    for initializer in initializers:
        if initializer.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: int(entry.value) for entry in initializer.external_data if entry.key != "location"}
            start, length = place["offset"], place["length"]
            dtype, shape = _DTYPES[initializer.data_type], tuple(initializer.dims)
            if not 0 <= start <= start + length <= len(weights) or length != math.prod(shape) * dtype.itemsize:
                raise ConfigError(
                    f"{engine.path}: {initializer.name} does not lie in {path.name}; export the engine again"
                )
            constants[initializer.name] = weights[start : start + length].view(dtype).view(shape)
        else:
            constants[initializer.name] = torch.from_numpy(numpy_helper.to_array(initializer).copy())
    return constants


def _compile(
    node: onnx.NodeProto, operators: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], list[str], list[str]]:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    operator = operators.get(name)
    if operator is None:
        raise ConfigError(
            f"backend torch does not know the operator {name} of node {node.name}; use backend onnxruntime"
        )
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return functools.partial(operator, **attributes), list(node.input), list(node.output)
