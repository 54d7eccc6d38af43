"""TensorRT's side of the plugin over ctypes: fields, descriptions of tensors, and the plugin's interfaces as a Python class."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpu_check.memory import aligned
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS, PAGED_ATTENTION

Array = npt.NDArray[Any]
Shape = Sequence[int]
INPUTS = [value.name for value in PAGED_ATTENTION.inputs]
OUTPUTS = [value.name for value in PAGED_ATTENTION.outputs]
EXPERTS_INPUTS = [value.name for value in MIXTURE_OF_EXPERTS.inputs][:4]
"""Those of a node with 16-bit matrices."""
LINEAR_FORMAT = 0


class DataType(IntEnum):
    """nvinfer1::DataType."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    FP8 = 6
    BF16 = 7
    INT64 = 8


class FieldType(IntEnum):
    """nvinfer1::PluginFieldType."""

    FLOAT32 = 1
    FLOAT64 = 2
    INT32 = 5
    CHAR = 6
    INT64 = 10


class Phase(IntEnum):
    """nvinfer1::TensorRTPhase."""

    BUILD = 0
    RUNTIME = 1


TYPES = {
    np.dtype(np.float32): DataType.FLOAT,
    np.dtype(np.float16): DataType.HALF,
    np.dtype(np.int32): DataType.INT32,
    np.dtype(ml_dtypes.bfloat16): DataType.BF16,
    np.dtype(ml_dtypes.float8_e4m3fn): DataType.FP8,
}


class Field(ctypes.Structure):
    """nvinfer1::PluginField."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class Fields(ctypes.Structure):
    """nvinfer1::PluginFieldCollection."""

    _fields_ = (("count", ctypes.c_int32), ("fields", ctypes.POINTER(Field)))


class Dims(ctypes.Structure):
    """nvinfer1::Dims."""

    _fields_ = (("rank", ctypes.c_int32), ("d", ctypes.c_int64 * 8))


class Desc(ctypes.Structure):
    """nvinfer1::PluginTensorDesc."""

    _fields_ = (("dims", Dims), ("type", ctypes.c_int32), ("format", ctypes.c_int32), ("scale", ctypes.c_float))


class DynamicDesc(ctypes.Structure):
    """nvinfer1::DynamicPluginTensorDesc."""

    _fields_ = (("desc", Desc), ("min", Dims), ("max", Dims), ("opt", Dims))


STRUCTURES = (Field, Fields, Dims, Desc, DynamicDesc)
NUMBERS = {
    FieldType.FLOAT32: ctypes.c_float,
    FieldType.FLOAT64: ctypes.c_double,
    FieldType.INT32: ctypes.c_int32,
    FieldType.CHAR: ctypes.c_char,
    FieldType.INT64: ctypes.c_int64,
}


@dataclass(frozen=True)
class FieldValue:
    """A field whose type is told, where `int` and `float` do not say it."""

    type: FieldType
    values: tuple[Any, ...]


def dims(shape: Shape) -> Dims:
    return Dims(len(shape), (ctypes.c_int64 * 8)(*shape))


def desc(shape: Shape, kind: DataType, layout: int = LINEAR_FORMAT) -> Desc:
    return Desc(dims(shape), kind, layout, 0.0)


def make_fields(values: Mapping[str, Any]) -> tuple[Fields, list[Any]]:
    """Fields of numbers, and what they point to. None is a field without data."""
    fields, kept = (Field * max(len(values), 1))(), []
    for field, (name, value) in zip(fields, values.items(), strict=False):
        if isinstance(value, float | int):
            value = FieldValue(FieldType.FLOAT32 if isinstance(value, float) else FieldType.INT32, (value,))
        field.name = name.encode()
        if value is not None:
            data = (NUMBERS[value.type] * len(value.values))(*value.values)
            kept.append(data)
            field.data, field.type, field.length = ctypes.addressof(data), value.type, len(value.values)
    return Fields(len(values), fields), kept


def read_fields(collection: Fields) -> dict[str, Any]:
    """The numbers of fields, by name."""
    read = {}
    for field in collection.fields[: collection.count]:
        assert field.length == 1
        read[field.name.decode()] = NUMBERS[FieldType(field.type)].from_address(field.data).value
    return read


class Host:
    """What stands in for TensorRT, and the plugin library loaded into it."""

    def __init__(self, host: Path, plugin: Path, version: int = 10) -> None:
        self.library = ctypes.CDLL(str(host), mode=ctypes.RTLD_GLOBAL)
        self.library.host_set_version(version)
        for name in ("host_take_messages", "creator_text", "plugin_text", "plugin_timing_id"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("creator_create", "plugin_clone", "plugin_attach", "host_logger_finder"):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("creator_fields", "plugin_serialize"):
            getattr(self.library, name).restype = ctypes.POINTER(Fields)
        self.library.plugin_workspace_size.restype = ctypes.c_size_t
        self.plugin = ctypes.CDLL(str(plugin))
        self.registered_on_load = self.num_registered

    @property
    def num_registered(self) -> int:
        return int(self.library.host_num_registered())

    def messages(self) -> list[str]:
        """The lines logged since the last call, each its severity and its text."""
        return list(self.library.host_take_messages().decode().splitlines())

    def creators(self) -> dict[str, ctypes.c_void_p]:
        """The creators that the library gives out, by the names of their ops."""
        count = ctypes.c_int32()
        self.plugin.getCreators.restype = ctypes.POINTER(ctypes.c_void_p)
        given = self.plugin.getCreators(ctypes.byref(count))
        creators = [ctypes.c_void_p(address) for address in given[: count.value]]
        return {self.library.creator_text(creator).decode().split("/")[1]: creator for creator in creators}

    def create(
        self,
        values: Mapping[str, Any],
        phase: Phase = Phase.BUILD,
        name: str = "node",
        op: str = PAGED_ATTENTION.name,
    ) -> Plugin | None:
        fields, _kept = make_fields(values)
        creator = self.creators()[op]
        made = self.library.creator_create(creator, name.encode(), ctypes.byref(fields), ctypes.c_int32(phase))
        return None if made is None else Plugin(self.library, made)


class Plugin:
    """A plugin object through its interfaces."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self.library = library
        self.address = ctypes.c_void_p(address)
        self.num_outputs = int(library.plugin_num_outputs(self.address))

    def __del__(self) -> None:
        self.library.plugin_destroy(self.address)

    def clone(self, how: str = "plugin_clone") -> Plugin:
        return Plugin(self.library, getattr(self.library, how)(self.address))

    def serialized(self) -> dict[str, Any]:
        return read_fields(self.library.plugin_serialize(self.address).contents)

    def output_types(self, inputs: Sequence[DataType], num_outputs: int | None = None) -> list[DataType] | None:
        num_outputs = num_outputs or self.num_outputs
        given, outputs = (ctypes.c_int32 * len(inputs))(*inputs), (ctypes.c_int32 * num_outputs)()
        status = self.library.plugin_output_types(self.address, outputs, num_outputs, given, len(inputs))
        return None if status else [DataType(kind) for kind in outputs]

    def output_shapes(self, inputs: Sequence[Shape]) -> list[tuple[int, ...]] | None:
        given, outputs = (Dims * len(inputs))(*map(dims, inputs)), (Dims * self.num_outputs)()
        status = self.library.plugin_output_shapes(self.address, given, len(inputs), outputs, self.num_outputs)
        return None if status else [tuple(out.d[: out.rank]) for out in outputs]

    def supports(self, position: int, types: Sequence[DataType], formats: Sequence[int] | None = None) -> bool:
        layouts = formats or [LINEAR_FORMAT] * len(types)
        descs = (DynamicDesc * len(types))(*(DynamicDesc(desc((), t, f)) for t, f in zip(types, layouts, strict=True)))
        num_inputs = len(types) - self.num_outputs
        return bool(self.library.plugin_supports(self.address, position, descs, num_inputs, self.num_outputs))

    def configure(self, shapes: Sequence[Shape], largest: Sequence[Shape], types: Sequence[DataType]) -> int:
        return int(self._dynamic("plugin_configure", shapes, largest, types))

    def workspace_size(self, largest: Sequence[Shape], types: Sequence[DataType]) -> int:
        return int(self._dynamic("plugin_workspace_size", largest, largest, types))

    def _dynamic(
        self, function: str, shapes: Sequence[Shape], largest: Sequence[Shape], types: Sequence[DataType]
    ) -> Any:
        given = (DynamicDesc * len(shapes))(
            *(
                DynamicDesc(desc(shape, kind), dims([1] * len(shape)), dims(most), dims(most))
                for shape, most, kind in zip(shapes, largest, types, strict=True)
            )
        )
        outputs = (DynamicDesc * self.num_outputs)()
        return getattr(self.library, function)(self.address, given, len(shapes), outputs, self.num_outputs)

    def shape_change(self, shapes: Sequence[Shape], types: Sequence[DataType]) -> int:
        given, outputs = (Desc * len(shapes))(*map(desc, shapes, types)), (Desc * self.num_outputs)()
        return int(self.library.plugin_shape_change(self.address, given, len(shapes), outputs, self.num_outputs))

    def enqueue(self, tensors: Sequence[Array], outputs: Sequence[Array], workspace: Array) -> int:
        descs = [(Desc * len(some))(*(desc(t.shape, TYPES[t.dtype]) for t in some)) for some in (tensors, outputs)]
        pointers = [(ctypes.c_void_p * len(some))(*(t.ctypes.data for t in some)) for some in (tensors, outputs)]
        return int(self.library.plugin_enqueue(self.address, *descs, *pointers, ctypes.c_void_p(workspace.ctypes.data)))


class PluginOp:
    """The plugin as a function of NumPy arrays with the reference's signature: all that TensorRT does for one step."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def paged_attention(self, *, in_place: bool = False, **arguments: Any) -> tuple[Array, Array]:
        """(attn, kv_cache_out); in_place: with one buffer bound to kv_cache and kv_cache_out, a copy of the argument."""
        tensors = [aligned(arguments.pop(name)) for name in INPUTS]
        qkv, pool = tensors[0], tensors[INPUTS.index("kv_cache")]
        attn = aligned(np.full((len(qkv), arguments["num_heads"] * arguments["head_dim"]), np.nan, qkv.dtype))
        pool_out = pool if in_place else aligned(np.zeros_like(pool))
        self._step(PAGED_ATTENTION.name, arguments, tensors, [attn, pool_out])
        return attn, pool_out

    def mixture_of_experts(self, **arguments: Any) -> Array:
        """y."""
        tensors = [aligned(arguments.pop(name)) for name in EXPERTS_INPUTS]
        y = aligned(np.full_like(tensors[0], np.nan))
        self._step(MIXTURE_OF_EXPERTS.name, arguments, tensors, [y])
        return y

    def _step(self, op: str, attributes: Mapping[str, Any], tensors: Sequence[Array], outputs: Sequence[Array]) -> None:
        plugin = self.host.create(attributes, op=op)
        assert plugin is not None, self.host.messages()
        shapes, types = [t.shape for t in tensors], [TYPES[t.dtype] for t in tensors]
        assert plugin.configure(shapes, shapes, types) == 0, self.host.messages()
        workspace = aligned(np.full(plugin.workspace_size(shapes, types), 0xFF, np.uint8))
        attached = plugin.clone("plugin_attach")
        assert attached.shape_change(shapes, types) == 0, self.host.messages()
        assert attached.enqueue(tensors, outputs, workspace) == 0, self.host.messages()
