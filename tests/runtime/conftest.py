"""Checkpoints for embedding and reranking, and their engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint laid out as Qwen3-Embedding's, and its engine in "engine"."""
    from qwenrt.exporter import export
    from tests.checkpoints import append_end_of_text, write_checkpoint, write_modules

    path = tmp_path_factory.mktemp("embedding") / "checkpoint"
    write_checkpoint(path, seed=1, task="embed", max_position_embeddings=1024)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    append_end_of_text(path)
    write_modules(path)
    export(path, path.parent / "engine", block_size=16)
    return path


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model whose tokenizer has the tokens yes and no, and its engine in "engine"."""
    from qwenrt.exporter import export
    from tests.checkpoints import name_tokens, write_checkpoint

    path = tmp_path_factory.mktemp("reranker") / "checkpoint"
    write_checkpoint(path, seed=2, max_position_embeddings=1024)
    name_tokens(path, {260: "yes", 270: "no"})
    export(path, path.parent / "engine", block_size=16)
    return path
