"""The plots are there, and show what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from qwenrt.tools.bench.plots import Drawing, draw, of_engine, of_server
from qwenrt.tools.bench.steps import PARTS

SAMPLES = {"batch": {"ttft": np.array([0.1, 0.3]), "itl": np.array([0.01, 0.02, 0.04])}}


def entry(name: str, sequences: int, rate: float) -> dict[str, Any]:
    shares = {f"share_{part}": {"median": 1 / 6} for part in (*PARTS, "other")}
    return {
        "workload": name,
        "label": f"{name} {sequences}",
        "sequences": sequences,
        "tokens_per_s": {"median": rate},
        "step_ms": {"median": 12.0},
    } | shares


def test_an_engine_shows_batches_over_concurrency_and_the_parts_of_its_steps() -> None:
    drawing = of_engine([entry("decode", 1, 9.0), entry("batch", 4, 20.0), entry("batch", 16, 50.0)], SAMPLES)
    assert drawing.throughput == {4: 20.0, 16: 50.0}
    assert list(drawing.parts) == ["decode 1", "batch 4", "batch 16"]
    assert drawing.parts["batch 4"] == pytest.approx(dict.fromkeys((*PARTS, "other"), 2.0))


def test_a_server_shows_its_closed_loops_over_concurrency() -> None:
    runs = [
        {"concurrency": 4, "output_tokens_per_s": 7.0},
        {"concurrency": None, "output_tokens_per_s": 8.0},
        {"concurrency": 8, "failed": 3},
    ]
    assert of_server(runs, SAMPLES) == Drawing({4: 7.0}, SAMPLES, {})


def test_what_was_measured_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    parts = {"batch": dict.fromkeys((*PARTS, "other"), 1.0)}
    empty = {"failed": {"ttft": np.empty(0), "itl": np.empty(0)}}
    assert draw(tmp_path / "none", Drawing({}, empty, {})) == []
    written = draw(tmp_path / "plots", Drawing({1: 5.0, 16: 40.0}, SAMPLES, parts))
    assert [path.name for path in written] == ["throughput.png", "latency.png", "step.png"]
    for path in written:
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[0] > 200 and pixels.shape[1] > 500
        # White ground, black axes, and at least one colour.
        assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 10
        assert np.ptp(pixels[..., :3], axis=-1).max() > 0.3


def test_a_prompt_of_one_token_each_has_no_time_between_tokens(tmp_path: Path) -> None:
    samples = {"prefill": {"ttft": np.array([0.2]), "itl": np.empty(0)}}
    assert [path.name for path in draw(tmp_path, Drawing({}, samples, {}))] == ["latency.png"]
