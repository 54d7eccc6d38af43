"""A cost model out of measured steps: least squares of relative errors, no coefficient below zero."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwenrt.plugins import ConfigError

from .cost_model import CostModel, Work

Floats = np.ndarray[Any, np.dtype[np.float64]]

_SWEEPS = 400
_ONE_STEP = 1024
"""Tokens of a prompt that is taken to be computed in one step."""
_OUTLIER = 3.0
"""A step that took so many times as long as the first fit says was somebody else's doing."""


class Measured(NamedTuple):
    """A step and how long it took."""

    work: Work
    seconds: float


def fit(steps: Sequence[Measured]) -> CostModel:
    """The cost model that is closest to `steps`; raises ConfigError where there are too few."""
    if len({step.work.tokens for step in steps}) < 3:
        raise ConfigError(f"{len(steps)} steps of too few sizes say nothing about others; measure more")
    model, errors = _best(steps)
    kept = [step for step, error in zip(steps, errors, strict=True) if error > 1 / _OUTLIER - 1]
    return model if len(kept) == len(steps) else _best(kept)[0]


def _best(steps: Sequence[Measured]) -> tuple[CostModel, Floats]:
    """The best over all knees, and its relative errors."""
    seconds = np.array([step.seconds for step in steps])
    tokens = np.array([step.work.tokens for step in steps], np.float64)
    rest = [[work.tokens, work.samples, work.context, work.pairs] for work, _ in steps]
    weights = _balance(steps)
    best: tuple[float, float, Floats, Floats] | None = None
    for knee in 2.0 ** np.arange(0.0, np.log2(tokens.max()) + 1.0, 0.5):
        columns = np.column_stack([np.ones(len(steps)), np.maximum(1.0, tokens / knee), rest])
        relative = columns / seconds[:, None]
        coefficients = _non_negative(relative, weights)
        errors = relative @ coefficients - 1.0
        loss = float(weights @ errors**2)
        if best is None or loss < best[0]:
            best = loss, float(knee), coefficients, errors
    assert best is not None
    _, knee, values, errors = best
    names = ("fixed", "weights", "per_token", "per_sample", "per_context", "per_pair")
    return CostModel(knee=knee, **dict(zip(names, values.tolist(), strict=True))), errors


def _balance(steps: Sequence[Measured]) -> Floats:
    """Weights with which each size of step, in powers of two, counts the same, those that prefill and those that do not."""
    kinds = [(step.work.tokens.bit_length(), step.work.tokens > step.work.samples) for step in steps]
    counts = Counter(kinds)
    return np.array([1.0 / counts[kind] for kind in kinds])


def _non_negative(columns: Floats, weights: Floats) -> Floats:
    """x >= 0 that brings columns @ x closest to 1, by weight: coordinate descent on the normal equations."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = columns / scale
    gram, target = scaled.T @ (weights[:, None] * scaled), scaled.T @ weights
    x = np.zeros(len(target))
    for _ in range(_SWEEPS):
        for index in range(len(x)):
            if gram[index, index] > 0.0:
                x[index] = max(0.0, x[index] + (target[index] - gram[index] @ x) / gram[index, index])
    result: Floats = x / scale
    return result


def steps_of_bench(path: Path) -> list[Measured]:
    """Steps out of the JSON of `qwenrt bench`: first steps of single prompts, and the mean decoding step of each workload.

    Raises ConfigError if the file is not such.
    """
    try:
        workloads = json.loads(path.read_text(encoding="utf-8"))["workloads"]
        fixed = [entry for entry in workloads if "sequences" in entry]
        return [step for entry in fixed for step in _steps_of(entry)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no result of qwenrt bench ENGINE ({type(error).__name__}: {error})") from None


def _steps_of(entry: dict[str, Any]) -> list[Measured]:
    """The steps that a workload's medians tell of."""
    sequences, prompt, new = entry["sequences"], entry["shared_tokens"] + entry["prompt_tokens"], entry["new_tokens"]
    steps = []
    if sequences == 1 and prompt <= _ONE_STEP:
        prefill = Work(prompt, 1, prompt, prompt * (prompt + 1) // 2)
        steps.append(Measured(prefill, entry["ttft_s"]["median"]))
    if "step_ms" in entry:
        seen = sequences * (prompt + new // 2)
        steps.append(Measured(Work(sequences, sequences, seen, seen), entry["step_ms"]["median"] / 1000))
    return steps
