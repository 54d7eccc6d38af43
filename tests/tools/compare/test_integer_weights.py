"""Engines with integer weights pass the comparison at their own tolerances, and would not at float32's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qwenrt.exporter import export
from qwenrt.tools.make_checkpoint import SHAPES, make_checkpoint

from ..conftest import Here

DEMO = Path(__file__).parents[3] / "tools" / "demo" / "checkpoint"


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g64"])
def test_integer_weights_pass_at_their_tolerances(here: Here, tmp_path: Path, weights: str) -> None:
    export(DEMO, tmp_path / "engine", weights=weights)
    status, stdout, stderr = here("compare", tmp_path / "engine", "--reference", DEMO, "--layers")
    assert (status, stderr) == (0, ""), stdout
    assert f"weights {weights}" in stdout
    status, stdout, _ = here("compare", tmp_path / "engine", "--reference", DEMO, "--tolerance", "logits=1e-3")
    assert status == 1
    assert "FAIL" in stdout


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g128"])
def test_they_pass_with_random_weights_of_a_real_width_too(here: Here, tmp_path: Path, weights: str) -> None:
    """Rows of 1024 to 3072 numbers, eight times as long as the demo checkpoint's, and layers enough to add up."""
    shape = dataclasses.replace(SHAPES["0.6B"], num_layers=4, vocab_size=4096)
    make_checkpoint(tmp_path / "checkpoint", shape)
    export(tmp_path / "checkpoint", tmp_path / "engine", weights=weights, max_model_len=1024)
    arguments = ("--reference", tmp_path / "checkpoint", "--layers", "--tokens", "8")
    status, stdout, stderr = here("compare", tmp_path / "engine", *arguments)
    assert (status, stderr) == (0, ""), stdout
