"""`qwenrt compare` finds a fault that was planted, and its verdict says where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.exporter import export
from qwenrt.exporter.rope import RopeSpec
from qwenrt.plugins import reference

from .conftest import Compare
from .faults import Array, Op, doctored, next_head_group, one_slot_further, only_in, rescaled

QUICK = ("--bisect", "--tokens", "8")


def wrong_rope_base(weights: dict[str, Array]) -> None:
    weights["rope"][:] = RopeSpec(theta=1e5).table(*weights["rope"].shape)


def swapped_norms(weights: dict[str, Array]) -> None:
    q_norm, k_norm = (weights[f"model.layers.2.self_attn.{name}_norm.weight"] for name in "qk")
    q_norm[:], k_norm[:] = k_norm.copy(), q_norm.copy()


def one_wrong_weight(weights: dict[str, Array]) -> None:
    weights["model.layers.1.mlp.down_proj.weight"][17, 40] += 2.0


def one_wrong_embedding(weights: dict[str, Array]) -> None:
    weights["model.embed_tokens.weight"][ord("e")] *= 1.1


def wrong_final_norm(weights: dict[str, Array]) -> None:
    weights["model.norm.weight"][5] *= 1.5


@pytest.fixture(params=["transformers", "eager"])
def judge(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_wrong_rope_base_is_seen_in_k_of_every_layer_and_not_at_position_0(
    compare: Compare, engine: Path, tiny_checkpoint: Path, tmp_path: Path, judge: str
) -> None:
    wrong = doctored(engine, tmp_path / "wrong", wrong_rope_base)
    found = compare(wrong, "--reference", tiny_checkpoint, "--against", judge, *QUICK)
    assert found.status == 1
    assert found.bad_parts == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert ": layer 0 is the first of 4 parts out of tolerance by itself: layer 0 K " in found.verdict
    assert "position 0 agrees too, which RoPE leaves as it is: look at RoPE's base" in found.verdict
    assert found.report["bisection"]["nodes"] == ["model.layers.0.self_attn (PagedAttention)"]
    assert found.stderr.startswith(f"qwenrt: error: {wrong} differs from ")
    assert found.stderr.count("\n") == 1


def test_swapped_q_and_k_norms_are_located_in_their_layer(
    compare: Compare, engine: Path, tiny_checkpoint: Path, tmp_path: Path, judge: str
) -> None:
    wrong = doctored(engine, tmp_path / "wrong", swapped_norms)
    found = compare(wrong, "--reference", tiny_checkpoint, "--against", judge, *QUICK)
    assert found.status == 1
    assert found.bad_parts == ["layer 2"]
    assert ": layer 2 is the only part out of tolerance by itself: layer 2 K " in found.verdict
    assert "position 0 differs too, which RoPE leaves as it is: look at k_norm" in found.verdict
    assert found.report["bisection"]["nodes"] == ["model.layers.2.self_attn (PagedAttention)"]


def test_one_wrong_weight_is_located_by_layer_column_and_node(
    compare: Compare, engine: Path, tiny_checkpoint: Path, tmp_path: Path, judge: str
) -> None:
    wrong = doctored(engine, tmp_path / "wrong", one_wrong_weight)
    found = compare(wrong, "--reference", tiny_checkpoint, "--against", judge, *QUICK)
    assert found.status == 1
    assert found.bad_parts == ["layer 1"]
    assert ": layer 1 is the only part out of tolerance by itself: layer 1 output " in found.verdict
    assert found.verdict.endswith("column 17")
    assert "(sequence " in found.verdict
    assert found.report["bisection"]["tensor"] == "model.layers.1.mlp.down_proj"
    assert found.report["bisection"]["last_good"] == "model.layers.1.mlp.mul_1"
    assert found.report["bisection"]["nodes"] == ["model.layers.1.mlp.down_proj (Linear)"]
    assert "at fault: model.layers.1.mlp.down_proj (Linear)" in found.stdout


@pytest.mark.parametrize(
    ("fault", "part", "nodes"),
    [
        # A tied head has the same matrix; the norm's result is no module's that the reference tells of.
        (one_wrong_embedding, ["embedding", "head"], ["model.embed_tokens (Gather)"]),
        (wrong_final_norm, ["head"], ["gather (Gather)", "model.norm (RMSNormalization)", "lm_head (Linear)"]),
    ],
)
def test_what_lies_before_and_after_the_layers_is_compared_too(
    compare: Compare, engine: Path, tiny_checkpoint: Path, tmp_path: Path, fault: Any, part: list[str], nodes: list[str]
) -> None:
    wrong = doctored(engine, tmp_path / "wrong", fault)
    found = compare(wrong, "--reference", tiny_checkpoint, "--against", "eager", *QUICK)
    assert (found.status, found.bad_parts) == (1, part)
    assert found.report["bisection"]["nodes"] == nodes


def test_a_float16_overflow_is_located_by_layer_row_and_head(
    compare: Compare, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The product of v_proj and o_proj is what it was, but V no longer fits the float16 cache."""
    prefix = "model.layers.2.self_attn."
    large = rescaled(
        tiny_checkpoint, tmp_path / "large", {prefix + "v_proj.weight": 1e5, prefix + "o_proj.weight": 1e-5}
    )
    export(large, tmp_path / "float32", block_size=8)
    assert compare(tmp_path / "float32", "--reference", large, *QUICK).status == 0
    export(large, tmp_path / "float16", block_size=8, kv_dtype="float16")
    found = compare(tmp_path / "float16", "--reference", large, *QUICK)
    assert found.status == 1
    assert found.bad_parts == ["layer 2"]
    assert (
        ": layer 2 is the only part out of tolerance by itself: layer 2 V: batch prefill, sequence 0, " in found.verdict
    )
    assert "key/value head 0: has Inf here, and " in found.verdict
    assert found.report["bisection"]["nodes"] == ["model.layers.2.self_attn (PagedAttention)"]
    assert any(check["measure"] == "greedy tokens" and "nan as a logit" in check["note"] for check in found.failed)


@pytest.mark.parametrize("layer", [0, 3])
def test_k_and_v_one_slot_further_are_found_where_they_are(
    compare: Compare, engine: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    plant(monkeypatch, only_in(layer, engine, one_slot_further(reference.paged_attention)))
    found = compare(engine, "--reference", tiny_checkpoint, "--backend", "numpy", *QUICK)
    assert found.status == 1
    assert found.bad_parts == [f"layer {layer}"]
    assert f": layer {layer} is the only part out of tolerance by itself: layer {layer} K " in found.verdict
    assert "written 1 slot further: sequence 0, position 0 is in block " in found.verdict
    stray = [check["where"] for check in found.failed if check["measure"] == f"layer {layer} slots"]
    assert "was written, and no token of this step belongs there" in stray[0]


def test_a_head_map_that_is_off_by_one_is_located_by_layer_and_heads(
    compare: Compare, engine: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads 0 and 1 share K and V, and so do 2 and 3: only 1 and 3 get others'."""
    plant(monkeypatch, only_in(1, engine, next_head_group(reference.paged_attention)))
    found = compare(engine, "--reference", tiny_checkpoint, "--backend", "numpy", *QUICK)
    assert found.status == 1
    assert found.bad_parts == ["layer 1"]
    assert ": layer 1 is the only part out of tolerance by itself: layer 1 attention " in found.verdict
    assert "K and V agree, query heads 1, 3 of 4 off" in found.verdict
    assert found.report["bisection"]["tensor"] == "model.layers.1.self_attn"


def plant(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """Let the NumPy backend compute attention by `op`."""
    monkeypatch.setattr(reference, "paged_attention", op)


def test_errors_of_all_layers_that_only_add_up_are_told_from_a_fault_in_one(
    compare: Compare, engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Every matrix a little off: no part by itself is, at a tolerance that the whole does not meet."""

    def a_little_off(weights: dict[str, Array]) -> None:
        random = np.random.default_rng(0)
        for name, values in weights.items():
            if name.startswith("model.layers.") and values.ndim == 2:
                values *= 1 + 1e-3 * random.standard_normal(values.shape, np.float32)

    wrong = doctored(engine, tmp_path / "wrong", a_little_off)
    limits = (
        "--tolerance",
        "layer=0.02",
        "--tolerance",
        "kv=0.02",
        "--tolerance",
        "logits=1e-4",
        "--tolerance",
        "kl=1",
    )
    found = compare(wrong, "--reference", tiny_checkpoint, "--against", "eager", *limits, *QUICK)
    assert (found.status, found.bad_parts, found.report["bisection"]) == (1, [], None)
    assert "every part is within tolerance by itself; the errors of all of them add up" in found.stdout
    assert "--bisect: no part of the graph is out of tolerance by itself" in found.stdout
