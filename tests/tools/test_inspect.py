"""`qwenrt inspect`: numbers that are right, files that are not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter import export
from qwenrt.runtime import EngineDir
from tests.checkpoints import quantize_checkpoint, write_checkpoint
from tests.gguf_files import write_gguf

from .command import qwenrt
from .conftest import Here


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_engine, tmp_path / "engine"))


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def report(*arguments: str | Path) -> Any:
    status, stdout, stderr = qwenrt("inspect", *arguments, "--json", blocked=("torch", "transformers", "onnx"))
    assert (status, stderr) == (0, "")
    return json.loads(stdout)


def test_an_engine_folder_is_described_as_its_manifest_says(tiny_engine: Path) -> None:
    manifest = EngineDir.open(tiny_engine).manifest
    described = report(tiny_engine)
    assert described["kind"] == "engine"
    assert described["model"]["num_parameters"] == manifest.model.num_parameters
    assert described["limits"]["max_model_len"] == manifest.limits.max_model_len
    assert described["kv_bytes_per_token"] == manifest.kv_bytes_per_token
    block = manifest.block_size
    assert described["kv_tokens_per_gib"] == 2**30 // (manifest.kv_bytes_per_token * block) * block
    assert {file["name"]: file["size"] for file in described["files"]} == {
        path.name: path.stat().st_size for path in tiny_engine.iterdir() if path.name != "engine.json"
    }
    assert {file["state"] for file in described["files"]} == {"ok (size)"}
    assert {file["state"] for file in report(tiny_engine, "--verify")["files"]} == {"ok (SHA-256)"}


def test_a_checkpoint_is_described_without_torch(tiny_checkpoint: Path, tiny_engine: Path) -> None:
    described = report(tiny_checkpoint)
    exported = report(tiny_engine)
    assert described["kind"] == "checkpoint"
    assert described["model"] == exported["model"]
    assert described["eos_token_ids"] == exported["eos_token_ids"]
    weights = sum(path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors"))
    assert 0 < weights - sum(described["dtypes"].values()) < 16384


def test_a_quantized_checkpoint_says_how(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    quantize_checkpoint(checkpoint, tmp_path / "reference", "awq")
    described = report(checkpoint)
    assert described["quantization"] == "awq, 4 bits, groups of 32"
    assert described["dtypes"]["I32"] > described["dtypes"]["F16"]
    status, stdout, _ = qwenrt("inspect", checkpoint)
    assert status == 0
    assert "(awq, 4 bits, groups of 32)" in stdout


def test_the_task_of_a_checkpoint_and_of_an_engine_is_told(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", task="classify", num_labels=3, num_hidden_layers=1)
    export(checkpoint, tmp_path / "classifier")
    export(checkpoint, tmp_path / "embedder", task="embed")
    for path, task in (
        (checkpoint, "classify"),
        (tmp_path / "classifier", "classify"),
        (tmp_path / "embedder", "embed"),
    ):
        described = report(path)
        assert (described["task"], len(described["labels"])) == (task, 3 if task == "classify" else 0)
        line = "classify, 3 labels" if task == "classify" else "embed"
        assert re.search(rf"^task +{line}$", qwenrt("inspect", path)[1], re.MULTILINE)


def test_experts_are_counted(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family="qwen3_moe", **experts)
    model = report(checkpoint)["model"]
    one = 3 * 64 * 32
    assert model["num_parameters"] - model["num_active_parameters"] == 3 * 6 * one
    status, stdout, _ = qwenrt("inspect", checkpoint)
    assert status == 0
    assert "8, 2 for each token, of intermediate size 32" in stdout
    assert f"{model['num_active_parameters']:,} of them for each token" in stdout


@pytest.mark.parametrize("kind", ["engine", "checkpoint"])
def test_tables_name_every_file_and_number(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"tiny_{kind}")
    described = report(path)
    status, stdout, stderr = qwenrt("inspect", path)
    assert (status, stderr) == (0, "")
    for value in (
        described["model"]["num_parameters"],
        described["kv_bytes_per_token"],
        described["kv_tokens_per_gib"],
    ):
        assert f"{value:,}" in stdout
    for file in described["files"]:
        assert f"\n{file['name']} " in stdout
    assert "\x1b" not in stdout


def test_wrong_files_of_an_engine_are_named(engine: Path) -> None:
    (engine / "tokenizer.json").unlink()
    with (engine / "model.onnx").open("ab") as file:
        file.write(b"x")
    weights = engine / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    status, stdout, stderr = qwenrt("inspect", engine)
    assert status == 1
    assert stderr == (
        f"qwenrt: error: {engine}: wrong or missing: model.onnx, tokenizer.json; export the engine again\n"
    )
    assert "missing" in stdout
    assert "the manifest says" in stdout
    status, stdout, stderr = qwenrt("inspect", engine, "--verify", "--json")
    assert status == 1
    assert "model.onnx, model.safetensors, tokenizer.json" in stderr
    states = {file["name"]: file["state"] for file in json.loads(stdout)["files"]}
    assert states["model.safetensors"] == "changed (SHA-256 differs)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "engine.json is not JSON"),
        (b"\xff\xfe", "engine.json is not UTF-8"),
        (b"{}", "format_version is None"),
        (b" " * (2 << 20), "is larger than 1048576 bytes"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(engine: Path, content: bytes, message: str) -> None:
    (engine / "engine.json").write_bytes(content)
    status, stdout, stderr = qwenrt("inspect", engine)
    assert (status, stdout) == (1, "")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_manifest_cannot_drive_the_terminal(engine: Path) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    manifest["producer"] = "\x1b]0;title\x07[red]"
    (engine / "engine.json").write_text(json.dumps(manifest))
    status, stdout, _ = qwenrt("inspect", engine)
    assert status == 0
    assert "\\x1b]0;title\\x07[red]" in stdout


def test_wrong_files_of_a_checkpoint_are_named(checkpoint: Path) -> None:
    weights = next(checkpoint.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 10)
    status, _, stderr = qwenrt("inspect", checkpoint)
    assert status == 1
    assert weights.name in stderr
    assert stderr.count("\n") == 1


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    status, stdout, stderr = qwenrt("inspect", tmp_path)
    assert (status, stdout) == (1, "")
    assert "has neither engine.json nor config.json" in stderr


def test_a_gguf_file_is_described_as_a_checkpoint(tiny_checkpoint: Path, tmp_path: Path, here: Here) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint, tmp_path / "reference", "Q8_0")
    status, stdout, _ = here("inspect", path, "--json")
    report = json.loads(stdout)
    assert status == 0
    assert report["quantization"] == "gguf"
    assert report["dtypes"].keys() == {"Q8_0", "F32"}
    assert report["model"]["architecture"] == "Qwen3ForCausalLM"
    assert [(file["name"], file["size"]) for file in report["files"]] == [("model.gguf", path.stat().st_size)]
