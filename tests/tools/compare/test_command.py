"""`qwenrt compare` on engines that are right: what it says, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter import export
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint

from ..command import qwenrt
from ..conftest import Here
from .conftest import Compare, Outcome

DEMO = Path(__file__).parents[3] / "tools" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "engine"
    export(DEMO, out)
    return out


def worst(found: Outcome, measure: str) -> float:
    return max(check["value"] for check in found.report["checks"] if check["measure"].startswith(measure))


def test_the_demo_engine_equals_transformers_at_the_strict_tolerances(compare: Compare, demo: Path) -> None:
    found = compare(demo, "--reference", DEMO, "--layers", "--bisect")
    assert (found.status, found.stderr) == (0, "")
    assert re.fullmatch(r"PASS: all \d+ checks against transformers [\d.]+ float32", found.verdict)
    assert found.report["tolerances"] == {"layer": 1e-4, "kv": 1e-4, "logits": 1e-3, "kl": 1e-5, "nll": 1e-4}
    # Far below what is allowed, so that the tolerance is not what makes it pass.
    assert worst(found, "logits") < 1e-4
    assert worst(found, "KV cache") < 2e-5
    assert worst(found, "layer") < 2e-5
    assert [part["name"] for part in found.report["layers"]] == ["embedding", *(f"layer {i}" for i in range(4)), "head"]
    assert set(found.report["layers"][1]["own"]) == {"K", "V", "attention", "output"}
    assert [one["position"] for one in found.report["divergences"]] == [None] * 4
    assert [one["top1"] for one in found.report["logits"]] == [1.0] * 3
    assert "--bisect: no part of the graph is out of tolerance by itself" in found.report["notes"]


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-untied-bias": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen3-windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3-one-kv-head": {"num_key_value_heads": 1, "head_dim": 64},
    "qwen3-bfloat16": {"dtype": "bfloat16"},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    "qwen2": {},
    "llama": {},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_equals_transformers_and_our_modules_layer_by_layer(
    compare: Compare, tmp_path: Path, name: str
) -> None:
    config = {"num_hidden_layers": 2, **CONFIGS[name]}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=3, family=name.split("-")[0], **config)
    export(checkpoint, tmp_path / "engine", block_size=4)
    for judge in ("transformers", "eager"):
        found = compare(tmp_path / "engine", "--reference", checkpoint, "--against", judge, "--layers", "--tokens", "4")
        assert (found.status, found.stderr) == (0, "")
        assert worst(found, "logits") < 1e-4
        assert len(found.report["layers"]) == 4


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_engines_that_give_no_tokens_equal_transformers_too(compare: Compare, tmp_path: Path, task: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", task=task, num_labels=1, num_hidden_layers=2)
    engine = export(checkpoint, tmp_path / "engine", block_size=4).path
    for judge in ("transformers", "eager"):
        found = compare(engine, "--reference", checkpoint, "--against", judge, "--layers")
        assert (found.status, found.stderr) == (0, "")
        assert worst(found, "logits") < 1e-4
        assert "greedy tokens were not compared: the engine gives none" in found.report["notes"]
    (tmp_path / "text").write_text("a text")
    found = compare(engine, "--reference", checkpoint, "--perplexity", tmp_path / "text")
    assert found.status == 1
    assert f"is for the task {task}, which has no perplexity" in found.stderr


@pytest.mark.parametrize(
    ("weights", "kv_dtype"), [("float16", "float16"), ("bfloat16", "float32"), ("float32", "int8")]
)
def test_rounded_formats_pass_at_their_tolerances_and_not_at_the_strict_ones(
    compare: Compare, tiny_checkpoint: Path, tmp_path: Path, weights: str, kv_dtype: str
) -> None:
    export(tiny_checkpoint, tmp_path / "engine", weights=weights, kv_dtype=kv_dtype, block_size=8)
    arguments = (tmp_path / "engine", "--reference", tiny_checkpoint, "--layers", "--tokens", "16")
    found = compare(*arguments)
    assert (found.status, found.stderr) == (0, "")
    assert compare(*arguments, "--tolerance", "kv=1e-4").status == 1
    assert compare(*arguments, "--tolerance", "layer=1e-5", "--tolerance", "logits=1e-4").status == 1


def test_weights_stored_as_the_checkpoint_stores_them_get_nothing_allowed(compare: Compare, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", dtype="bfloat16", num_hidden_layers=1)
    export(checkpoint, tmp_path / "engine", weights="bfloat16")
    found = compare(tmp_path / "engine", "--reference", checkpoint, "--tokens", "0")
    assert (found.status, found.report["tolerances"]["logits"]) == (0, 1e-3)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_other_backends_are_compared_too(compare: Compare, engine: Path, tiny_checkpoint: Path, backend: str) -> None:
    found = compare(engine, "--backend", backend, "--reference", tiny_checkpoint, "--layers", "--tokens", "4")
    assert (found.status, found.stderr) == (0, "")
    assert found.report["backend"] == backend
    assert ("greedy tokens were not compared" in found.stdout) == (backend == "numpy")


def test_several_references_are_each_compared(here: Here, engine: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    names = ("eager", "torch", "numpy", "onnxruntime", "transformers:bfloat16")
    against = [argument for name in names for argument in ("--against", name)]
    file = tmp_path / "all.json"
    status, stdout, stderr = here(
        "compare", engine, "--reference", tiny_checkpoint, *against, "--tokens", "0", "--json", file
    )
    assert (status, stderr) == (0, "")
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert len(report["comparisons"]) == stdout.count("PASS: all ") == 5
    same = report["comparisons"][3]
    assert same["reference"] == "onnxruntime (the engine's graph)"
    # The same kernels part by part: not a bit differs.
    assert {check["value"] for check in same["checks"]} == {0.0}
    assert report["comparisons"][4]["tolerances"]["logits"] > 0.1


def test_without_a_checkpoint_the_judge_is_the_ops_definition(compare: Compare, engine: Path) -> None:
    found = compare(engine, "--tokens", "0")
    assert (found.status, found.report["reference"]) == (0, "numpy (the engine's graph)")
    assert "proves what executes the graph, not the export; for that give --reference CHECKPOINT" in found.stdout


def test_the_report_is_one_file_with_plots_and_nothing_outside_it(
    here: Here, engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    status, _, _ = here("compare", engine, "--reference", tiny_checkpoint, "--layers", "--tokens", "4", "--html", file)
    text = file.read_text(encoding="utf-8")
    assert status == 0
    assert text.count("<svg") == 3
    assert "PASS: all" in text
    assert not re.search(r"""<script|<link|<img|(?:src|href)\s*=\s*["'](?!#)""", text)
    assert len(text) < 300_000


def test_a_name_cannot_put_markup_into_the_report(here: Here, engine: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<b>engine&"
    odd.symlink_to(engine)
    here("compare", odd, "--tokens", "0", "--html", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;engine&amp;" in text
    assert "<b>engine" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tolerance", "logits"],
        ["--tolerance", "speed=1"],
        ["--tolerance", "kv=-1"],
        ["--tolerance", "kv=nan"],
        ["--tokens", "-1"],
        ["--window", "1"],
        ["--backend", "magic"],
        ["--no-such-option"],
    ],
)
def test_bad_usage_has_status_2(here: Here, engine: Path, arguments: list[str]) -> None:
    status, stdout, stderr = here("compare", engine, *arguments)
    assert (status, stdout) == (2, "")
    assert "Error: " in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "magic"], "'magic' is no reference; there are transformers, eager, numpy, torch, onnxruntime"),
        (["--against", "torch:float16"], "torch computes in the engine's own types"),
        (["--against", "eager"], "--against eager needs the checkpoint: give --reference CHECKPOINT"),
        (["--against", "eager:int8"], "dtype is 'int8', must be float32, float16, bfloat16"),
        (["--reference", "no/such/folder/at/all"], "no/such/folder/at/all does not exist"),
        (["--inputs", "no-such-file.json"], "no-such-file.json does not exist; record batches with"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    here: Here, engine: Path, arguments: list[str], message: str
) -> None:
    status, stdout, stderr = here("compare", engine, *arguments)
    assert (status, stdout) == (1, "")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_checkpoint_of_another_shape_is_refused_by_the_first_difference(
    here: Here, engine: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=2)
    status, stdout, stderr = here("compare", engine, "--reference", other)
    assert (status, stdout) == (1, "")
    assert "has num_layers 2, the engine 4; give the checkpoint that the engine was exported from" in stderr


def test_a_checkpoint_of_the_same_shape_with_other_weights_fails_at_the_embedding(
    compare: Compare, engine: Path, tmp_path: Path
) -> None:
    found = compare(engine, "--reference", write_checkpoint(tmp_path / "other", seed=9), "--tokens", "4")
    assert found.status == 1
    assert "embedding is the first of 6 parts out of tolerance by itself" in found.verdict


def test_packages_of_the_extra_that_are_missing_are_named(engine: Path, tiny_checkpoint: Path) -> None:
    for blocked, arguments in (("polygraphy", ()), ("matplotlib", ("--html", "x.html"))):
        status, stdout, stderr = qwenrt("compare", engine, *arguments, blocked=(blocked,))
        assert (status, stdout) == (1, "")
        assert f"this needs {blocked}; install it with: pip install 'qwenrt[compare]'" in stderr
        assert stderr.count("\n") == 1
    status, stdout, stderr = qwenrt(
        "compare", engine, "--reference", tiny_checkpoint, "--tokens", "0", blocked=("transformers",)
    )
    assert (status, stderr) == (0, "")
    assert "PASS: all 11 checks against eager float32" in stdout


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 256},
        {"max_num_seqs": 2, "max_num_batched_tokens": 3, "max_model_len": 4},
        {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 1},
    ],
)
def test_limits_of_a_small_engine_are_kept(compare: Compare, tmp_path: Path, limits: dict[str, int]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    export(checkpoint, tmp_path / "engine", block_size=2, **limits)
    found = compare(tmp_path / "engine", "--reference", checkpoint, "--tokens", "8")
    assert (found.status, found.stderr) == (0, "")
    assert ("greedy tokens were not compared" in found.stdout) == (limits["max_model_len"] == 1)


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine of the tiny checkpoint with places for adapters, and an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    export(tiny_checkpoint, folder / "engine", block_size=8, max_lora_rank=4)
    return folder / "engine", write_adapter(folder / "adapter", tiny_checkpoint)


@pytest.mark.parametrize("against", ["transformers", "eager", "numpy"])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_an_engine_with_places_for_adapters_is_compared_with_one_and_without(
    compare: Compare, adapters: tuple[Path, Path], tiny_checkpoint: Path, against: str, with_adapter: bool
) -> None:
    engine, adapter = adapters
    options = ["--lora", adapter] if with_adapter else []
    found = compare(engine, "--reference", tiny_checkpoint, "--against", against, "--layers", "--tokens", "6", *options)
    assert (found.status, found.stderr) == (0, "")


def test_an_adapter_that_one_side_lacks_is_a_difference(
    compare: Compare, adapters: tuple[Path, Path], engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Merged into the reference alone; then into both, where it was merged at export."""
    _, adapter = adapters
    options = ["--reference", tiny_checkpoint, "--against", "eager", "--tokens", "0"]
    found = compare(engine, *options, "--lora", adapter)
    assert found.status == 1
    assert found.bad_parts[0] == "layer 0"
    export(tiny_checkpoint, tmp_path / "merged", lora=adapter)
    assert compare(tmp_path / "merged", *options, "--lora", adapter).status == 0


def test_an_adapter_that_does_not_fit_is_named(
    compare: Compare, adapters: tuple[Path, Path], engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    slots, _ = adapters
    large = write_adapter(tmp_path / "large", tiny_checkpoint, r=5)
    found = compare(slots, "--reference", tiny_checkpoint, "--lora", large)
    assert (found.status, found.stdout) == (1, "")
    assert "large has rank 5, this engine takes 4 at most" in found.stderr
    found = compare(engine, "--lora", large)
    assert "has no places for adapters; --lora is then for the checkpoint: give --reference" in found.stderr
