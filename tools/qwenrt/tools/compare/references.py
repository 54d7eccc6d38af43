"""What an engine can be compared with, by the names that `--against` takes."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from qwenrt.exporter.checkpoint import open_checkpoint
from qwenrt.exporter.config import ModelConfig
from qwenrt.exporter.safetensors_file import DTYPES
from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineDir, EngineManifest
from qwenrt.runtime.lora import LoraAdapter

from .runners.base import PagedRunner
from .runners.executors import NumpyExecutor, OnnxRuntimeExecutor, TorchExecutor
from .runners.graph import Executor, GraphRunner

OF_A_CHECKPOINT = ("transformers", "eager")
"""References with a checkpoint's weights; they judge the export too."""
OF_THE_GRAPH = ("numpy", "torch", "onnxruntime")
"""References that run the engine's own graph and weights; they judge what executes it, and nothing else."""
NAMES = (*OF_A_CHECKPOINT, *OF_THE_GRAPH)
DTYPES_OF_A_CHECKPOINT = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ReferenceSpec:
    """A reference by name, and the type it computes in where that is not the graph's."""

    name: str
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> ReferenceSpec:
        """NAME or NAME:DTYPE; raises ConfigError for others."""
        name, _, dtype = text.partition(":")
        if name not in NAMES:
            raise ConfigError(f"{text!r} is no reference; there are {', '.join(NAMES)}")
        if dtype and name not in OF_A_CHECKPOINT:
            raise ConfigError(f"{text!r}: {name} computes in the engine's own types; give {name} alone")
        if dtype and dtype not in DTYPES_OF_A_CHECKPOINT:
            raise ConfigError(f"{text!r}: dtype is {dtype!r}, must be {', '.join(DTYPES_OF_A_CHECKPOINT)}")
        return cls(name, dtype or "float32")


def default_reference(checkpoint: Path | None) -> ReferenceSpec:
    """The strictest judge there is: transformers if installed, else our modules; without a checkpoint the op's definition."""
    if checkpoint is None:
        return ReferenceSpec("numpy")
    try:
        installed = importlib.util.find_spec("transformers") is not None
    except ModuleNotFoundError:
        installed = False
    return ReferenceSpec("transformers" if installed else "eager")


def load_reference(
    spec: ReferenceSpec, engine: EngineDir, checkpoint: Path | None, adapter: LoraAdapter | None = None
) -> PagedRunner:
    """The runner of a reference, not yet activated; raises ConfigError if it needs a checkpoint and there is none.

    adapter: for every token; merged into a checkpoint, and in a slot of the engine's own graph if that has any.
    """
    if spec.name in OF_A_CHECKPOINT:
        if checkpoint is None:
            raise ConfigError(f"--against {spec.name} needs the checkpoint: give --reference CHECKPOINT")
        if spec.name == "eager":
            from .runners.eager import EagerRunner

            return EagerRunner(engine, checkpoint, spec.dtype, adapter)
        from .runners.transformers import TransformersRunner

        return TransformersRunner(engine, checkpoint, spec.dtype, adapter)
    graph = f"{spec.name} (the engine's graph)"
    return GraphRunner(graph, engine, executor(spec.name, engine), adapter=adapter)


def executor(name: str, engine: EngineDir, threads: int | None = None) -> Executor:
    """What runs parts of an engine's graph."""
    if name == "numpy":
        return NumpyExecutor()
    return OnnxRuntimeExecutor(threads or 0) if name == "onnxruntime" else TorchExecutor(engine)


def check_checkpoint(folder: Path, manifest: EngineManifest) -> frozenset[str]:
    """How a checkpoint stores its matrices; raises ConfigError, naming a difference, if the engine cannot come from it."""
    config = ModelConfig.from_dir(folder)
    model = manifest.model
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        if getattr(config, name) != getattr(model, name):
            raise ConfigError(
                f"--reference {folder} has {name} {getattr(config, name)}, the engine {getattr(model, name)}; "
                "give the checkpoint that the engine was exported from"
            )
    tensors = open_checkpoint(folder).tensors.values()
    return frozenset(DTYPES.get(tensor.dtype, tensor.dtype) for tensor in tensors if len(tensor.shape) > 1)
