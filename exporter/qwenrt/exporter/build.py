"""The engine's graph and weight file, from config, checkpoint and manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import EngineManifest

from .calibration import calibration_tokens, measure_ranges
from .checkpoint import Checkpoint
from .config import ModelConfig
from .lower import Lowered, onnxruntime, tensorrt
from .lower.onnxruntime_weights import Panels, loss
from .modeling import parameter_sources
from .tensor_parallel import TensorParallel
from .trace import trace
from .weights import Contents, Layout, plan_layout, write_weights

WEIGHTS_NAME = "model.safetensors"
_DTYPES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "uint8",
}
_DISK_SLACK = 64 << 20


def write_model(
    folder: Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
    manifest: EngineManifest,
    progress: Callable[[str, int, int], None],
) -> str | None:
    """Write the graph, or that of each rank, and `model.safetensors` into `folder`, where the tokenizer is.

    Returns how a quantised checkpoint's matrices were carried over, if they became integers again or stayed them. Raises
    ConfigError if the disk has no room for them.
    """
    progress("tracing", 0, 1)
    max_model_len = manifest.limits.max_model_len
    tp = TensorParallel.of(config, manifest.tp)
    model = trace(
        config,
        opset=manifest.opset,
        block_size=manifest.block_size,
        max_model_len=max_model_len,
        kv_dtype=manifest.kv_dtype,
        tp=tp,
    )
    lowered = _lower(model, config, checkpoint, manifest, folder, progress)
    layout = _layout(model, tp, config.tie_word_embeddings)
    _check_space(folder, layout.size + _DISK_SLACK)
    graphs = {
        manifest.graph_name(rank): _with_external_data(model, layout, tp, rank, config.tie_word_embeddings)
        for rank in range(tp.size)
    }
    progress("tracing", 1, 1)
    rope = config.rope.table(max_model_len, config.head_dim)
    sources = parameter_sources(config, shares_kv=tp.shares_kv)
    again = [
        encoding
        for name, encoding in lowered.encodings.items()
        if isinstance(encoding, Panels) and all(source in checkpoint.quantized for source in sources[name])
    ]
    for encoding in again:
        encoding.measured = True
    write_weights(
        folder / WEIGHTS_NAME,
        layout,
        checkpoint,
        Contents(tp.sources(sources), {"rope": rope, **lowered.computed}, lowered.encodings, lowered.kept),
        progress=lambda done, total: progress("writing weights", done, total),
    )
    for name, graph in graphs.items():
        onnx.save(graph, folder / name)
        onnx.checker.check_model(folder / name)
    if lowered.kept:
        return f"{len(lowered.kept)} matrices of {config.quantization} are kept as they are"
    return f"{len(again)} matrices of {config.quantization} became {manifest.weights} {loss(again)}" if again else None


def _lower(
    model: ir.Model,
    config: ModelConfig,
    checkpoint: Checkpoint,
    manifest: EngineManifest,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> Lowered:
    """Change the trace into what the target takes."""
    if manifest.target == "onnxruntime":
        return onnxruntime.lower(model, manifest.weights, manifest.max_lora_rank, checkpoint, parameter_sources(config))
    ranges = None
    if manifest.weights.startswith("fp8"):
        sequences = calibration_tokens(folder / "tokenizer.json")
        ranges = measure_ranges(
            config, checkpoint, sequences, lambda done, total: progress("measuring activations", done, total)
        )
    return tensorrt.lower(model, manifest.dtype, manifest.weights, ranges)


def _layout(model: ir.Model, tp: TensorParallel, tied: bool) -> Layout:
    """Where each initializer goes, every rank's slices one below the other; int4 lies in the file as bytes of two."""
    tensors = {}
    for name, value in model.graph.initializers.items():
        assert value.dtype is not None and value.shape is not None and value.shape.is_static()
        tensor, _, count = tp.place(name, 0, tied)
        if tensor != name:
            continue
        shape = value.shape.numpy()
        if count > 1:
            shape = (count * shape[0], *shape[1:])
        if value.dtype == ir.DataType.INT4:
            tensors[name] = ("uint8", (*shape[:-1], shape[-1] // 2))
        else:
            tensors[name] = (_DTYPES[value.dtype], shape)
    return plan_layout(tensors)


def _with_external_data(model: ir.Model, layout: Layout, tp: TensorParallel, rank: int, tied: bool) -> onnx.ModelProto:
    """The model as a protobuf whose initializers lie in the weight file, those of one rank.

    The shape of every value is inferred and recorded.
    """
    for name, value in model.graph.initializers.items():
        tensor, index, count = tp.place(name, rank, tied)
        place = layout.tensors[tensor]
        length = place.length // count
        assert value.dtype is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            WEIGHTS_NAME, place.offset + index * length, length, value.dtype, shape=value.shape, name=name
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
