"""What can run a segment of an engine's graph: ONNX Runtime, PyTorch, NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx.external_data_helper import load_external_data_for_tensor
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qwenrt.plugins import ConfigError, reference
from qwenrt.plugins.library import cpu_library
from qwenrt.plugins.schema import DOMAIN, OPS
from qwenrt.runtime import EngineDir

from ..feeds import Array
from ..graph import EngineGraph, Segment

Op = Callable[..., Any]


def session_options(threads: int = 0) -> ort.SessionOptions:
    """Options of an ONNX Runtime session that knows our ops; threads: 0 is one for each core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.register_custom_ops_library(str(cpu_library()))
    return options


class OnnxRuntimeExecutor:
    """ONNX Runtime on the CPU with our library of custom ops; weights are mapped from the engine folder."""

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads

    def run(
        self, graph: EngineGraph, segment: Segment, values: Mapping[str, Array], outputs: Sequence[str]
    ) -> list[Array]:
        """A session of its own for each run, for one of the whole graph holds every tensor that is asked for until its end."""
        options = session_options(self._threads)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(graph.folder.resolve())
        )
        model = graph.submodel(segment, outputs).SerializeToString()
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no narrower base.
            raise ConfigError(f"ONNX Runtime cannot load {segment.name} of {graph.folder}: {error}") from error
        results: list[Array] = session.run(list(outputs), dict(values))
        return results


class NumpyExecutor:
    """onnx's reference evaluator, our ops by their reference in NumPy: slow, and too simple to be wrong."""

    def __init__(self, ops: Mapping[str, Op] | None = None) -> None:
        """ops: what takes the place of an op's reference, by the op's name."""
        self._ops = [_evaluator_op(spec.name, (ops or {}).get(spec.name)) for spec in OPS]

    def run(
        self, graph: EngineGraph, segment: Segment, values: Mapping[str, Array], outputs: Sequence[str]
    ) -> list[Array]:
        """The values called `outputs` of the segment, given all of its inputs; the inputs are left as they are."""
        model = graph.submodel(segment, outputs)
        for tensor in model.graph.initializer:
            load_external_data_for_tensor(tensor, str(graph.folder))
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is compared, not warned of
            results = ReferenceEvaluator(model, new_ops=self._ops).run(list(outputs), dict(values))
        assert isinstance(results, list)
        return results


def _evaluator_op(name: str, function: Op | None) -> type[OpRun]:
    """The evaluator's class for an op of ours, which calls `function`, or what `reference` has under the op's name."""

    def run(self: OpRun, *tensors: Array | None, **attributes: Any) -> tuple[Array, ...]:
        call = function or getattr(reference, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())
        results = call(*tensors, **attributes)
        return results if isinstance(results, tuple) else (results,)

    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


class TorchExecutor:
    """The runtime's torch backend, eager, in the graph's own types; weights are mapped from the engine folder."""

    def __init__(self, engine: EngineDir) -> None:
        self._engine = engine

    def run(
        self, graph: EngineGraph, segment: Segment, values: Mapping[str, Array], outputs: Sequence[str]
    ) -> list[Array]:
        """The values called `outputs` of the segment, given all of its inputs; the inputs are left as they are."""
        from qwenrt.runtime.backends.torch import Program, load_constants

        constants = load_constants(self._engine, graph.submodel(segment, outputs).graph.initializer)
        # Copies, since the backend's PagedAttention writes into the pool that it is given.
        given = {name: to_torch(value.copy()) for name, value in values.items()}
        results = Program(segment.nodes).run({**given, **constants}, outputs)
        return [to_numpy(results[name]) for name in outputs]


def to_torch(array: Array) -> Any:
    """The array as a torch tensor over the same memory, bfloat16 included."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> Array:
    """The tensor as an array over the same memory, bfloat16 included."""
    import torch

    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    array = tensor.numpy()
    return array
