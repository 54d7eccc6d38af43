"""How many KV blocks an engine gets."""

from __future__ import annotations

from pathlib import Path

from qwenrt.plugins import ConfigError

from .engine_dir import EngineManifest, Limits


def choose_num_kv_blocks(
    manifest: EngineManifest, limits: Limits, num_kv_blocks: int | None, kv_memory: int | None
) -> int:
    """Blocks to allocate: as given, or what `kv_memory` bytes hold, or enough for every sequence at full length.

    The last is bounded by a quarter of the memory that is free now. Raises ConfigError when not even one block fits.
    """
    block_bytes = manifest.kv_bytes_per_token * manifest.block_size
    if num_kv_blocks is not None:
        if kv_memory is not None:
            raise ConfigError("num_kv_blocks and kv_memory are both given; give one of them")
        if not 1 <= num_kv_blocks < 2**31:
            raise ConfigError(f"num_kv_blocks is {num_kv_blocks}, must be 1 to 2147483647")
        return num_kv_blocks
    if kv_memory is not None:
        if kv_memory < block_bytes:
            raise ConfigError(f"kv_memory is {kv_memory} bytes, one KV block of this engine takes {block_bytes}")
        return min(kv_memory // block_bytes, 2**31 - 1)
    wanted = limits.max_num_seqs * -(-limits.max_model_len // manifest.block_size)
    affordable = _available_memory() // 4 // block_bytes
    if affordable < 1:
        raise ConfigError(
            f"a quarter of the free memory holds no KV block of {block_bytes} bytes; set num_kv_blocks or kv_memory"
        )
    return min(wanted, affordable)


def _available_memory() -> int:
    """Bytes that can be allocated without swapping, within the control group's limit where there is one."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
