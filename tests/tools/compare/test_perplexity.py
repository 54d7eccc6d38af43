"""`qwenrt compare --perplexity`: the numbers of a plain loop over transformers, and a verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qwenrt.runtime.text.tokenizer import Tokenizer

from .conftest import Compare
from .faults import Array, doctored

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen; naïve 社区 👋🏽."


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def scores(checkpoint: Path, token_ids: list[int], window: int) -> Array:
    """-log p of every token but the first, in the first of the windows, half a window apart, that has a token before it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found: dict[int, float] = {}
    for start in range(0, len(token_ids), window // 2):
        part = token_ids[start : start + window]
        with torch.inference_mode():
            logs = model(torch.tensor([part])).logits[0].double().log_softmax(-1)
        for place in range(1, len(part)):
            found.setdefault(start + place, -float(logs[place - 1, part[place]]))
    return np.array([found[place] for place in range(1, len(token_ids))])


@pytest.mark.parametrize("window", [2, 16, 512])
def test_it_is_that_of_transformers(
    compare: Compare, engine: Path, tiny_checkpoint: Path, text: Path, window: int
) -> None:
    found = compare(
        engine, "--reference", tiny_checkpoint, "--tokens", "0", "--perplexity", text, "--window", str(window)
    )
    assert (found.status, found.stderr) == (0, "")
    token_ids = Tokenizer.from_dir(engine).encode(TEXT)
    expected = scores(tiny_checkpoint, token_ids, window)
    told: dict[str, Any] = found.report["perplexity"]
    assert told["num_tokens"] == len(expected) == len(token_ids) - 1
    perplexity = math.exp(expected.mean())
    assert told["reference"] == pytest.approx(perplexity, rel=1e-4)
    assert told["engine"] == pytest.approx(perplexity, rel=1e-4)
    error = perplexity * expected.std(ddof=1) / math.sqrt(len(expected))
    assert told["reference_error"] == pytest.approx(error, rel=1e-3)
    assert abs(told["nll_difference"]) < 1e-5
    assert told["nll_difference_error"] < 1e-5
    assert f"{told['engine']:.4f} against {told['reference']:.4f}, {len(expected)} tokens" in found.stdout


def test_a_worse_engine_fails_by_the_difference_of_the_likelihoods(
    compare: Compare, engine: Path, tiny_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    def louder_head(weights: dict[str, Array]) -> None:
        weights["model.norm.weight"] *= 3

    wrong = doctored(engine, tmp_path / "wrong", louder_head)
    options = ("--reference", tiny_checkpoint, "--tokens", "0", "--perplexity", text)
    found = compare(wrong, *options)
    (check,) = (check for check in found.report["checks"] if check["measure"] == "perplexity")
    assert not check["passed"]
    told = found.report["perplexity"]
    assert check["value"] == pytest.approx(abs(math.log(told["engine"]) - math.log(told["reference"])), rel=1e-6)
    assert check["value"] > 5 * told["nll_difference_error"] > 0
    wide = ("layer", "kv", "logits", "kl", "nll")
    limits = [argument for name in wide for argument in ("--tolerance", f"{name}=1000")]
    assert compare(wrong, *options, *limits).status == 0


def test_a_text_of_one_token_is_refused(compare: Compare, engine: Path, tiny_checkpoint: Path, text: Path) -> None:
    text.write_text("a")
    found = compare(engine, "--reference", tiny_checkpoint, "--tokens", "0", "--perplexity", text)
    assert found.status == 1
    assert "the text for --perplexity has 1 tokens; it needs 2 at least" in found.stderr
