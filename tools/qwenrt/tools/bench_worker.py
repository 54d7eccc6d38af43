"""One measurement of `qwenrt bench`, in its own process so that its memory is its own: JSON in as argument, JSON out on stdout.

Every run of the engine uses fresh random prompts, so that no prefix-cache hit makes it faster.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from qwenrt.runtime import LLM, ConfigError, QwenrtError, RequestOutput, SamplingParams

PREFILL_TOKENS = 512
DECODE_PROMPT, DECODE_NEW = 16, 128
BATCH, BATCH_PROMPT, BATCH_NEW = 16, 128, 64
REPEAT_BUDGET = 60.0
"""Seconds: a measurement that has taken this long is not repeated."""

_BANDWIDTH_BYTES = 1 << 30
_WARM_UP = 4
_PARTS = ("schedule", "prepare", "execute", "sample", "process")


def bandwidth(threads: int, repeats: int) -> dict[str, Any]:
    """GB/s (1e9) at which `threads` threads read memory: matrix-vector products over 1 GiB, one BLAS thread each."""
    columns = 4096
    matrix = np.ones((_BANDWIDTH_BYTES // 4 // columns, columns), np.float32)
    vector = np.ones(columns, np.float32)
    slices = np.array_split(matrix, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):
            start = perf_counter()
            sums = list(pool.map(lambda part: part @ vector, slices))
            rates.append(matrix.nbytes / (perf_counter() - start) / 1e9)
    assert all((part == columns).all() for part in sums)
    return {"read_gb_s": rates[1:]}


class Bench:
    """An engine, loaded and timed."""

    def __init__(self, engine: str, arguments: dict[str, Any], repeats: int) -> None:
        start = perf_counter()
        self.llm = LLM(engine, **arguments)
        self.load_seconds = perf_counter() - start
        self.repeats = repeats
        self.engine = self.llm.engine
        self.max_len = self.engine.limits.max_model_len
        if self.max_len < _WARM_UP + 1:
            raise ConfigError(f"max_model_len is {self.max_len}, bench needs {_WARM_UP + 1} or more")
        tokenizer = self.engine.tokenizer
        known = min(self.engine.manifest.model.vocab_size, tokenizer.vocab_size)
        self.ordinary = [token for token in range(known) if token not in tokenizer.special_token_ids]

    def prompt(self, count: int, seed: int) -> list[int]:
        """`count` token ids that are not special; the same for the same seed."""
        return random.Random(1_000_003 * seed + count).choices(self.ordinary, k=count)

    def warm_up(self) -> None:
        """Run every part once."""
        self.first_and_rest(self.prompt(min(16, self.max_len - _WARM_UP), 99_991), _WARM_UP)

    def first_and_rest(self, prompt: list[int], new: int) -> tuple[float, float]:
        """Seconds to the first token and from there to the last."""
        self.engine.add_request("bench", prompt, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        start = perf_counter()
        first = None
        while self.engine.has_unfinished_requests():
            if self.engine.step() and first is None:
                first = perf_counter()
        assert first is not None
        return first - start, perf_counter() - first

    def prefill(self) -> dict[str, Any]:
        """One prompt, one token."""
        tokens = min(PREFILL_TOKENS, self.max_len - 1)
        self.warm_up()

        def once(run: int) -> dict[str, float]:
            seconds, _ = self.first_and_rest(self.prompt(tokens, run), 1)
            return {"ttft_s": seconds, "tokens_per_s": tokens / seconds}

        return {"tokens": tokens} | self.repeat(once)

    def decode(self) -> dict[str, Any]:
        """One sequence, token by token."""
        prompt = min(DECODE_PROMPT, self.max_len // 2)
        new = min(DECODE_NEW, self.max_len - prompt)
        self.warm_up()

        def once(run: int) -> dict[str, float]:
            _, rest = self.first_and_rest(self.prompt(prompt, 1000 + run), new)
            return {"tokens_per_s": (new - 1) / rest, "ms_per_token": 1000 * rest / (new - 1)}

        return {"prompt_tokens": prompt, "new_tokens": new} | self.repeat(once)

    def batch(self) -> dict[str, Any]:
        """Many sequences at once; the share of each part is that of the steps in which all of them decode."""
        count = min(BATCH, self.engine.limits.max_num_seqs)
        scale = min(1.0, self.max_len / (BATCH_PROMPT + BATCH_NEW))
        prompt, new = int(BATCH_PROMPT * scale), int(BATCH_NEW * scale)
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.warm_up()

        def once(run: int) -> dict[str, float]:
            start = perf_counter()
            for i in range(count):
                self.engine.add_request(str(i), self.prompt(prompt, 2000 + run * count + i), params)
            decoding = _DecodeSteps(self.llm)
            while self.engine.has_unfinished_requests():
                decoding.step(count)
            seconds = perf_counter() - start
            return {
                "wall_s": seconds,
                "output_tokens_per_s": count * new / seconds,
                "total_tokens_per_s": count * (prompt + new) / seconds,
            } | decoding.result(count)

        return {"sequences": count, "prompt_tokens": prompt, "new_tokens": new} | self.repeat(once)

    def repeat(self, once: Callable[[int], dict[str, float]]) -> dict[str, list[float]]:
        """Run a measurement several times; {name: [value of each run]}, and how many other CPUs were busy meanwhile."""
        rows: list[dict[str, float]] = []
        begin = perf_counter()
        for run in range(self.repeats):
            busy, start = _other_cpu_seconds(), perf_counter()
            row = once(run)
            rows.append(row | {"other_cpus": (_other_cpu_seconds() - busy) / (perf_counter() - start)})
            if perf_counter() - begin > REPEAT_BUDGET:
                break
        return {name: [row[name] for row in rows if name in row] for name in rows[0]}

    def memory(self) -> dict[str, int]:
        """Bytes: the process's peak, the KV pool and the weights."""
        manifest = self.engine.manifest
        pool = self.engine.scheduler.pool.num_blocks * manifest.block_size * manifest.kv_bytes_per_token
        return {"peak_rss_bytes": _peak_rss(), "kv_pool_bytes": pool}


class _DecodeSteps:
    """Time of the steps in which every sequence got a token and had one before."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._previous: list[RequestOutput] = []
        self._seconds: dict[str, float] = dict.fromkeys((*_PARTS, "wall"), 0.0)
        self._steps = 0

    def step(self, count: int) -> None:
        """One step of the engine, counted if it is one of those."""
        before, start = asdict(self._engine.timings), perf_counter()
        outputs = self._engine.step()
        wall, after = perf_counter() - start, asdict(self._engine.timings)
        if len(outputs) == len(self._previous) == count:
            self._steps += 1
            self._seconds["wall"] += wall
            for part in _PARTS:
                self._seconds[part] += after[part] - before[part]
        self._previous = outputs

    def result(self, count: int) -> dict[str, float]:
        """Decode speed, the length of a step, and each part's share of it; empty if there was no such step."""
        if not self._steps:
            return {}
        wall = self._seconds["wall"]
        shares = {f"share_{part}": self._seconds[part] / wall for part in _PARTS}
        shares["share_other"] = 1 - sum(shares.values())
        return {"decode_tokens_per_s": count * self._steps / wall, "step_ms": 1000 * wall / self._steps} | shares


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
    if spec["measure"] == "bandwidth":
        return bandwidth(spec["threads"], spec["repeats"])
    bench = Bench(spec["engine"], spec["arguments"], spec["repeats"])
    measures = {"load": dict, "prefill": bench.prefill, "decode": bench.decode, "batch": bench.batch}
    result: dict[str, Any] = measures[spec["measure"]]()
    return result | {"load_s": bench.load_seconds} | bench.memory()


if __name__ == "__main__":
    main()
