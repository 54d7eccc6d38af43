"""LoRA adapters of a running engine: loaded once, resident in a few slots, named by requests."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from qwenrt.plugins import ConfigError, RequestError

from .engine_dir import EngineManifest, ModelSpec
from .lora import MERGED, Floats, LoraAdapter

INDICES = "lora_indices"
"""The graph's input with each token's slot."""
_A, _B = "lora_a.", "lora_b."


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request is answered with: a name to call it by, and the folder that PEFT saved it in."""

    name: str
    path: str | os.PathLike[str]


class LoraStacks:
    """A and B of every slot, for each module of the graph that takes adapters; `arrays` has them by the graph's input names.

    Slots are zero at first: an adapter that does nothing.
    """

    def __init__(self, spec: ModelSpec, inputs: Mapping[str, tuple[int, int]], num_slots: int) -> None:
        """inputs: the last two dimensions of the graph's inputs, by name; those of adapters are taken."""
        self.num_slots = num_slots
        self._spec = spec
        self._modules = [name.removeprefix(_A) for name in inputs if name.startswith(_A)]
        self.arrays: dict[str, Floats] = {
            name: np.zeros((num_slots, *shape), np.float32)
            for name, shape in inputs.items()
            if name.startswith((_A, _B))
        }
        self.shapes = {
            f"{name}.weight": (width, self.arrays[_A + module].shape[2])
            for module in self._modules
            for name, width in self._parts(module)
        }
        """The matrices that an adapter may change."""

    def set(self, slot: int, adapter: LoraAdapter) -> None:
        """Put an adapter, which fits `shapes`, into a slot."""
        for module in self._modules:
            a, b = self.arrays[_A + module][slot], self.arrays[_B + module][slot]
            a[:], b[:] = 0, 0
            parts = self._parts(module)
            rank, row = len(a) // len(parts), 0
            for index, (name, width) in enumerate(parts):
                pair = adapter.pairs.get(f"{name}.weight")
                if pair is not None:
                    own = slice(index * rank, index * rank + pair.rank)
                    a[own], b[own, row : row + width] = pair.a, pair.b.T
                row += width

    def _parts(self, module: str) -> list[tuple[str, int]]:
        """The projections that a module of the graph is made of, with their output widths."""
        prefix, kind = module.rsplit(".", 1)
        spec = self._spec
        widths = {
            "q_proj": spec.num_heads * spec.head_dim,
            "k_proj": spec.num_kv_heads * spec.head_dim,
            "v_proj": spec.num_kv_heads * spec.head_dim,
            "gate_proj": spec.intermediate_size,
            "up_proj": spec.intermediate_size,
        }
        return [(f"{prefix}.{part}", widths.get(part, spec.hidden_size)) for part in MERGED[kind]]


class AdapterSlots:
    """Which adapter is in which slot. An adapter stays until its slot is wanted; the one that was idle longest goes first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._slot_of: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._to_load: list[tuple[int, LoraAdapter]] = []

    def has_room_for(self, adapter: LoraAdapter) -> bool:
        """Whether `acquire` would find a slot."""
        return adapter.digest in self._slot_of or bool(self._free or self._idle)

    def acquire(self, adapter: LoraAdapter) -> int:
        """The slot of an adapter for one more user, who releases it."""
        key = adapter.digest
        if key not in self._slot_of:
            if self._free:
                slot = self._free.pop(0)
            else:
                evicted, _ = self._idle.popitem(last=False)
                slot = self._slot_of.pop(evicted)
            self._slot_of[key] = slot
            self._to_load.append((slot, adapter))
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1
        return self._slot_of[key]

    def release(self, adapter: LoraAdapter) -> None:
        """Let go of an adapter."""
        key = adapter.digest
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._idle[key] = None

    def load(self, put: Callable[[int, LoraAdapter], None]) -> None:
        """Call `put` for the slots that have got an adapter since the last call; again next time for one where it raises."""
        while self._to_load:
            put(*self._to_load[0])
            del self._to_load[0]


class AdapterRegistry:
    """Adapters that requests have named, in memory for good. Safe to use from any thread."""

    def __init__(self, manifest: EngineManifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: the matrices that adapters may change; none if the engine takes no adapters."""
        self._max_rank = manifest.max_lora_rank
        self._shapes = shapes
        self._loaded: dict[tuple[str, str], LoraAdapter] = {}
        self._lock = threading.Lock()

    def get(self, request: LoRARequest) -> LoraAdapter:
        """The adapter that a request names; raises RequestError if the engine takes none, or not this one."""
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request is a {type(request).__name__}; it must be a LoRARequest")
        if not self._shapes:
            raise RequestError(
                "this engine takes no adapters; export it again with --max-lora-rank, or merge one with --lora"
            )
        key = (request.name, os.fspath(request.path))
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._load(request)
            return self._loaded[key]

    def _load(self, request: LoRARequest) -> LoraAdapter:
        try:
            adapter = LoraAdapter.from_dir(request.path)
            adapter.check(self._shapes)
        except ConfigError as error:
            raise RequestError(f"adapter {request.name!r}: {error}") from None
        if adapter.rank > self._max_rank:
            raise RequestError(
                f"adapter {request.name!r} has rank {adapter.rank}, this engine takes {self._max_rank} at most; export it again "
                "with a higher --max-lora-rank"
            )
        return adapter
