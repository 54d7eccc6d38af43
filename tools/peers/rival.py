"""What every rival's script shares: the workloads, the clock, the memory. Standard library alone."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from qwenrt.tools.bench.workloads import WARM_UP, WORKLOADS, Workload

VOCABULARY = range(1000, 150_000)
"""Token ids of prompts: away from Qwen's special tokens."""


class Rival(Protocol):
    """An engine that is loaded."""

    pid: int
    """The process whose memory counts."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """Generate greedily, exactly so many tokens; seconds to the first token of all, and to the last."""


class Load(Protocol):
    """Loads a rival for a workload."""

    def __call__(self, model: Path, threads: int, workload: Workload) -> Rival:
        """The rival with room for the workload."""


def measure(name: str, rival: Rival, load_s: float, repeats: int) -> dict[str, Any]:
    """A workload, measured: seconds to load, its rate in each run, and bytes that were resident at most."""
    workload = WORKLOADS[name]
    rival.generate(WARM_UP.prompts(VOCABULARY, 99), WARM_UP.new_tokens)
    rates = []
    for number in range(repeats):
        before, start = _busy_seconds(rival.pid), perf_counter()
        first, total = rival.generate(workload.prompts(VOCABULARY, number), workload.new_tokens)
        others = (_busy_seconds(rival.pid) - before) / (perf_counter() - start)
        rates.append((workload.tokens_per_s(first, total), others))
    return {
        "workload": name,
        "load_s": load_s,
        "tokens_per_s": [rate for rate, _ in rates],
        "other_cpus": [others for _, others in rates],
        "peak_rss_bytes": _peak_rss(rival.pid),
    }


def main(load: Load) -> None:
    """The command line of a rival's script: MODEL --workload NAME; prints the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    start = perf_counter()
    rival = load(options.model, options.threads, WORKLOADS[options.workload])
    print(json.dumps(measure(options.workload, rival, perf_counter() - start, options.repeats)))


def _peak_rss(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _busy_seconds(pid: int) -> float:
    """CPU time that the machine has spent on anything but a process and this one."""
    busy = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    ticks = busy[0] + busy[1] + busy[2] + busy[5] + busy[6]
    for one in {pid, os.getpid()}:
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks -= int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
