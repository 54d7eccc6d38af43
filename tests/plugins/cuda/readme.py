"""The table of plugins/cuda/README.md that says what each kernel takes of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simt.build import KERNELS

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
_POOLS = {"16 bits": "float16", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Kernel:
    """A row: one instance of a kernel, or all of them where the pool is "any"; registers and blocks for each architecture."""

    name: str
    pool: str
    head_dim: int
    threads: int
    shared: int
    registers: tuple[int, ...]
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}, {self.pool}, {self.head_dim}"


def kernels() -> list[Kernel]:
    """Every row."""
    _, _, section = (
        (KERNELS / "README.md").read_text(encoding="utf-8").partition("## Registers, shared memory, occupancy")
    )
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    found = []
    for line in lines[1:]:
        name, instance, threads, shared, registers, blocks = (cell.strip() for cell in line.strip("|").split("|"))
        pool, _, head_dim = instance.partition(", ")
        found.append(
            Kernel(
                name,
                _POOLS.get(pool, pool),
                int(head_dim or 0),
                int(threads.split()[-1]),
                int(shared),
                tuple(map(int, registers.split())),
                tuple(map(int, blocks.split())),
            )
        )
    return found
