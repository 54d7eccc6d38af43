"""Runs requests on an engine in this process, and times them as `client` does those to a server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from qwenrt.runtime import LLMEngine, RequestError, SamplingParams
from qwenrt.runtime.job import Job

from .load import Load
from .trace import Trace


@dataclass(frozen=True, slots=True)
class EngineWork:
    """One request: token ids of the prompt, how many tokens to generate, and seconds after the start at which it is due."""

    prompt: list[int]
    max_tokens: int
    due: float = 0.0


def engine_works(engine: LLMEngine, load: Load) -> list[EngineWork]:
    """A load's requests as token ids, cut to what the engine takes: at most half a sequence is generated."""
    most = engine.limits.max_model_len
    works = []
    for work in load:
        new = min(work.max_tokens, most // 2)
        works.append(EngineWork(engine.tokenizer.encode(work.prompt)[: most - new], new, work.due))
    return works


def run_offline(
    engine: LLMEngine,
    works: Iterable[EngineWork],
    *,
    concurrency: int,
    open_loop: bool = False,
    step: Callable[[], list[Job]] | None = None,
) -> list[Trace]:
    """Traces of all requests, at most `concurrency` of them in the engine at once, greedy, past an end of text.

    open_loop: a request's time counts from when it was due. step: calls the engine's `step_jobs`, by default nothing but that.
    """
    step = step or engine.step_jobs
    waiting = deque(works)
    traces: list[Trace] = []
    open_: dict[Job, Trace] = {}
    start = perf_counter()
    while waiting or open_:
        while waiting and len(open_) < concurrency and start + waiting[0].due <= perf_counter():
            work = waiting.popleft()
            trace = Trace(start + work.due if open_loop else perf_counter(), prompt_tokens=len(work.prompt))
            traces.append(trace)
            params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True)
            try:
                open_[engine.add_request(f"bench-{len(traces)}", work.prompt, params)] = trace
            except RequestError as error:
                trace.ended, trace.error = perf_counter(), str(error)
        if not open_:
            if waiting:
                time.sleep(max(0.0, start + waiting[0].due - perf_counter()))
            continue
        for job in step():
            trace = open_[job]
            trace.arrivals.append(perf_counter())
            if job.finished:
                _end(job, open_.pop(job))
    return traces


def _end(job: Job, trace: Trace) -> None:
    output = job.output()
    answer = output.outputs[0]
    trace.ended = perf_counter()
    trace.cached_tokens = output.num_cached_tokens
    trace.completion_tokens = len(answer.token_ids)
    if answer.finish_reason == "abort":
        trace.error = str(answer.stop_reason)
