"""qwenrt itself, measured as the rivals are: python -m peers.ours ENGINE --workload NAME."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from qwenrt.plugins.library import cpu_library
from qwenrt.runtime import LLM, EngineDir
from qwenrt.tools.bench.workloads import Workload
from qwenrt.tools.load.offline import EngineWork, run_offline

from .rival import main


class Ours:
    """An engine folder, loaded with blocks for the workload."""

    def __init__(self, model: Path, threads: int, workload: Workload) -> None:
        self.pid = os.getpid()
        isa = os.environ.get("PEERS_ISA")
        if isa and ctypes.CDLL(str(cpu_library())).qwenrt_set_isa(isa.encode()):
            raise SystemExit(f"this machine lacks {isa}")
        block_size = EngineDir.open(model).manifest.block_size
        # Room for the workload, as the rivals have it. What sequences share is there once; a block of each is shared in part.
        own = -(-(workload.length - workload.shared_tokens) // block_size) + 1
        blocks = workload.shared_tokens // block_size + workload.sequences * own
        self._llm = LLM(model, threads=threads, num_kv_blocks=blocks)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """As Rival.generate."""
        works = [EngineWork(prompt, new_tokens) for prompt in prompts]
        traces = run_offline(self._llm.engine, works, concurrency=len(works))
        assert all(trace.completion_tokens == new_tokens for trace in traces)
        start = traces[0].started
        return min(trace.arrivals[0] for trace in traces) - start, max(trace.ended for trace in traces) - start


if __name__ == "__main__":
    main(Ours)
