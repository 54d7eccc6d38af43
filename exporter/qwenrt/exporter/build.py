"""The engine's graph and weight file, from config, checkpoint and manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import EngineManifest

from .checkpoint import Checkpoint
from .config import ModelConfig
from .lower import onnxruntime
from .modeling import parameter_sources
from .trace import trace
from .weights import Layout, plan_layout, write_weights

GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "model.safetensors"
_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_DISK_SLACK = 64 << 20


def write_model(
    folder: Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
    manifest: EngineManifest,
    progress: Callable[[str, int, int], None],
) -> None:
    """Write `model.onnx` and `model.safetensors` into `folder`. Raises ConfigError if the disk has no room for them."""
    progress("tracing", 0, 1)
    max_model_len = manifest.limits.max_model_len
    model = trace(
        config,
        opset=manifest.opset,
        block_size=manifest.block_size,
        max_model_len=max_model_len,
        kv_dtype=manifest.kv_dtype,
    )
    onnxruntime.lower(model, manifest.weights)
    layout = _layout(model)
    _check_space(folder, layout.size + _DISK_SLACK)
    graph = _with_external_data(model, layout)
    progress("tracing", 1, 1)
    write_weights(
        folder / WEIGHTS_NAME,
        layout,
        checkpoint,
        sources=parameter_sources(config),
        computed={"rope": config.rope.table(max_model_len, config.head_dim)},
        progress=lambda done, total: progress("writing weights", done, total),
    )
    onnx.save(graph, folder / GRAPH_NAME)
    onnx.checker.check_model(folder / GRAPH_NAME)


def _layout(model: ir.Model) -> Layout:
    tensors = {}
    for name, value in model.graph.initializers.items():
        assert value.dtype is not None and value.shape is not None and value.shape.is_static()
        tensors[name] = (_DTYPES[value.dtype], value.shape.numpy())
    return plan_layout(tensors)


def _with_external_data(model: ir.Model, layout: Layout) -> onnx.ModelProto:
    """The model as a protobuf whose initializers lie in the weight file; the shape of every value is inferred and recorded."""
    for name, value in model.graph.initializers.items():
        place = layout.tensors[name]
        assert value.dtype is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            WEIGHTS_NAME, place.offset, place.length, value.dtype, shape=value.shape, name=name
        )
    graph = ir.to_proto(model)
    # What is recorded is what ONNX's own inference finds, from the inputs alone.
    del graph.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"the engine needs {needed / 1e9:.2f} GB in {folder.parent}, {free / 1e9:.2f} GB are free; choose another disk"
        )
