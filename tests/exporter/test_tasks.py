"""What a checkpoint is for: by its architecture, by sentence-transformers' files beside it, and as it is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter import export
from qwenrt.exporter.config import ModelConfig
from qwenrt.plugins import ConfigError
from tests.checkpoints import write_checkpoint, write_modules

from .small_checkpoint import CONFIG


def folder(path: Path, **fields: Any) -> Path:
    """A folder with a config.json and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    return path


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("Qwen3ForCausalLM", "generate"),
        ("Qwen3Model", "embed"),
        ("Qwen3ForSequenceClassification", "classify"),
    ],
)
def test_the_architecture_says_what_it_is_for(tmp_path: Path, architecture: str, task: str) -> None:
    path = folder(tmp_path, architectures=[architecture])
    config = ModelConfig.from_dir(path)
    assert (config.architecture, config.task) == (architecture, task)
    assert config.labels == (("LABEL_0", "LABEL_1") if task == "classify" else ())
    assert ModelConfig.from_dir(path, "embed").task == "embed"
    wrong = "classify" if task == "generate" else "generate"
    with pytest.raises(ConfigError, match=f"task is '{wrong}', must be .*embed for a {architecture}"):
        ModelConfig.from_dir(path, wrong)


def test_a_causal_model_that_is_pooled_is_for_embedding(tmp_path: Path) -> None:
    path = folder(tmp_path)
    write_modules(path)
    assert ModelConfig.from_dir(path).task == "embed"
    assert ModelConfig.from_dir(path, "generate").task == "generate"


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode": "lasttoken"}, {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}]
)
def test_both_spellings_of_the_pooling_mode(tmp_path: Path, pooling: dict[str, Any]) -> None:
    write_modules(folder(tmp_path), pooling=pooling)
    assert ModelConfig.from_dir(tmp_path).task == "embed"


def test_modules_of_a_reranker_do_not_pool(tmp_path: Path) -> None:
    folder(tmp_path)
    modules = [
        {"type": f"sentence_transformers.cross_encoder.modules.{kind}"} for kind in ("Transformer", "LogitScore")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert ModelConfig.from_dir(tmp_path).task == "generate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": {"pooling_mode": "mean"}}, 'pooling is "mean", supported is lasttoken'),
        ({"pooling": {"pooling_mode_mean_tokens": True}}, 'pooling is "mean_tokens"'),
        ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}}, "mean_tokens.lasttoken"),
        ({"pooling": {}}, 'pooling is ""'),
        ({"last": "Dense"}, 'has a module "Dense", supported are Transformer, Pooling, Normalize'),
    ],
)
def test_other_pooling_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    write_modules(folder(tmp_path), **arguments)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(tmp_path)
    assert ModelConfig.from_dir(tmp_path, "generate").task == "generate"


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "[" * 100_000, "\xff", '"' + "x" * (1 << 20) + '"'])
def test_garbage_in_modules_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path)
    (tmp_path / "modules.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"modules\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "..", ".", "", None, 7])
def test_a_path_of_pooling_does_not_leave_the_folder(tmp_path: Path, path: Any) -> None:
    write_modules(folder(tmp_path))
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = path
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="the path of Pooling is"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "bad", "0": "good"}, "num_labels": 7}, ("good", "bad")),
    ],
)
def test_labels_have_names(fields: dict[str, Any], labels: tuple[str, ...]) -> None:
    assert (
        ModelConfig.from_dict({**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], **fields}).labels
        == labels
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"id2label": {}},
        {"id2label": ["a"]},
        {"id2label": {"1": "a"}},
        {"id2label": {"0": 1}},
        {"id2label": {"0": "x" * 1000}},
        {"num_labels": 0},
        {"num_labels": 10**6},
    ],
)
def test_labels_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ModelConfig.from_dict({**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], **fields})


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_in_both_directions_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attention is not causal"):
        ModelConfig.from_dict({**CONFIG, **field})


def test_heads_that_a_task_has_no_use_for_are_left_out(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False, num_hidden_layers=1)
    whole = export(checkpoint, tmp_path / "whole").manifest
    headless = export(checkpoint, tmp_path / "headless", task="embed").manifest
    assert whole.model.num_parameters - headless.model.num_parameters == 320 * 64
    sizes = [manifest.files["model.safetensors"].size for manifest in (whole, headless)]
    assert sizes[0] - sizes[1] >= 4 * 320 * 64


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ConfigError, match=r"lacks \"?score\.weight"):
        export(checkpoint, tmp_path / "engine")
