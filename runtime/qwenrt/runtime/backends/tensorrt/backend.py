"""TensorRtBackend: steps of an engine folder on an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.plugins.library import tensorrt_library
from qwenrt.plugins.tensorrt_module import import_tensorrt

from ...adapters import LoraStacks
from ...engine_dir import EngineDir, EngineManifest, Limits
from ...kv_budget import KvBudget
from ...model_runner import IndexArray, StepInputs
from ...plan import Plan
from .. import KV_DTYPES
from .decode_graphs import DecodeGraphs
from .device import Device, give_back
from .execution import Execution, Shape
from .plan_loader import DECODE, PREFILL, LoadedPlan, load_plan
from .step_buffers import StepBuffers, StepSizes, padding_only


class TensorRtBackend:
    """A plan, its contexts, and on the device a KV pool and buffers at addresses that are bound once.

    All work goes to one stream, and `execute` ends by waiting for it. What was allocated is given back when the backend is
    collected.
    """

    lora: LoraStacks | None = None
    """Adapters are merged at export."""

    def __init__(
        self, loaded: LoadedPlan, manifest: EngineManifest, limits: Limits, budget: KvBudget, device: Device
    ) -> None:
        """Raises ConfigError if the plan cannot take steps of `limits` or the pool does not fit; DeviceError if the GPU fails."""
        spec = manifest.model
        self._loaded = loaded
        self._device = device
        self._max_blocks = -(-limits.max_model_len // manifest.block_size)
        self._largest = StepSizes(
            limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_num_seqs, self._max_blocks
        )
        _check_limits(loaded.plan, self._largest)
        with ExitStack() as resources:
            self._stream = device.create_stream()
            give_back(resources, device.destroy_stream, self._stream)
            self._buffers = StepBuffers(device, self._largest, resources)
            logits_bytes = limits.max_num_seqs * manifest.num_logits * 4
            logits_host = device.allocate_pinned(logits_bytes)
            give_back(resources, device.free_pinned, logits_host)
            self._logits = logits_host.view(np.float32).reshape(-1, manifest.num_logits)
            self._logits_address = _allocate(device, logits_bytes, resources)
            memory_bytes = max(loaded.engine.device_memory_size_v2, 1)
            memory = _allocate(device, memory_bytes, resources), memory_bytes
            self._prefill = Execution(loaded, PREFILL, memory, self._stream)
            self._decode = DecodeGraphs(loaded, memory, self._stream, limits.max_num_seqs, self._max_blocks)
            # Everything but the pool is there now, so what is free is what it can have.
            self.num_kv_blocks = _num_kv_blocks(loaded.plan, manifest, limits, budget, device)
            self._cache_shape = (self.num_kv_blocks, 2, spec.num_kv_heads, manifest.block_size, spec.head_dim)
            self._cache_dtype = np.dtype(KV_DTYPES[manifest.kv_dtype])
            cache_bytes = math.prod(self._cache_shape) * self._cache_dtype.itemsize
            self._caches = [_allocate(device, cache_bytes, resources) for _ in range(spec.num_layers)]
            self._bind(resources)
            weakref.finalize(self, _release, device, resources.pop_all())

    @classmethod
    def load(cls, engine: EngineDir, *, device_index: int, limits: Limits, budget: KvBudget) -> TensorRtBackend:
        """The backend of an engine folder, on GPU number `device_index`."""
        if engine.manifest.target == "onnxruntime":
            raise ConfigError(
                f"backend tensorrt runs engines of target tensorrt or tensorrt-rtx, {engine.path} was exported for onnxruntime"
            )
        plugin_library = tensorrt_library()
        trt = import_tensorrt(engine.manifest.target)
        from .cuda import CudaDevice

        device = CudaDevice(device_index)
        return cls(load_plan(engine, trt, device, plugin_library), engine.manifest, limits, budget, device)

    def _bind(self, resources: ExitStack) -> None:
        """Bind every address once, and run each context on padding: what TensorRT does late it does now."""
        addresses = {**self._buffers.addresses, "logits": self._logits_address}
        shapes: dict[str, Shape] = {}
        for layer, cache in enumerate(self._caches):
            # One address for both is what makes the update happen in place.
            addresses[f"kv_cache.{layer}"] = addresses[f"kv_cache_out.{layer}"] = cache
            shapes[f"kv_cache.{layer}"] = self._cache_shape
        self._prefill.bind(addresses, {**shapes, **self._largest.shapes})
        self._buffers.upload(padding_only(), self._largest, self._stream)
        self._prefill.enqueue()
        self._device.synchronize(self._stream)
        self._decode.capture(self._device, addresses, shapes, resources)

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run the graph once; returns logits [R, vocab], valid until the next call.

        Raises ConfigError, before anything is queued, if the step is beyond the limits; DeviceError if CUDA or TensorRT fails.
        """
        self._check_step(inputs)
        self._device.use()
        most = self._largest.num_logits
        if len(inputs.logits_indices) <= most:
            return self._run(inputs)
        # Many drafts at once. A step that is repeated writes what it has written, so each run can give other rows.
        parts = [inputs.logits_indices[row : row + most] for row in range(0, len(inputs.logits_indices), most)]
        return np.concatenate([self._run(dataclasses.replace(inputs, logits_indices=part)).copy() for part in parts])

    def _run(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        num_tokens, num_seqs, num_logits = len(inputs.input_ids), len(inputs.seq_lens), len(inputs.logits_indices)
        if num_tokens == num_seqs:
            sizes = self._decode.sizes_for(num_seqs)
            self._buffers.upload(inputs, sizes, self._stream)
            self._decode.run(self._device, sizes)
        else:
            sizes = StepSizes(num_tokens, num_seqs, max(num_logits, 1), inputs.block_tables.shape[1])
            self._buffers.upload(inputs, sizes, self._stream)
            self._prefill.set_shapes(sizes.shapes)
            self._prefill.enqueue()
        logits = self._logits[:num_logits]
        self._device.download(logits, self._logits_address, self._stream)
        self._device.synchronize(self._stream)
        return logits

    def read_kv_blocks(self, layer: int, blocks: IndexArray) -> npt.NDArray[Any]:
        """A copy of blocks of a layer's pool, [len(blocks), 2, num_kv_heads, block_size, head_dim], in the pool's type."""
        values = np.empty((len(blocks), *self._cache_shape[1:]), self._cache_dtype)
        self._device.use()
        for index, value in enumerate(values):
            self._device.download(value, self._block_address(layer, blocks[index]), self._stream)
        self._device.synchronize(self._stream)
        return values

    def write_kv_blocks(self, layer: int, blocks: IndexArray, values: npt.NDArray[Any]) -> None:
        """Overwrite blocks of a layer's pool."""
        source = np.ascontiguousarray(values, self._cache_dtype)
        self._device.use()
        for index, value in enumerate(source):
            self._device.upload(self._block_address(layer, blocks[index]), value, self._stream)
        self._device.synchronize(self._stream)

    def _block_address(self, layer: int, block: int) -> int:
        assert 0 <= block < self.num_kv_blocks, block
        block_bytes = math.prod(self._cache_shape[1:]) * self._cache_dtype.itemsize
        return self._caches[layer] + int(block) * block_bytes

    def _check_step(self, inputs: StepInputs) -> None:
        sizes = {
            "num_tokens": len(inputs.input_ids),
            "num_seqs": len(inputs.seq_lens),
            "max_blocks": inputs.block_tables.shape[1],
        }
        for name, size in sizes.items():
            most = getattr(self._largest, name)
            if not 1 <= size <= most:
                raise ConfigError(f"a step has {name} {size}, this engine takes 1 to {most}")


def _check_limits(plan: Plan, largest: StepSizes) -> None:
    for profile in plan.profiles:
        tokens = largest.num_seqs if profile is plan.profiles[DECODE] else largest.num_tokens
        for name, size in largest._replace(num_tokens=tokens)._asdict().items():
            most = getattr(profile, name).max
            if size > most:
                raise ConfigError(
                    f"profile {profile.name} of plan {plan.file} takes a {name} of at most {most}, the limits need {size}; lower "
                    "max_num_seqs, max_num_batched_tokens or max_model_len"
                )


def _num_kv_blocks(plan: Plan, manifest: EngineManifest, limits: Limits, budget: KvBudget, device: Device) -> int:
    count = budget.blocks_on_gpu(manifest, limits, *device.memory_info())
    most = min(profile.num_blocks.max for profile in plan.profiles)
    if budget.num_kv_blocks is not None and count > most:
        raise ConfigError(f"num_kv_blocks is {count}, plan {plan.file} takes at most {most}")
    return min(count, most)


def _allocate(device: Device, size: int, resources: ExitStack) -> int:
    address = device.allocate(size)
    give_back(resources, device.free, address)
    return address


def _release(device: Device, resources: ExitStack) -> None:
    with contextlib.suppress(DeviceError):
        device.use()
    resources.close()
