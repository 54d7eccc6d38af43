"""Engines with one fault in them: folders whose files were changed and sealed anew, and ops that do one thing wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from qwenrt.exporter.engine_writer import EngineDirWriter
from qwenrt.plugins import reference
from qwenrt.runtime import EngineDir
from qwenrt.runtime.engine_dir import MANIFEST_NAME

Array = npt.NDArray[Any]
Op = Callable[..., tuple[Array, Array]]


def doctored(engine: Path, out: Path, change: Callable[[dict[str, Array]], None]) -> Path:
    """A copy of an engine folder after `change` was made, in place, to the float32 tensors of its weight file."""
    manifest = EngineDir.open(engine).manifest
    shutil.copytree(engine, out)
    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    views = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            count = int(np.prod(entry["shape"]))
            views[name] = np.frombuffer(content, np.float32, count, start + entry["data_offsets"][0]).reshape(
                entry["shape"]
            )
    change(views)
    weights.write_bytes(content)
    (out / MANIFEST_NAME).unlink()
    EngineDirWriter(out).seal(manifest)
    return out


def rescaled(checkpoint: Path, out: Path, factors: dict[str, float]) -> Path:
    """A copy of a checkpoint with some of its tensors multiplied."""
    shutil.copytree(checkpoint, out)
    tensors = load_file(out / "model.safetensors")
    for name, factor in factors.items():
        tensors[name] = (tensors[name] * factor).astype(tensors[name].dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def only_in(layer: int, engine: Path, faulty: Op) -> Op:
    """An op that is faulty in one layer, which it knows by the layer's q_norm, and the reference in the others."""
    own = load_file(engine / "model.safetensors")[f"model.layers.{layer}.self_attn.q_norm.weight"]
    right = reference.paged_attention

    def op(qkv: Array, q_norm: Array, *tensors: Array, **attributes: Any) -> tuple[Array, Array]:
        return (faulty if np.array_equal(q_norm, own) else right)(qkv, q_norm, *tensors, **attributes)

    return op


def one_slot_further(right: Op) -> Op:
    """Attends as it should and leaves every K and V one slot further in its block."""

    def op(
        qkv: Array, q_norm: Array, k_norm: Array, rope: Array, positions: Array, kv_cache: Array, block_tables: Array,
        seq_lens: Array, query_start: Array, **attributes: Any,
    ) -> tuple[Array, Array]:  # fmt: skip
        size = attributes["block_size"]
        attn, good = right(
            qkv, q_norm, k_norm, rope, positions, kv_cache, block_tables, seq_lens, query_start, **attributes
        )
        cache = kv_cache.copy()
        for s in range(len(seq_lens)):
            for position in positions[query_start[s] : query_start[s + 1]]:
                block, slot = block_tables[s, position // size], position % size
                cache[block, :, :, (slot + 1) % size] = good[block, :, :, slot]
        return attn, cache

    return op


def next_head_group(right: Op) -> Op:
    """Query head h attends over the K and V that belong to query head h + 1."""

    def op(qkv: Array, *tensors: Array, **attributes: Any) -> tuple[Array, Array]:
        heads, dim = attributes["num_heads"], attributes["head_dim"]
        moved = qkv.copy()
        moved[:, : heads * dim] = np.roll(qkv[:, : heads * dim].reshape(-1, heads, dim), 1, 1).reshape(len(qkv), -1)
        attn, cache = right(moved, *tensors, **attributes)
        return np.roll(attn.reshape(-1, heads, dim), -1, 1).reshape(len(qkv), -1), cache

    return op
