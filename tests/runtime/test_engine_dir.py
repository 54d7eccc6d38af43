from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter.engine_writer import write_engine_dir
from qwenrt.runtime import ConfigError, EngineDir, EngineManifest
from qwenrt.runtime.engine_dir import Limits, ModelSpec

MANIFEST = EngineManifest(
    producer="qwenrt test",
    target="onnxruntime",
    model=ModelSpec(
        architecture="Qwen3ForCausalLM",
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rope_type="default",
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        num_experts=0,
        num_experts_per_token=0,
        moe_intermediate_size=0,
        num_parameters=596049920,
        num_active_parameters=596049920,
    ),
    dtype="float32",
    weights="float32",
    kv_dtype="float16",
    block_size=32,
    limits=Limits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096),
    eos_token_ids=(151645, 151643),
    opset=23,
    plugin_version=1,
)


RANGE = {"min": 1, "opt": 1, "max": 1}
PLAN = {
    "file": "model.plan",
    "compute_capability": "9.0",
    "tensorrt_version": "10.14.1.48",
    "plan_version": 1,
    "stripped": False,
    "activation_bytes": 0,
    "profiles": [
        {"name": "decode"} | dict.fromkeys(("num_tokens", "num_seqs", "num_logits", "max_blocks", "num_blocks"), RANGE)
    ],
}
"""As it was written before ranks had plans of their own."""


def write(out: Path, *, overwrite: bool = False, text: str = "weights") -> None:
    with write_engine_dir(out, overwrite=overwrite) as writer:
        (writer.path / "model.onnx").write_text("graph")
        (writer.path / "model.safetensors").write_text(text)
        writer.seal(MANIFEST)


def edit(out: Path, **changes: Any) -> None:
    path = out / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_written_folder_opens_with_the_manifest_that_was_sealed(tmp_path: Path) -> None:
    write(tmp_path / "out")
    engine = EngineDir.open(tmp_path / "out")
    assert dataclasses.replace(engine.manifest, files={}) == MANIFEST
    assert engine.manifest.files.keys() == {"model.onnx", "model.safetensors"}
    engine.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_kv_bytes_per_token_counts_k_and_v_of_every_layer() -> None:
    assert MANIFEST.kv_bytes_per_token == 28 * 2 * 8 * 128 * 2
    with_scales = dataclasses.replace(MANIFEST, kv_dtype="int8")
    assert with_scales.kv_bytes_per_token == 28 * 2 * 8 * (128 + 4)


def test_kv_bytes_per_token_counts_a_shared_head_for_every_rank_that_has_it() -> None:
    assert dataclasses.replace(MANIFEST, tp=2).kv_bytes_per_token == MANIFEST.kv_bytes_per_token
    assert dataclasses.replace(MANIFEST, tp=16).kv_bytes_per_token == 2 * MANIFEST.kv_bytes_per_token


def test_a_manifest_from_before_there_were_ranks_has_one(tmp_path: Path) -> None:
    write(tmp_path / "out")
    path = tmp_path / "out" / "engine.json"
    values = json.loads(path.read_text())
    assert values.pop("tp") == 1
    values["files"]["model.plan"] = values["files"]["model.onnx"]
    path.write_text(json.dumps({**values, "plans": [PLAN]}))
    manifest = EngineManifest.from_file(path)
    assert manifest.tp == 1
    assert [plan.rank for plan in manifest.plans] == [0]
    assert (manifest.graph_name(), dataclasses.replace(manifest, tp=2).graph_name(1)) == (
        "model.onnx",
        "model.rank1.onnx",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this qwenrt reads 1"),
        ({"block_size": 10**4000}, "block_size must be int, not '1000.{36}'"),
        ({"model": {**dataclasses.asdict(MANIFEST.model), "rope_theta": 10**400}}, "model.rope_theta must be float"),
        ({"format_version": "1"}, "format_version is '1'"),
        ({"surprise": 1}, "field surprise is unknown"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "block_size must be int"),
        ({"block_size": "16"}, "block_size must be int"),
        (
            {"limits": {**dataclasses.asdict(MANIFEST.limits), "max_model_len": 2**31 - 1}},
            "max_model_len is 2147483647",
        ),
        ({"plugin_version": 99}, "was made for PagedAttention version 99, this qwenrt has 1; export the engine again"),
        ({"kv_dtype": "float8"}, "kv_dtype is 'float8'"),
        ({"tp": 0}, r"tp is 0, must be 1 to model.num_heads \(16\)"),
        ({"tp": 17}, r"tp is 17, must be 1 to model.num_heads \(16\)"),
        ({"plans": [{**PLAN, "rank": 1}]}, "rank of model.plan is 1, tp is 1"),
        ({"plans": [PLAN]}, "plans holds 'model.plan', which is not in files"),
        ({"plans": ["model.plan"]}, "plans. must be an object"),
        ({"eos_token_ids": [151936]}, "eos_token_ids holds 151936"),
        ({"eos_token_ids": 5}, "eos_token_ids must be a list"),
        ({"limits": {"max_num_seqs": 1}}, "field limits.max_model_len is missing"),
        ({"limits": None}, "limits. must be an object"),
        ({"files": {"../model.onnx": {"size": 1, "sha256": ""}}}, "'../model.onnx', which is not a plain file name"),
        ({"files": {"absent": {"size": 1, "sha256": ""}}}, "absent is missing"),
        ({"files": {"model.onnx": {"size": 9, "sha256": ""}}}, "model.onnx has 5 bytes, the manifest says 9"),
    ],
)
def test_a_wrong_manifest_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "out")
    edit(tmp_path / "out", **changes)
    with pytest.raises(ConfigError, match=message):
        EngineDir.open(tmp_path / "out")


def test_a_manifest_that_is_no_json_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out")
    path = tmp_path / "out" / "engine.json"
    for content in (b"", b"{", b"[" * 100_000, b"\xff", b"[]", b" " * (2 << 20), b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"engine\.json"):
            EngineDir.open(tmp_path / "out")


def test_changed_and_replaced_files_are_noticed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out)
    (out / "model.onnx").write_text("hparg")
    with pytest.raises(ConfigError, match=r"model\.onnx was changed after the export"):
        EngineDir.open(out)
    (out / "model.onnx").unlink()
    (out / "model.onnx").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"model\.onnx is missing or not a plain file"):
        EngineDir.open(out)


def test_opening_something_else_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; make one with: qwenrt export"):
        EngineDir.open(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a checkpoint: run qwenrt export on it first"):
        EngineDir.open(tmp_path)
