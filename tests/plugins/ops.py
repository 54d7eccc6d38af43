"""Calls of the ops: random ones as a runtime makes them, and the implementations to call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper

from qwenrt.plugins import reference
from qwenrt.plugins.library import cpu_library
from qwenrt.plugins.schema import DOMAIN, OPS

Array = npt.NDArray[Any]
ONNX_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
}


@dataclass
class Call:
    """One PagedAttention: tensors in the order of the spec, and attributes."""

    tensors: dict[str, Array]
    attributes: dict[str, Any]

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]

    def but(self, **tensors: Array) -> Call:
        return replace(self, tensors=self.tensors | tensors)

    def with_attributes(self, **attributes: Any) -> Call:
        return replace(self, attributes=self.attributes | attributes)


@dataclass
class Sizes:
    """What `make_call` makes."""

    new: Sequence[int] = (1,)
    old: Sequence[int] = (0,)
    """Per sequence: tokens of this step, and tokens that are in the cache already."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 4
    kv_type: npt.DTypeLike = np.float32
    norm: bool = True
    sliding_window: int = -1
    padding: int = 0
    spare_blocks: int = 3
    scale: float | None = None
    seed: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)


def make_call(sizes: Sizes) -> Call:
    """A step in a pool whose blocks are handed out at random, with NaN wherever nothing must be read."""
    rng = np.random.default_rng(sizes.seed)
    lens = [old + new for old, new in zip(sizes.old, sizes.new, strict=True)]
    heads, kv_heads, dim, block = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.block_size
    needed = [-(-length // block) for length in lens]
    num_blocks = sum(needed) + sizes.spare_blocks
    blocks = rng.permutation(num_blocks)
    tables = rng.choice(np.array([-1, num_blocks, 2**31 - 1, -(2**31)]), (len(lens), max(needed, default=0) + 2))
    cache = reference.kv_rows(np.full((num_blocks, 2, kv_heads, block, dim), np.nan), sizes.kv_type)
    at = 0
    for s, count in enumerate(needed):
        tables[s, :count] = blocks[at : at + count]
        at += count
        for position in range(sizes.old[s]):
            slot = cache[tables[s, position // block], :, :, position % block]
            slot[:] = reference.kv_rows(rng.standard_normal((2, kv_heads, dim)), sizes.kv_type)
    positions = [np.arange(old, old + new) for old, new in zip(sizes.old, sizes.new, strict=True)]
    tokens = sum(sizes.new) + sizes.padding
    angles = np.outer(np.arange(max(lens, default=0) + 3), 1e4 ** (-np.arange(dim // 2) / (dim // 2)))
    qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim), np.float32)
    qkv[tokens - sizes.padding :] = np.nan
    norms = 1 + 0.3 * rng.standard_normal((2, dim), np.float32)
    tensors = {
        "qkv": qkv,
        "q_norm": norms[0] if sizes.norm else np.zeros(0, np.float32),
        "k_norm": norms[1] if sizes.norm else np.zeros(0, np.float32),
        "rope": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
        "positions": np.concatenate([*positions, np.full(sizes.padding, -7)]).astype(np.int32),
        "kv_cache": cache,
        "block_tables": tables.astype(np.int32),
        "seq_lens": np.array(lens, np.int32),
        "query_start": np.concatenate([[0], np.cumsum(sizes.new)]).astype(np.int32),
    }
    attributes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "block_size": block,
        "scale": dim**-0.5 if sizes.scale is None else sizes.scale,
        "norm_eps": 1e-6,
        "sliding_window": sizes.sliding_window,
    }
    return Call(tensors, attributes | sizes.attributes)


Implementation = Callable[[Call], tuple[Array, Array]]
"""Functional: (attn, kv_cache_out), and the inputs stay as they are."""


def by_reference(call: Call) -> tuple[Array, Array]:
    return reference.paged_attention(**call.tensors, **call.attributes)


@functools.cache
def session(op: str, types: tuple[int, ...], attributes: tuple[tuple[str, Any], ...]) -> ort.InferenceSession:
    """A model of one node; type 0: an optional input that is left out."""
    spec = next(spec for spec in OPS if spec.name == op)
    inputs = list(zip(spec.inputs, types, strict=False))
    out_types = {"F": TensorProto.FLOAT} | {value.type: type_ for value, type_ in inputs if type_}
    node = helper.make_node(
        op,
        [v.name if type_ else "" for v, type_ in inputs],
        [v.name for v in spec.outputs],
        domain=DOMAIN,
        **dict(attributes),
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(v.name, type_, None) for v, type_ in inputs if type_],
        [helper.make_tensor_value_info(v.name, out_types[v.type], None) for v in spec.outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, spec.version)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _value(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[array.dtype])


def by_onnxruntime(call: Call) -> tuple[Array, Array]:
    """The node in ONNX Runtime with nothing bound to its outputs."""
    types = tuple(ONNX_TYPES[tensor.dtype] for tensor in call.tensors.values())
    node = session("PagedAttention", types, tuple(call.attributes.items()))
    attn, cache = node.run(None, call.tensors)
    return attn, cache


def by_onnxruntime_in_place(call: Call) -> tuple[Array, Array]:
    """The node in ONNX Runtime with one buffer bound to kv_cache and kv_cache_out."""
    cache = call["kv_cache"].copy()
    types = tuple(ONNX_TYPES[tensor.dtype] for tensor in call.tensors.values())
    node = session("PagedAttention", types, tuple(call.attributes.items()))
    binding = node.io_binding()
    pool = ort.OrtValue.ortvalue_from_numpy(cache)
    values = {name: ort.OrtValue.ortvalue_from_numpy(tensor) for name, tensor in call.tensors.items()} | {
        "kv_cache": pool
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    attn = np.empty((len(call["qkv"]), call.attributes["num_heads"] * call.attributes["head_dim"]), np.float32)
    binding.bind_ortvalue_output("kv_cache_out", pool)
    binding.bind_ortvalue_output("attn", out := ort.OrtValue.ortvalue_from_numpy(attn))
    node.run_with_iobinding(binding)
    # What numpy() returns may be memory of the value.
    return out.numpy().copy(), pool.numpy().copy()


def by_torch(call: Call) -> tuple[Array, Array]:
    import torch

    from qwenrt.plugins import torch_op

    tensors = [torch.from_numpy(tensor) for tensor in call.tensors.values()]
    attn, cache = torch_op.paged_attention(*tensors, *call.attributes.values())
    return attn.numpy(), cache.numpy()


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(cpu_library()))
    loaded.qwenrt_isa.restype = ctypes.c_char_p
    return loaded


def isas() -> list[str]:
    """The instruction sets that this machine runs."""
    names = [name for name in ("portable", "avx2", "avx512", "amx") if library().qwenrt_set_isa(name.encode()) == 0]
    library().qwenrt_set_isa(None)
    return names


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    assert library().qwenrt_set_isa(name.encode()) == 0
    try:
        yield
    finally:
        library().qwenrt_set_isa(None)


def run_in_place(call: Call, cache: Array, threads: int = 1) -> Array:
    """The compiled op by its C entry point, on `cache`; returns attn. Raises ValueError with the op's message."""
    attn = np.empty((len(call["qkv"]), call.attributes["num_heads"] * call.attributes["head_dim"]), np.float32)

    class Arguments(ctypes.Structure):
        _fields_ = (
            [(name, ctypes.c_void_p) for name in (*call.tensors, "attn", "kv_cache_out")]
            + [(n, ctypes.c_int64) for n in ("num_tokens", "max_positions", "num_blocks", "num_seqs", "max_blocks")]
            + [(n, ctypes.c_int64) for n in ("num_heads", "num_kv_heads", "head_dim", "block_size", "sliding_window")]
            + [("scale", ctypes.c_float), ("norm_eps", ctypes.c_float), ("kv_type", ctypes.c_int32)]
        )

    inputs = {name: tensor.ctypes.data if tensor.size else None for name, tensor in call.tensors.items()}
    arguments = Arguments(
        **inputs | {"kv_cache": cache.ctypes.data},
        attn=attn.ctypes.data,
        kv_cache_out=cache.ctypes.data,
        num_tokens=len(call["qkv"]),
        max_positions=len(call["rope"]),
        num_blocks=len(cache),
        num_seqs=len(call["seq_lens"]),
        max_blocks=call["block_tables"].shape[1],
        kv_type=ONNX_TYPES[cache.dtype],
        **call.attributes,
    )
    error = ctypes.create_string_buffer(500)
    if library().qwenrt_paged_attention(ctypes.byref(arguments), threads, error, ctypes.c_size_t(len(error))):
        raise ValueError(error.value.decode())
    return attn


def by_c(call: Call, threads: int = 1) -> tuple[Array, Array]:
    cache = call["kv_cache"].copy()
    return run_in_place(call, cache, threads), cache


def run_node(op: str, inputs: Sequence[Array | None], **attributes: Any) -> Array:
    """A node of one output in ONNX Runtime; None: an optional input that is left out."""
    spec = next(spec for spec in OPS if spec.name == op)
    types = tuple(0 if array is None else ONNX_TYPES[array.dtype] for array in inputs)
    node = session(op, types, tuple(attributes.items()))
    binding = node.io_binding()
    for value, array in zip(spec.inputs, inputs, strict=False):
        if array is None:
            continue
        if array.dtype == ml_dtypes.bfloat16:
            bound = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        else:
            bound = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(value.name, bound)
    binding.bind_output("y")
    node.run_with_iobinding(binding)
    y: Array = binding.get_outputs()[0].numpy()
    return y


def run_linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Linear with a float weight, as a node in ONNX Runtime."""
    return run_node("Linear", (x, weight) if bias is None else (x, weight, bias))
