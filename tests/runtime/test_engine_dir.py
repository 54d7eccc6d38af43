from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import ConfigError, EngineDir, EngineManifest, engine_dir
from qwenrt.runtime.engine_dir import Limits, ModelSpec, write_engine_dir

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


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with write_engine_dir(tmp_path / "out") as writer:
            (writer.path / "model.onnx").write_text("graph")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def hang_while_writing(out: Path) -> None:
    with write_engine_dir(out) as writer:
        (writer.path / "started").touch()
        time.sleep(60)


def test_a_killed_writer_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hang_while_writing, args=(tmp_path / "out",))
    process.start()
    while not list(tmp_path.glob(".out.partial-*/started")):
        time.sleep(0.01)
    write(tmp_path / "other")
    assert list(tmp_path.glob(".out.partial-*")), "a live writer's folder was removed"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_an_engine_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out)
    with pytest.raises(ConfigError, match="exists; choose another name or pass --force"):
        write(out)
    write(out, overwrite=True, text="other weights")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "other weights"


def count_absences(path: Path, absences: Synchronized[int], stop: Path) -> None:
    while not stop.exists():
        absences.value += not path.exists()


def test_an_engine_that_is_replaced_is_there_all_the_time(tmp_path: Path) -> None:
    write(tmp_path / "out")
    context = multiprocessing.get_context("fork")
    absences = context.Value("i", 0)
    watcher = context.Process(
        target=count_absences, args=(tmp_path / "out" / "engine.json", absences, tmp_path / "stop")
    )
    watcher.start()
    for round_ in range(100):
        write(tmp_path / "out", overwrite=True, text=str(round_))
    (tmp_path / "stop").touch()
    watcher.join()
    assert absences.value == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stop"]


def write_many(out: Path, overwrite: bool, outcomes: Queue[str]) -> None:
    for _ in range(50):
        try:
            write(out, overwrite=overwrite)
            outcomes.put("written")
        except BaseException as error:
            outcomes.put(str(error).replace(str(out), "OUT"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_writers_of_one_folder_at_once_end_with_a_whole_one(tmp_path: Path, overwrite: bool) -> None:
    context = multiprocessing.get_context("fork")
    outcomes: Queue[str] = context.Queue()
    writers = [context.Process(target=write_many, args=(tmp_path / "out", overwrite, outcomes)) for _ in range(4)]
    for writer in writers:
        writer.start()
    counts = Counter(outcomes.get(timeout=60) for _ in range(200))
    for writer in writers:
        writer.join()
    exists = "engine folder OUT exists; choose another name or pass --force to replace it"
    assert counts == ({"written": 200} if overwrite else {"written": 1, exists: 199})
    EngineDir.open(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_folders_cannot_be_exchanged_a_failure_puts_the_old_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(out, text="old")
    monkeypatch.setattr(engine_dir, "_exchanged", lambda one, other: False)
    write(out, overwrite=True, text="new")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "new"
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith("-replaced"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        write(out, overwrite=True, text="newer")
    assert EngineDir.open(out).file("model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["a*", "[ab]", "a**b", "a b\nc", "?", "ü", "-f"])
def test_any_name_will_do_and_only_its_own_leftovers_are_removed(tmp_path: Path, name: str) -> None:
    for leftover in (f".{name}.partial-1", ".aab.partial-1", ".a.partial-1", ".b.partial-1"):
        (tmp_path / leftover).mkdir()
    write(tmp_path / name)
    EngineDir.open(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {name, ".aab.partial-1", ".a.partial-1", ".b.partial-1"}


def test_a_path_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        write(tmp_path / "\udcff" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_an_engine_folder_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for name in ("precious", "file", "link"):
        with pytest.raises(ConfigError, match=f"{name} exists and is not an engine folder"):
            write(tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"


def test_a_parent_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match="cannot write engine folder"):
        write(tmp_path / "file" / "out")


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
