"""How much of two models `qwenrt compare` has in memory at a time."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import EngineDir
from qwenrt.runtime.backends.onnxruntime import OnnxRuntimeBackend
from qwenrt.tools.compare import text_logits
from qwenrt.tools.compare.batches import one_sequence
from qwenrt.tools.compare.feeds import Array
from qwenrt.tools.compare.runners.backend import BackendRunner
from qwenrt.tools.compare.runners.base import Visit
from qwenrt.tools.make_checkpoint import SHAPES, make_checkpoint

from .conftest import Compare


class Watched(BackendRunner):
    """Notes of each step how many tokens and how many rows of logits it had."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[tuple[int, int]] = []

    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        self.steps.append((len(feed["input_ids"]), len(feed["logits_indices"]) if "logits" in wanted else 0))
        super().visit(feed, wanted, visit)


def test_logits_of_a_text_come_in_steps_and_only_from_where_they_are_wanted(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EngineDir.open(engine)
    manifest = folder.manifest
    token_ids = [7 * index % manifest.model.vocab_size for index in range(30)]
    runner = Watched("onnxruntime", folder)
    whole: dict[str, Array] = {}
    runner.visit(
        one_sequence(token_ids, manifest, 0, 30), ["logits"], lambda name, values: whole.update({name: values.copy()})
    )
    runner.steps.clear()
    monkeypatch.setattr(text_logits, "_MAX_LOGITS", 8 * manifest.model.vocab_size)
    found = list(text_logits.logits_after(runner, token_ids, 19))
    assert runner.steps == [(8, 0), (8, 0), (8, 5), (6, 6)]
    np.testing.assert_array_equal(np.concatenate(found), whole["logits"][19:])


def test_the_engines_weights_are_in_memory_once_at_a_time(
    compare: Compare, engine: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[OnnxRuntimeBackend]] = []
    others: list[int] = []
    load = OnnxRuntimeBackend.__init__

    def watched(self: OnnxRuntimeBackend, *arguments: Any, **options: Any) -> None:
        others.append(sum(backend() is not None for backend in made))
        made.append(weakref.ref(self))
        load(self, *arguments, **options)

    monkeypatch.setattr(OnnxRuntimeBackend, "__init__", watched)
    assert compare(engine, "--reference", tiny_checkpoint, "--layers", "--tokens", "8").status == 0
    assert len(others) >= 2
    assert set(others) == {0}


PEAK = """
import sys
from qwenrt.tools.cli import run
status = run(sys.argv[1:])
print(status, next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_the_shape_of_0_6b_takes_little_more_than_the_two_models(tmp_path: Path, weights: str) -> None:
    make_checkpoint(tmp_path / "checkpoint", SHAPES["0.6B"])
    engine = export(tmp_path / "checkpoint", tmp_path / "engine", weights=weights, max_model_len=4096)
    (tmp_path / "text.txt").write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
    )
    options = [
        "--reference",
        tmp_path / "checkpoint",
        "--layers",
        "--tokens",
        "300",
        "--perplexity",
        tmp_path / "text.txt",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "compare", tmp_path / "engine", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    status, peak = map(int, done.stdout.splitlines()[-1].split())
    assert status == 0, done.stdout + done.stderr
    # The checkpoint is bfloat16, the reference float32.
    models = 2 * (tmp_path / "checkpoint" / "model.safetensors").stat().st_size
    models += engine.manifest.files["model.safetensors"].size
    assert peak < models + 4 * 2**30, "the bound"
    assert peak < models + 3.2 * 2**30, "what it takes"
