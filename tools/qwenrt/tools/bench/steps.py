"""Times an engine's steps."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter
from typing import Any

from qwenrt.runtime import LLMEngine
from qwenrt.runtime.job import Job

from .roofline import CostModel, Recorder

PARTS = ("schedule", "prepare", "execute", "sample", "process")
"""Those of a step, as `StepTimings` has them."""


class Steps:
    """The engine's steps: what each cost at least and took, and where the time of those went in which all requests decode."""

    def __init__(self, engine: LLMEngine, costs: CostModel) -> None:
        self._engine = engine
        self._recorder = Recorder(engine.backend, costs)
        engine.backend = self._recorder
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.all: list[dict[str, Any]] = []
        self.decoding: dict[str, float] = dict.fromkeys((*PARTS, "wall", "steps", "tokens"), 0.0)
        self._previous: list[Job] = []

    def step(self) -> list[Job]:
        """One step of the engine."""
        before, start = asdict(self._engine.timings), perf_counter()
        jobs = self._engine.step_jobs()
        wall = perf_counter() - start
        cost = self._recorder.last
        # All that it computed got a token and had got one in the step before.
        decodes = len(jobs) == cost.sequences and set(jobs) == set(self._previous)
        self._previous = jobs
        self.all.append(asdict(cost) | {"seconds": wall, "decodes": decodes})
        if decodes:
            after = asdict(self._engine.timings)
            spent = {part: after[part] - before[part] for part in PARTS}
            for name, value in (spent | {"wall": wall, "steps": 1, "tokens": cost.sequences}).items():
                self.decoding[name] += value
        return jobs
