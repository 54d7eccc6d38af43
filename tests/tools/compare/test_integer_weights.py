"""Engines with integer weights pass the comparison at their own tolerances, and would not at float32's."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenrt.exporter import export

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
