"""An engine of this machine: how long its steps take, and what it does with a workload."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from qwenrt.runtime import LLM, LLMEngine, SamplingParams
from qwenrt.runtime.backends import Backend
from qwenrt.runtime.job import Job
from qwenrt.runtime.model_runner import StepInputs

from .cost_model import CostModel, Work
from .fit import Measured, fit
from .replica import EngineShape, Outcome
from .simulation import Results
from .workload import Arrival

_DECODE_STEPS = 12


def measure(
    path: Path,
    shape: EngineShape,
    seconds: float,
    arrivals: Iterable[Arrival] | None,
    on_progress: Callable[[str], None],
) -> tuple[CostModel, Results | None]:
    """The cost model of an engine folder on this machine, from about `seconds` of steps; and what it does with `arrivals`.

    With arrivals, half of the steps are measured before and half after they were served: machines have good and bad minutes.
    """
    on_progress(f"loading {path}")
    llm = LLM(
        path,
        **dataclasses.asdict(shape.limits),
        num_kv_blocks=shape.num_kv_blocks,
        enable_prefix_caching=shape.enable_prefix_caching,
    )
    if arrivals is None:
        return fit(measure_steps(llm.engine, budget=seconds, on_progress=on_progress)), None
    steps = measure_steps(llm.engine, budget=seconds / 2, on_progress=on_progress)
    on_progress("serving the requests")
    real = run_really(llm.engine, arrivals)
    steps += measure_steps(llm.engine, budget=seconds / 2, on_progress=on_progress)
    return fit(steps), real


class _Recorder:
    """A backend that passes steps on to another and keeps what the last one computed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.last = Work()

    def execute(self, inputs: StepInputs) -> np.ndarray[Any, np.dtype[np.float32]]:
        counts = np.diff(inputs.query_start)
        lengths = inputs.seq_lens.astype(np.int64)
        self.last = Work(
            tokens=len(inputs.input_ids),
            samples=len(inputs.logits_indices),
            context=int(lengths.sum()),
            # A sequence's last `count` tokens see length - count + 1, ..., length tokens.
            pairs=int((counts * (2 * lengths - counts + 1) // 2).sum()),
        )
        return self._backend.execute(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def measure_steps(engine: LLMEngine, *, budget: float, on_progress: Callable[[str], None]) -> list[Measured]:
    """Steps of random prompts, in batches of 1 to max_num_seqs, short and long, for about `budget` seconds.

    Everything that a step costs counts: scheduling, the graph, sampling, text.
    """
    recorder = _Recorder(engine.backend)
    engine.backend = recorder
    rng = random.Random(0)
    steps: list[Measured] = []
    try:
        _measure_batch(engine, recorder, rng, 1)  # warms up
        began = perf_counter()
        while True:
            for count in _batch_sizes(engine.limits.max_num_seqs):
                on_progress(f"measuring steps of {count} sequences")
                steps += _measure_batch(engine, recorder, rng, count)
                if perf_counter() - began > budget and len({step.work.tokens for step in steps}) >= 8:
                    return steps
    finally:
        engine.backend = recorder._backend


def _batch_sizes(most: int) -> list[int]:
    """The most, and powers of two below it, with a single sequence before each: a prompt that comes alone is the usual step."""
    return [size for many in (most, *(2**power for power in range(1, 20) if 2**power < most)) for size in (1, many)]


def _measure_batch(engine: LLMEngine, recorder: _Recorder, rng: random.Random, count: int) -> list[Measured]:
    """Steps of `count` random prompts that come together, until each has a few tokens."""
    vocabulary = range(min(engine.manifest.model.vocab_size, engine.tokenizer.vocab_size))
    pool = engine.scheduler.pool.num_blocks * engine.manifest.block_size
    longest = max(1, min(engine.limits.max_model_len, pool // count) - _DECODE_STEPS)
    params = SamplingParams(temperature=0.0, max_tokens=_DECODE_STEPS, ignore_eos=True)
    most = int(longest ** rng.uniform(0.5, 1.0))
    for number in range(count):
        prompt = rng.choices(vocabulary, k=rng.randint(max(1, most // 2), most))
        engine.add_request(f"measure-{number}", prompt, params)
    steps = []
    while engine.has_unfinished_requests():
        start = perf_counter()
        engine.step_jobs()
        steps.append(Measured(recorder.last, perf_counter() - start))
    return steps


def run_really(engine: LLMEngine, arrivals: Iterable[Arrival]) -> Results:
    """What a simulation of one replica predicts, measured: requests are added when they are due, in this process."""
    results = Results()
    outcomes: dict[Job, Outcome] = {}
    latest: dict[Job, float] = {}
    # Drawing a prompt takes as long as computing it may: the clock starts after that.
    prompts = [(arrival, _tokens_in(arrival, engine.manifest.model.vocab_size)) for arrival in arrivals]
    pending = iter(prompts)
    following = next(pending, None)
    start = perf_counter()
    while following is not None or engine.has_unfinished_requests():
        now = perf_counter() - start
        while following is not None and following[0].due <= now:
            arrival, prompt = following
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arrival.new_tokens)
            job = engine.add_request(f"real-{len(outcomes)}", prompt, params)
            outcomes[job] = Outcome(arrival.due, job.answers[0].request, arrival.new_tokens)
            following = next(pending, None)
        if following is not None and not engine.has_unfinished_requests():
            sleep(max(0.0, following[0].due - (perf_counter() - start)))
            continue
        jobs = engine.step_jobs()
        now = perf_counter() - start
        results.steps += 1
        for job in jobs:
            if job in latest:
                results.gaps.add(now - latest[job], 1)
            else:
                outcomes[job].first = now
            latest[job] = now
            if job.finished:
                outcomes[job].ended = now
                results.add(outcomes[job])
    return results


def _tokens_in(arrival: Arrival, vocab_size: int) -> list[int]:
    """A prompt of the model's vocabulary that has with others in common what the arrival has: a piece's id seeds its tokens."""
    token_ids: list[int] = []
    for value, count in arrival.pieces:
        token_ids += random.Random(value).choices(range(vocab_size), k=count)
    return token_ids
