"""How many KV blocks an engine gets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from qwenrt.plugins import ConfigError

from .engine_dir import EngineManifest, Limits

_HOST_FRACTION = 4
_GPU_FRACTION = 0.9
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """What a caller asked for; nothing is: enough for every sequence at full length, as far as memory goes."""

    num_kv_blocks: int | None = None
    kv_memory: int | None = None
    """Bytes of the pool."""
    gpu_memory_fraction: float | None = None
    """How much of a GPU's memory may be in use when the pool is there, by all processes together; 0.9 if not given."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} given; give one of them"
            )
        for name, high in (("num_kv_blocks", _MAX_BLOCKS), ("kv_memory", 2**63 - 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= high):
                raise ConfigError(f"{name} is {value!r}, must be an integer from 1 to {high}")
        fraction = self.gpu_memory_fraction
        if fraction is not None and (type(fraction) not in (int, float) or not 0 < fraction <= 1):
            raise ConfigError(f"gpu_memory_fraction is {fraction!r}, must be above 0 and at most 1")

    def blocks_on_host(self, manifest: EngineManifest, limits: Limits) -> int:
        """Blocks of a pool in this machine's memory, of whose free part it takes a quarter unless told otherwise."""
        if self.gpu_memory_fraction is not None:
            raise ConfigError("gpu_memory_fraction is given and the engine runs on the CPU; give kv_memory instead")
        room = 0 if self.has_size else available_memory() // _HOST_FRACTION
        return self._blocks(manifest, limits, room, "a quarter of the free memory")

    def blocks_on_gpu(self, manifest: EngineManifest, limits: Limits, free: int, total: int) -> int:
        """Blocks of a pool on a GPU that has `total` bytes, of which `free` are left when all else is there.

        Each rank of an engine has its part of every block on a GPU of its own; `kv_memory` is that of all.
        """
        fraction = _GPU_FRACTION if self.gpu_memory_fraction is None else self.gpu_memory_fraction
        room = (int(fraction * total) - (total - free)) * manifest.tp
        count = self._blocks(
            manifest, limits, room, f"what a gpu_memory_fraction of {fraction} leaves, {max(room, 0)} bytes,"
        )
        needed = count * manifest.kv_bytes_per_token * manifest.block_size // manifest.tp
        if needed > free:
            raise ConfigError(
                f"a pool of {count} KV blocks takes {needed} bytes, the GPU has {free} free; lower num_kv_blocks or kv_memory"
            )
        return count

    @property
    def has_size(self) -> bool:
        """Whether the caller said how large the pool is to be."""
        return self.num_kv_blocks is not None or self.kv_memory is not None

    def _blocks(self, manifest: EngineManifest, limits: Limits, room: int, what: str) -> int:
        block_bytes = manifest.kv_bytes_per_token * manifest.block_size
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        if self.kv_memory is not None:
            if self.kv_memory < block_bytes:
                raise ConfigError(
                    f"kv_memory is {self.kv_memory} bytes, one KV block of this engine takes {block_bytes}"
                )
            return min(self.kv_memory // block_bytes, _MAX_BLOCKS)
        if room < block_bytes:
            raise ConfigError(f"{what} holds no KV block of {block_bytes} bytes; set num_kv_blocks or kv_memory")
        return min(room // block_bytes, limits.max_num_seqs * -(-limits.max_model_len // manifest.block_size))


def available_memory() -> int:
    """Bytes that can be allocated without swapping, within the control group's limit where there is one."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
