"""ONNX Runtime on the CPU, with PagedAttention from the compiled custom-op library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from qwenrt.plugins import ConfigError
from qwenrt.plugins.library import cpu_library

from ..adapters import LoraStacks
from ..engine_dir import EngineDir, EngineManifest, Limits
from ..kv_budget import KvBudget, available_memory
from ..model_runner import StepInputs
from .host_memory import read_safetensors, zeros

_KV_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
_MEMORY_SHARE = 2
"""Weights that take more than this part of the free memory stay in the mapped file, which Linux can drop and read again, and a
pool takes memory as it is used."""
_ONNX_TYPES = {"F32": 1, "U8": 2, "I8": 3, "F16": 10, "BF16": 16}
"""TensorProto.DataType of the element types of a safetensors file."""
_INDEX_INPUTS = [field.name for field in dataclasses.fields(StepInputs)]


class OnnxRuntimeBackend:
    """One session whose KV inputs and outputs are bound to the same memory, so that the cache is written in place."""

    def __init__(
        self, engine: EngineDir, *, limits: Limits, budget: KvBudget, threads: int, max_loras: int = 1
    ) -> None:
        manifest = engine.manifest
        if manifest.dtype != "float32":
            raise ConfigError(
                f"backend onnxruntime computes in float32, {engine.path} is an engine in {manifest.dtype} for {manifest.target}; "
                "export it again with --target onnxruntime"
            )
        if manifest.kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_dtype is {manifest.kv_dtype}, ONNX Runtime on CPU takes: {', '.join(_KV_DTYPES)}")
        num_kv_blocks = self.num_kv_blocks = budget.blocks_on_host(manifest, limits)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # What goes wrong is in the exceptions; its log would say it a second time.
        options.log_severity_level = 4
        options.register_custom_ops_library(str(cpu_library()))
        graph, weights = str(engine.file("model.onnx")), engine.file("model.safetensors")
        if weights.stat().st_size <= available_memory() // _MEMORY_SHARE:
            # ONNX Runtime would map the file, which has no huge pages. It keeps no reference to what it is given.
            self._weights = _initializers(weights, threads)
            for name, value in self._weights.items():
                options.add_initializer(name, value)
        try:
            self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no narrower base.
            raise ConfigError(f"ONNX Runtime cannot load {engine.path}: {error}") from error
        _check_graph(self._session, manifest)
        self._binding = self._session.io_binding()
        model = manifest.model
        shape = (num_kv_blocks, 2, model.num_kv_heads, manifest.block_size, manifest.kv_row)
        try:
            # Who says how large the pool is gets its memory now, if there is plenty; a default one takes what is used.
            size = num_kv_blocks * manifest.block_size * manifest.kv_bytes_per_token
            now = budget.has_size and size <= available_memory() // _MEMORY_SHARE
            self._kv_caches = [
                zeros(shape, _KV_DTYPES[manifest.kv_dtype], populate=now) for _ in range(model.num_layers)
            ]
        except MemoryError:
            raise ConfigError(
                f"{num_kv_blocks} KV blocks take {size / 1e9:.1f} GB, which this machine cannot give; lower num_kv_blocks or "
                "kv_memory"
            ) from None
        for layer, cache in enumerate(self._kv_caches):
            for name, bind in (
                (f"kv_cache.{layer}", self._binding.bind_input),
                (f"kv_cache_out.{layer}", self._binding.bind_output),
            ):
                bind(name, "cpu", 0, cache.dtype.type, cache.shape, cache.ctypes.data)
        self.lora = self._make_stacks(manifest, max_loras) if manifest.max_lora_rank else None
        self._no_adapters = np.full(limits.max_num_batched_tokens, -1, np.int32)
        self._logits = np.empty((0, manifest.num_logits), np.float32)
        self._places: dict[str, tuple[tuple[int, ...], int]] = {}
        """Shape and address that each index input and the logits are bound to."""

    def _make_stacks(self, manifest: EngineManifest, num_slots: int) -> LoraStacks:
        """Slots for adapters, bound to the graph."""
        shapes = {value.name: tuple(value.shape[1:]) for value in self._session.get_inputs() if len(value.shape) == 3}
        stacks = LoraStacks(manifest.model, shapes, num_slots)
        for name, array in stacks.arrays.items():
            self._binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        return stacks

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call."""
        if self.lora is not None and inputs.lora_indices is None:
            inputs = dataclasses.replace(inputs, lora_indices=self._no_adapters[: len(inputs.input_ids)])
        for name in _INDEX_INPUTS:
            array = getattr(inputs, name)
            if array is None:
                continue
            place = (array.shape, array.__array_interface__["data"][0])
            if self._places.get(name) != place:
                self._binding.bind_input(name, "cpu", 0, np.int32, *place)
                self._places[name] = place
        rows = inputs.logits_indices.shape[0]
        if rows > self._logits.shape[0]:
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        logits = self._logits[:rows]
        place = (logits.shape, logits.__array_interface__["data"][0])
        if self._places.get("logits") != place:
            self._binding.bind_output("logits", "cpu", 0, np.float32, *place)
            self._places["logits"] = place
        self._session.run_with_iobinding(self._binding)
        return logits

    def read_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, kv_row]."""
        return self._kv_caches[layer][blocks]

    def write_kv_blocks(self, layer: int, blocks: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""
        self._kv_caches[layer][blocks] = values


def _initializers(weights: Path, threads: int) -> dict[str, ort.OrtValue]:
    """The tensors of the file in memory, for ONNX Runtime to use where they lie."""
    return {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(values, _ONNX_TYPES[dtype])
        for name, (dtype, values) in read_safetensors(weights, threads=threads).items()
    }


def _check_graph(session: ort.InferenceSession, manifest: EngineManifest) -> None:
    """Raise ConfigError unless the graph's caches and logits are those that the manifest describes."""
    model = manifest.model
    kind = {"float32": "tensor(float)", "float16": "tensor(float16)", "int8": "tensor(int8)"}[manifest.kv_dtype]
    cache = (kind, ["num_blocks", 2, model.num_kv_heads, manifest.block_size, manifest.kv_row])
    expected = {f"kv_cache.{layer}": cache for layer in range(model.num_layers)}
    expected["logits"] = ("tensor(float)", ["R", manifest.num_logits])
    found = {value.name: (value.type, value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    found = {name: value for name, value in found.items() if name.startswith("kv_cache.") or name == "logits"}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ConfigError(
                f"model.onnx has {name} as {found.get(name)}, engine.json as {expected.get(name)}; export the engine again"
            )
