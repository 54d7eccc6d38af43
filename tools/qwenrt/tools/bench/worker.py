"""One measurement of `qwenrt bench`, in its own process so that its memory is its own: JSON in as argument, JSON out on stdout.

Every run on the engine uses fresh random prompts, so that no prefix-cache hit of another run makes it faster.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from qwenrt.runtime import LLM, ConfigError, EngineDir, QwenrtError

from ..load.load import Load, LogNormal, Range
from ..load.offline import EngineWork, engine_works, run_offline
from ..load.trace import Trace
from .machine import measure
from .roofline import CostModel
from .steps import Steps
from .workloads import WARM_UP, Workload

REPEAT_BUDGET = 60.0
"""Seconds: a measurement that has taken this long is not repeated."""


class Bench:
    """An engine, loaded and timed."""

    def __init__(self, engine: str, arguments: dict[str, Any], repeats: int) -> None:
        start = perf_counter()
        self.llm = LLM(engine, **arguments)
        self.load_seconds = perf_counter() - start
        self.repeats = repeats
        self.engine = self.llm.engine
        self.limits = self.engine.limits
        if self.limits.max_model_len < WARM_UP.new_tokens + 1:
            raise ConfigError(
                f"max_model_len is {self.limits.max_model_len}, bench needs {WARM_UP.new_tokens + 1} or more"
            )
        tokenizer = self.engine.tokenizer
        known = min(self.engine.manifest.model.vocab_size, tokenizer.vocab_size)
        self.ordinary = [token for token in range(known) if token not in tokenizer.special_token_ids]
        self.steps = Steps(self.engine, CostModel(EngineDir.open(engine)))

    def fit(self, workload: Workload) -> Workload:
        """The workload as small as the engine needs it."""
        return workload.within(max_len=self.limits.max_model_len, max_sequences=self.limits.max_num_seqs)

    def warm_up(self) -> None:
        """Run every part once."""
        self.once(self.fit(WARM_UP), seed=99_991)

    def once(self, workload: Workload, seed: int) -> list[Trace]:
        """All requests of the workload at once."""
        works = [EngineWork(prompt, workload.new_tokens) for prompt in workload.prompts(self.ordinary, seed)]
        return run_offline(self.engine, works, concurrency=len(works), step=self.steps.step)

    def workload(self, given: Workload) -> dict[str, Any]:
        """Run it; sizes and, for each run, its rate, latencies, and steps."""
        workload = self.fit(given)
        self.warm_up()

        def run(number: int) -> dict[str, Any]:
            traces = self.once(workload, seed=1_000_003 * (number + 1) + workload.length)
            start = min(trace.started for trace in traces)
            first = min(trace.arrivals[0] for trace in traces) - start
            total = max(trace.ended for trace in traces) - start
            prompt = sum(trace.prompt_tokens for trace in traces)
            return {
                "tokens_per_s": workload.tokens_per_s(first, total),
                "ttft_s": first,
                "wall_s": total,
                "cached_share": sum(trace.cached_tokens for trace in traces) / prompt,
                "traces": [asdict(trace) for trace in traces],
            }

        return asdict(workload) | self.repeat(run)

    def mix(self, load: Load, concurrency: int) -> dict[str, Any]:
        """Run a load of requests that come by and by; for each run its traces and steps."""
        self.warm_up()

        def run(number: int) -> dict[str, Any]:
            once = replace(load, seed=load.seed + 1_000_000 * number)
            traces = run_offline(
                self.engine,
                engine_works(self.engine, once),
                concurrency=concurrency,
                open_loop=load.rate is not None,
                step=self.steps.step,
            )
            return {"traces": [asdict(trace) for trace in traces]}

        return self.repeat(run)

    def repeat(self, once: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """Run several times, {name: [value of each run]}; with each run's steps, and how many other CPUs were busy meanwhile."""
        rows: list[dict[str, Any]] = []
        begin = perf_counter()
        for number in range(self.repeats):
            self.steps.clear()
            busy, start = _other_cpu_seconds(), perf_counter()
            row = once(number)
            row["other_cpus"] = (_other_cpu_seconds() - busy) / (perf_counter() - start)
            rows.append(row | {"steps": self.steps.all, "decode_steps": self.steps.decoding})
            if perf_counter() - begin > REPEAT_BUDGET:
                break
        return {name: [row[name] for row in rows] for name in rows[0]}

    def memory(self) -> dict[str, int]:
        """Bytes: the process's peak and the KV pool."""
        manifest = self.engine.manifest
        pool = self.engine.scheduler.pool.num_blocks * manifest.block_size * manifest.kv_bytes_per_token
        return {"peak_rss_bytes": _peak_rss(), "kv_pool_bytes": pool}


def _peak_rss() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _other_cpu_seconds() -> float:
    """CPU time that the machine has spent on anything but this process."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = fields[0] + fields[1] + fields[2] + fields[5] + fields[6]
    own = os.times()
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def main() -> None:
    """Run the measurement that the argument describes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        print(json.dumps(_measure(json.loads(sys.argv[1]))))
    except QwenrtError as error:
        sys.exit(str(error))


def _end_with_parent() -> None:
    """The other end of stdin is the parent's, which writes nothing: it closes when the parent ends, however it ends."""
    os.read(0, 1)
    os._exit(1)


def _measure(spec: dict[str, Any]) -> dict[str, Any]:
    if spec["measure"] == "machine":
        return measure(spec["threads"], spec["repeats"])
    bench = Bench(spec["engine"], spec["arguments"], spec["repeats"])
    result: dict[str, Any] = {"load_s": bench.load_seconds}
    if spec["measure"] == "workload":
        result |= bench.workload(Workload(**spec["workload"]))
    elif spec["measure"] == "mix":
        sizes = {name: LogNormal(**one) if "sigma" in one else Range(**one) for name, one in spec["sizes"].items()}
        result |= bench.mix(Load(**(spec["load"] | sizes)), spec["concurrency"])
    return result | bench.memory()


if __name__ == "__main__":
    main()
