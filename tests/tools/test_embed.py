"""`qwenrt embed`: the vectors of `LLM.embed`, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.runtime import LLM

from ..checkpoints import write_checkpoint
from .conftest import Here

TEXTS = ["Paris is the capital of France.", "héllo 社区 👋🏽", "a"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    checkpoint = write_checkpoint(folder / "checkpoint", task="embed", num_hidden_layers=2)
    return export(checkpoint, folder / "engine").path


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], {}),
        (["--dimensions", "8", "--no-normalize"], {"dimensions": 8, "normalize": False}),
        (["--instruction", "Find cities"], {"instruction": "Find cities"}),
    ],
)
def test_texts_are_embedded_as_by_the_python_api(
    here: Here, engine: Path, tmp_path: Path, options: list[str], arguments: dict[str, Any]
) -> None:
    expected = LLM(engine).embed(TEXTS, **arguments)
    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    for given in (TEXTS, ["--texts-file", str(tmp_path / "texts")]):
        status, stdout, stderr = here("embed", engine, *given, *options)
        assert (status, stderr) == (0, "")
        lines = [json.loads(line) for line in stdout.splitlines()]
        assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS))
        for line, output in zip(lines, expected, strict=True):
            assert line["prompt_tokens"] == len(output.prompt_token_ids)
            np.testing.assert_allclose(line["embedding"], output.embedding, atol=1e-6)


def test_a_text_that_cannot_be_embedded_leaves_the_others_be(here: Here, engine: Path) -> None:
    long = "x" * 3000
    status, stdout, stderr = here("embed", engine, "a", long, "b")
    assert (status, "text" in stderr, "1 of 3 texts failed" in stderr) == (1, True, True)
    first, failed, last = (json.loads(line) for line in stdout.splitlines())
    assert "embedding" in first and "embedding" in last
    assert failed.keys() == {"index", "text", "error"}


def test_an_engine_that_generates_does_not_embed(here: Here, tiny_engine: Path) -> None:
    status, stdout, stderr = here("embed", tiny_engine, "a")
    assert (status, stdout) == (1, "")
    assert "this engine's task is generate, it cannot embed" in stderr
