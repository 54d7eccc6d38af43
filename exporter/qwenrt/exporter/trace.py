"""The decoder as an ONNX graph: torch.export on meta tensors, PagedAttention as one node, no weights in memory.

Names: inputs and outputs as the engine folder has them, initializers as the torch parameters, nodes and values after the module
that made them (`model.layers.3.mlp.down_proj`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import values
from onnxscript.onnx_opset import opset23
from torch.export import Dim

from qwenrt.plugins.schema import (
    ALL_GATHER,
    ALL_REDUCE,
    DOMAIN,
    INT8_SCALE_BYTES,
    MIXTURE_OF_EXPERTS,
    PAGED_ATTENTION,
    OpSpec,
    register_onnx_schemas,
)

from .config import ModelConfig
from .modeling import Qwen3ForCausalLM
from .tensor_parallel import ONE_RANK, TensorParallel

INDEX_INPUTS = ("input_ids", "positions", "block_tables", "seq_lens", "query_start", "logits_indices")

_KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_SCOPES = "pkg.torch.onnx.name_scopes"
_SIZES = {"num_tokens": "T", "num_seqs": "S", "num_logits": "R"}
"""The names of the graph's sizes, by those that torch.export has for them: to its algebra, S is not a name."""


def trace(
    config: ModelConfig,
    *,
    opset: int,
    block_size: int,
    max_model_len: int,
    kv_dtype: str,
    tp: TensorParallel = ONE_RANK,
) -> ir.Model:
    """Trace Qwen3ForCausalLM in float32, or what each rank has of it.

    The model's initializers have types and shapes, and no data.
    """
    register_onnx_schemas()
    with torch.device("meta"):
        module = Qwen3ForCausalLM(config, block_size=block_size, max_model_len=max_model_len, tp=tp).eval()
        inputs = _example_inputs(tp.rank_view(config), block_size, _KV_DTYPES[kv_dtype])
    layers = range(config.num_layers)
    with _quiet():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=_dynamic_shapes(config.num_layers),
            input_names=[*INDEX_INPUTS, *(f"kv_cache.{layer}" for layer in layers)],
            output_names=["logits", *(f"kv_cache_out.{layer}" for layer in layers)],
            custom_translation_table={
                torch.ops.qwenrt.paged_attention.default: _node_of(PAGED_ATTENTION),
                torch.ops.qwenrt.mixture_of_experts.default: _node_of(MIXTURE_OF_EXPERTS),
                torch.ops.qwenrt.all_reduce.default: _node_of(ALL_REDUCE),
                torch.ops.qwenrt.all_gather.default: _node_of(ALL_GATHER),
                torch.ops.aten.split.Tensor: _split,
                torch.ops.aten.index_select.default: _index_select,
            },
            # Its passes compare initializers by value, and there are none; the translations above leave it nothing to do.
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model = program.model
    _clean(model)
    return model


def _example_inputs(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> tuple[Any, ...]:
    """Inputs of sizes that are told apart and are at least 2: torch.export takes 0 and 1 for constants."""
    tokens, sequences, rows, max_blocks, num_blocks = 7, 3, 2, 5, 6
    index_shapes = ((tokens,), (tokens,), (sequences, max_blocks), (sequences,), (sequences + 1,), (rows,))
    cache_shape = (
        num_blocks,
        2,
        config.num_kv_heads,
        block_size,
        config.head_dim + INT8_SCALE_BYTES * (kv_dtype == torch.int8),
    )
    caches = [torch.empty(cache_shape, dtype=kv_dtype) for _ in range(config.num_layers)]
    return *(torch.empty(shape, dtype=torch.int32) for shape in index_shapes), caches


def _dynamic_shapes(num_layers: int) -> tuple[Any, ...]:
    tokens, sequences, rows = (Dim(name) for name in _SIZES)
    max_blocks, num_blocks = Dim("max_blocks"), Dim("num_blocks")
    caches = [{0: num_blocks}] * num_layers
    return (
        {0: tokens},
        {0: tokens},
        {0: sequences, 1: max_blocks},
        {0: sequences},
        {0: sequences + 1},
        {0: rows},
        caches,
    )


def _node_of(spec: OpSpec) -> Callable[..., Any]:
    """The translation of one of our torch ops into its node."""

    def translate(*arguments: Any) -> Any:
        count = len(spec.inputs)
        attributes = dict(zip((attribute.name for attribute in spec.attributes), arguments[count:], strict=True))
        return getattr(values.Opset(DOMAIN, spec.version), spec.name)(*arguments[:count], **attributes)

    return translate


def _split(x: Any, size: int, dim: int = 0) -> Any:
    """aten.split into equal parts as one Split node, where torch's own translation makes a sequence."""
    parts, rest = divmod(x.shape[dim], size)
    assert not rest
    return opset23.Split(x, num_outputs=parts, axis=dim)


def _index_select(x: Any, dim: int, index: Any) -> Any:
    """aten.index_select as one Gather node, where torch's own translation adds a Reshape and a Cast."""
    return opset23.Gather(x, index, axis=dim)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from reporting packages that nothing here uses."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _clean(model: ir.Model) -> None:
    """Name nodes and values after their modules, and drop what the tracer noted about its source files."""
    scopes = [_scope(node) for node in model.graph]
    own_nodes = Counter(scopes)
    used: Counter[str] = Counter()
    for node, scope in zip(model.graph, scopes, strict=True):
        name = scope if own_nodes[scope] == 1 and scope else ".".join(filter(None, (scope, node.op_type.lower())))
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
        inner = [value for value in node.outputs if not value.is_graph_output()]
        for index, value in enumerate(inner):
            value.name = node.name if len(inner) == 1 else f"{node.name}.{index}"
    if not scopes[-1]:
        model.graph[-1].name = "lm_head"
    for value in (*model.graph.inputs, *_all_values(model)):
        if value.shape is not None:
            value.shape = ir.Shape([_size(dim) for dim in value.shape])
    for item in (model, model.graph, *model.graph, *model.graph.inputs, *_all_values(model)):
        item.metadata_props.clear()
        item.doc_string = None
    model.producer_name, model.producer_version, model.graph.name = "qwenrt", None, "qwen3"
    model.domain = None


def _scope(node: ir.Node) -> str:
    """Path of the module that a node came from; empty at the top."""
    names = [name for name in node.metadata_props[_SCOPES][2:-2].split("', '")[:-1] if name]
    return names[-1] if names else ""


def _size(dim: int | ir.SymbolicDim) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\w+", lambda word: _SIZES.get(word[0], word[0]), str(dim.value))


def _all_values(model: ir.Model) -> Sequence[ir.Value]:
    return [*(value for node in model.graph for value in node.outputs), *model.graph.initializers.values()]
