"""A stand-in for the Python module `tensorrt`, with the part of its interface that the backend uses.

It is not TensorRT: a "plan" is a JSON text that names an engine folder's graph, and an execution context computes that graph with
PyTorch on the CPU, reading and writing the addresses that were bound. What is real is the PagedAttention plugin: the library of
plugins/tensorrt over the emulated kernels, driven through IPluginV3 as TensorRT would. What TensorRT documents as undefined ends
the test: replaying a graph whose context was changed after the capture, too little activation memory, work on unbound tensors.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import onnx
import torch

from qwenrt.plugins.schema import PAGED_ATTENTION
from qwenrt.runtime.backends import torch as torch_backend
from qwenrt.runtime.engine_dir import EngineDir
from tests.plugins.tensorrt.binding import TYPES, Host, Phase, Plugin

from .fake_device import FakeDevice

Shape = tuple[int, ...]
INPUTS = [value.name for value in PAGED_ATTENTION.inputs]
KV_CACHE = INPUTS.index("kv_cache")
DIMENSIONS = {
    "input_ids": ("num_tokens",),
    "positions": ("num_tokens",),
    "block_tables": ("num_seqs", "max_blocks"),
    "seq_lens": ("num_seqs",),
    "query_start": ("num_seqs + 1",),
    "logits_indices": ("num_logits",),
}


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    BF16 = 7


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


_ELEMENTS = {
    onnx.TensorProto.FLOAT: (DataType.FLOAT, torch.float32),
    onnx.TensorProto.FLOAT16: (DataType.HALF, torch.float16),
    onnx.TensorProto.BFLOAT16: (DataType.BF16, torch.bfloat16),
    onnx.TensorProto.INT32: (DataType.INT32, torch.int32),
}


class FakeTensorRt:
    """The module. `host`: the plugin library and what it is driven through; `device`: where contexts find their memory."""

    __name__ = "tensorrt"
    __version__ = "10.14.1.48"
    __spec__ = ModuleSpec("tensorrt", None, origin=__file__)
    TensorIOMode = TensorIOMode
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    ILogger = ILogger

    def __init__(self, device: FakeDevice, host: Host) -> None:
        self.device = device
        self.host = host
        self.registry = PluginRegistry()
        self.refuse: str | None = None
        """The method of a context that returns False from now on, with a line in the log."""
        self.activation_bytes = 8 << 20
        self.contexts: list[ExecutionContext] = []
        """All that were made."""

    def get_plugin_registry(self) -> PluginRegistry:
        return self.registry

    def Runtime(self, log: ILogger) -> Runtime:  # noqa: N802
        return Runtime(self, log)

    def Refitter(self, engine: Engine, log: ILogger) -> Refitter:  # noqa: N802
        return Refitter(engine)

    def OnnxParserRefitter(self, refitter: Refitter, log: ILogger) -> OnnxParserRefitter:  # noqa: N802
        return OnnxParserRefitter(refitter, log)


class PluginRegistry:
    """Knows the plugin once its library was loaded; `broken` makes a library that has no plugins."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.broken = False

    @property
    def all_creators(self) -> list[Any]:
        known = [SimpleNamespace(name="NMS", plugin_version="2")]
        if self.loaded and not self.broken:
            known.append(SimpleNamespace(name=PAGED_ATTENTION.name, plugin_version=str(PAGED_ATTENTION.version)))
        return known

    def get_creator(self, name: str, version: str, namespace: str = "") -> Any:
        return next((one for one in self.all_creators if (one.name, one.plugin_version) == (name, version)), None)

    def load_library(self, plugin_path: str) -> object:
        if not Path(plugin_path).is_file():
            raise RuntimeError(f"cannot open {plugin_path}")
        self.loaded.append(plugin_path)
        return object()


class Runtime:
    def __init__(self, trt: FakeTensorRt, log: ILogger) -> None:
        self.trt = trt
        self.log = log

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            self.log.log(
                ILogger.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization\n (magicTag mismatch)"
            )
            return None
        engine = Engine(self.trt, plan, self.log)
        return engine if all(engine.create_plugins()) else None


class Engine:
    """ICudaEngine over a folder's graph."""

    def __init__(self, trt: FakeTensorRt, plan: dict[str, Any], log: ILogger) -> None:
        self.trt = trt
        self.log = log
        self.plan = plan
        self.name = plan["network"]
        self.folder = EngineDir.open(plan["folder"])
        graph = onnx.load(self.folder.file("model.onnx"), load_external_data=False).graph
        self.graph = graph
        self.values = {value.name: value for value in (*graph.input, *graph.output)}
        self.inputs = [value.name for value in graph.input]
        self.weights = None if plan["stripped"] else torch_backend.load_constants(self.folder, graph.initializer)
        self.num_io_tensors = len(self.values)
        self.num_optimization_profiles = len(plan["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return self.trt.activation_bytes

    def create_plugins(self) -> list[Plugin | None]:
        """A plugin object for each node, made of the fields that a plan keeps; None where the plugin refuses them."""
        nodes = [node for node in self.graph.node if node.op_type == PAGED_ATTENTION.name]
        version, host = {"plan_version": self.plan["plan_version"]}, self.trt.host
        plugins = [host.create({**_attributes(node), **version}, Phase.RUNTIME, node.name) for node in nodes]
        for line in host.messages():
            self.log.log(ILogger.ERROR, line)
        return plugins

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return _ELEMENTS[self.values[name].type.tensor_type.elem_type][0]

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(dim.dim_value or -1 for dim in self.values[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        profile = self.plan["profiles"][profile_index]
        if name not in DIMENSIONS:
            blocks, rest = profile["num_blocks"], self.get_tensor_shape(name)[1:]
            return [(blocks[bound], *rest) for bound in ("min", "opt", "max")]
        sizes = {**profile, "num_seqs + 1": {bound: size + 1 for bound, size in profile["num_seqs"].items()}}
        return [tuple(sizes[dim][bound] for dim in DIMENSIONS[name]) for bound in ("min", "opt", "max")]

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> ExecutionContext | None:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        if self.trt.refuse == "create_execution_context":
            self.log.log(
                ILogger.ERROR, "ICudaEngine: Error Code 3: API Usage Error (create_execution_context was refused)"
            )
            return None
        context = ExecutionContext(self)
        self.trt.contexts.append(context)
        return context


class Refitter:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.weights: dict[str, torch.Tensor] | None = None

    def refit_cuda_engine(self) -> bool:
        self.engine.weights = self.weights
        return self.weights is not None


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, log: ILogger) -> None:
        self.refitter = refitter
        self.log = log

    def refit_from_file(self, model_file: str) -> bool:
        engine = self.refitter.engine
        if Path(model_file) != engine.folder.file("model.onnx"):
            self.log.log(ILogger.ERROR, f"{model_file} is another model")
            return False
        self.refitter.weights = torch_backend.load_constants(engine.folder, engine.graph.initializer)
        return True


class ExecutionContext:
    """IExecutionContext. Every change of it is counted, so that a graph knows whether it is still the one that was captured."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.trt.device
        self.profile: int | None = None
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None
        self.changes = 0
        self.bindings = 0
        """How often an address was set."""
        self.flushed = False
        """Whether a run has taken up the last change, as has to be before a capture."""
        self._plugins = [plugin.clone("plugin_attach") for plugin in engine.create_plugins() if plugin]
        self._layer = 0
        # The interpreter looks operators up when it is made.
        with patch.dict(torch_backend._OPERATORS, {"qwenrt::PagedAttention": self._attention}):
            self.program = torch_backend.Program(engine.graph.node)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if self._refused("set_optimization_profile_async") or profile_index >= self.engine.num_optimization_profiles:
            return False
        self.profile = profile_index
        self._changed()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.device.at(memory, size)
        self.memory = memory, size
        self._changed()

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if self._refused("set_tensor_address") or name not in self.engine.values or memory % 256:
            return False
        self.addresses[name] = memory
        self.bindings += 1
        self._changed()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self._refused("set_input_shape"):
            return False
        assert self.profile is not None
        smallest, _, largest = self.engine.get_tensor_profile_shape(name, self.profile)
        within = len(shape) == len(largest) and all(
            low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
        )
        if not within:
            self._log(f"IExecutionContext::setInputShape: {name} {list(shape)} is outside of profile {self.profile}")
            return False
        if self.shapes.get(name) != tuple(shape):
            self.shapes[name] = tuple(shape)
            self._changed()
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self._refused("execute_async_v3"):
            return False
        engine = self.engine
        if self.memory is None or engine.weights is None:
            self._log("IExecutionContext::enqueueV3: no activation memory, or weights that were not refitted")
            return False
        if missing := [name for name in engine.values if name not in self.addresses]:
            self._log(f"IExecutionContext::enqueueV3: no address of {missing[0]}")
            return False
        if missing := [name for name in engine.inputs if name not in self.shapes]:
            self._log(f"IExecutionContext::enqueueV3: no shape of {missing[0]}")
            return False
        if self.device.capturing:
            assert self.flushed, "captured before a run has taken up the new shapes"
        self.flushed = True
        changes, captured = self.changes, self.device.capturing

        def run() -> None:
            if captured:
                assert changes == self.changes, "a graph of a context that was changed since"
            self._compute()

        self.device.queue(run, stream_handle)
        return True

    def _compute(self) -> None:
        engine = self.engine
        values = {name: self._tensor(name, self.shapes[name]) for name in engine.inputs}
        values |= engine.weights
        outputs = [name for name in engine.values if name not in engine.inputs]
        self._layer = 0
        results = self.program.run(values, outputs)
        logits = self._tensor("logits", tuple(results["logits"].shape))
        logits[:] = results["logits"]

    def _attention(self, *tensors: torch.Tensor, **attributes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The plugin of the next layer, with this context's activation memory as its workspace."""
        layer, self._layer = self._layer, self._layer + 1
        qkv = tensors[0]
        attn = torch.full((qkv.shape[0], attributes["num_heads"] * attributes["head_dim"]), math.nan, dtype=qkv.dtype)
        cache_out = self._tensor(f"kv_cache_out.{layer}", tuple(tensors[KV_CACHE].shape))
        arrays, outputs = [_array(tensor) for tensor in tensors], [_array(attn), _array(cache_out)]
        shapes, types = [array.shape for array in arrays], [TYPES[array.dtype] for array in arrays]
        _check_rules(dict(zip(INPUTS, arrays, strict=True)), attributes["block_size"])
        plugin, host = self._plugins[layer], self.engine.trt.host
        assert plugin.shape_change(shapes, types) == 0, host.messages()
        assert self.memory is not None
        workspace = self.device.at(*self.memory)
        assert plugin.workspace_size(shapes, types) <= workspace.nbytes
        assert plugin.enqueue(arrays, outputs, workspace) == 0, host.messages()
        return attn, cache_out

    def _tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """What lies at a tensor's address."""
        dtype = _ELEMENTS[self.engine.values[name].type.tensor_type.elem_type][1]
        size = math.prod(shape) * dtype.itemsize
        assert size, f"{name} is empty"
        return torch.from_numpy(self.device.at(self.addresses[name], size)).view(dtype).reshape(shape)

    def _changed(self) -> None:
        self.changes += 1
        self.flushed = False

    def _refused(self, method: str) -> bool:
        if self.engine.trt.refuse != method:
            return False
        self._log(f"IExecutionContext: Error Code 3: API Usage Error ({method} was refused)")
        return True

    def _log(self, line: str) -> None:
        self.engine.log.log(ILogger.ERROR, line)


def _check_rules(inputs: dict[str, Any], block_size: int) -> None:
    """What PagedAttention asks of its index inputs (plugins/README.md), which on a device nobody checks."""
    starts, tables, num_blocks = inputs["query_start"].tolist(), inputs["block_tables"], len(inputs["kv_cache"])
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] <= len(inputs["qkv"])
    for table, length, first, last in zip(tables, inputs["seq_lens"].tolist(), starts, starts[1:], strict=False):
        if first < last:
            assert inputs["positions"][first:last].tolist() == list(range(length - (last - first), length))
            blocks = table[: -(-length // block_size)]
            assert length <= len(table) * block_size
            assert ((blocks >= 0) & (blocks < num_blocks)).all()


def _array(tensor: torch.Tensor) -> Any:
    """The same memory as NumPy has it."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {item.name: given.get(item.name, item.default) for item in PAGED_ATTENTION.attributes}
