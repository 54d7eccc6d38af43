"""Exports that are split over ranks: one weight file, of which each rank's graph names its own slices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from safetensors.numpy import load_file

from qwenrt.exporter import export
from qwenrt.exporter.config import ModelConfig
from qwenrt.exporter.tensor_parallel import TensorParallel
from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import register_onnx_schemas
from qwenrt.runtime.engine_dir import EngineDir
from tests.checkpoints import write_checkpoint

Arrays = dict[str, npt.NDArray[Any]]
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False, "attention_bias": True},
    "biases": {"family": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "shared-kv": {"num_key_value_heads": 1},
    "experts": {
        "family": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "attention_bias": True,
    },
}


@pytest.fixture(scope="module")
def split_engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """The tiny checkpoint over two ranks."""
    return export(tiny_checkpoint, tmp_path_factory.mktemp("split") / "engine", tp=2)


def initializers(engine: Path, rank: int) -> Arrays:
    """A rank's parameters as the onnx package reads them through its graph."""
    graph = onnx.load(engine / f"model.rank{rank}.onnx").graph
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def expected_of_layer(source: Arrays, prefix: str, rank: int, size: int) -> Arrays:
    """What a rank should have of a layer's split parameters, from the checkpoint's tensors."""
    config = {name.removeprefix(prefix): value for name, value in source.items() if name.startswith(prefix)}

    def rows(name: str, part: int = rank, parts: int = size) -> npt.NDArray[Any]:
        return np.split(config[name], parts)[part]

    def columns(name: str) -> npt.NDArray[Any]:
        return np.split(config[name], size, axis=1)[rank]

    found: Arrays = {}
    heads = config["self_attn.k_proj.weight"].shape[0] // 32
    for kind in ("weight", "bias") if "self_attn.q_proj.bias" in config else ("weight",):
        q, k, v = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
        if heads < size:
            part = rank * heads // size
            found[f"self_attn.qkv_proj.q_proj.{kind}"] = rows(q)
            found[f"self_attn.qkv_proj.kv_proj.{kind}"] = np.concatenate([rows(k, part, heads), rows(v, part, heads)])
        else:
            found[f"self_attn.qkv_proj.{kind}"] = np.concatenate([rows(q), rows(k), rows(v)])
    found["self_attn.o_proj.weight"] = columns("self_attn.o_proj.weight")
    if "mlp.gate.weight" in config:
        experts = [f"mlp.experts.{expert}" for expert in range(4)]
        gate_ups = [rows(f"{expert}.{part}_proj.weight") for expert in experts for part in ("gate", "up")]
        found["mlp.experts.gate_up_proj"] = np.concatenate(gate_ups)
        found["mlp.experts.down_proj"] = np.concatenate([columns(f"{expert}.down_proj.weight") for expert in experts])
    else:
        for kind in ("weight", "bias") if "mlp.gate_proj.bias" in config else ("weight",):
            gate_up = [rows(f"mlp.{part}_proj.{kind}") for part in ("gate", "up")]
            found[f"mlp.gate_up_proj.{kind}"] = np.concatenate(gate_up)
        found["mlp.down_proj.weight"] = columns("mlp.down_proj.weight")
    return {prefix + name: value for name, value in found.items()}


def check_slices(checkpoint: Path, one: Path, split: Path, size: int) -> None:
    """The weight file of `size` ranks holds what that of one holds and no more, and every rank finds its slices in it."""
    whole, stored = (load_file(engine / "model.safetensors") for engine in (one, split))
    assert sum(value.nbytes for value in stored.values()) == sum(value.nbytes for value in whole.values())
    one_size, split_size = ((engine / "model.safetensors").stat().st_size for engine in (one, split))
    assert split_size <= one_size + 4096
    source = load_file(checkpoint / "model.safetensors")
    head = source.get("lm_head.weight", source["model.embed_tokens.weight"])
    layers = sum(name.endswith("input_layernorm.weight") for name in source)
    for rank in range(size):
        expected = {"lm_head.weight": np.split(head, size)[rank]}
        for layer in range(layers):
            expected |= expected_of_layer(source, f"model.layers.{layer}.", rank, size)
        found = initializers(split, rank)
        for parameter, value in expected.items():
            np.testing.assert_array_equal(found.pop(parameter), value, parameter)
        # What is not split is every rank's, as one rank has it.
        for parameter, value in found.items():
            np.testing.assert_array_equal(value, whole[parameter], parameter)


def test_ranks_share_one_file_of_the_size_of_one_rank_and_each_has_its_slices(
    tiny_checkpoint: Path, tiny_engine: Path, split_engine: EngineDir
) -> None:
    check_slices(tiny_checkpoint, tiny_engine, split_engine.path, 2)


CASES = [("shared-kv", 4), ("experts", 2)]
SLOW = [("biases", 2), ("untied", 2), ("shared-kv", 2), ("untied", 4), ("experts", 4)]


@pytest.mark.parametrize(("name", "size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_slices_of_other_shapes(name: str, size: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=5, num_hidden_layers=2, **SHAPES[name])
    one, split = (export(checkpoint, tmp_path / str(ranks), tp=ranks).path for ranks in (1, size))
    check_slices(checkpoint, one, split, size)


def test_ranks_graphs_differ_in_the_places_of_weights_alone(split_engine: EngineDir) -> None:
    assert split_engine.manifest.tp == 2
    assert not (split_engine.path / "model.onnx").exists()
    graphs = [onnx.load(split_engine.path / f"model.rank{rank}.onnx", load_external_data=False) for rank in range(2)]
    for graph in graphs:
        for tensor in graph.graph.initializer:
            del tensor.external_data[:]
    assert graphs[0] == graphs[1]


def test_two_products_of_a_layer_are_summed_and_logits_gathered(split_engine: EngineDir) -> None:
    engine = split_engine.path
    register_onnx_schemas()
    onnx.checker.check_model(engine / "model.rank1.onnx", full_check=True, check_custom_domain=True)
    graph = onnx.load(engine / "model.rank1.onnx", load_external_data=False).graph
    operators = Counter(node.op_type for node in graph.node)
    assert (operators["AllReduce"], operators["AllGather"], operators["PagedAttention"]) == (8, 1, 4)
    names = {node.output[0]: node.name for node in graph.node if node.op_type in ("AllReduce", "AllGather")}
    assert {"model.layers.3.self_attn.o_proj.all_reduce", "model.layers.3.mlp.down_proj.all_reduce"} < set(
        names.values()
    )
    assert names["logits"] == "lm_head.all_gather"
    shapes = {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    assert shapes["model.layers.0.self_attn.qkv_proj"] == ["T", (2 + 2 * 1) * 32]
    assert shapes["kv_cache.0"] == ["num_blocks", 2, 1, 32, 32]
    assert shapes["lm_head"] == ["R", 160]
    assert shapes["logits"] == ["R", 320]


def test_a_bias_after_a_sum_is_added_once(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, **SHAPES["biases"])
    graph = onnx.load(export(checkpoint, tmp_path / "engine", tp=2).path / "model.rank0.onnx").graph
    producers = {output: node for node in graph.node for output in node.output}
    users = {node.input[1]: node for node in graph.node if len(node.input) > 1}
    for module in ("self_attn.o_proj", "mlp.down_proj"):
        addition = users[f"model.layers.0.{module}.bias"]
        assert addition.op_type == "Add"
        assert producers[addition.input[0]].op_type == "AllReduce"


@pytest.mark.parametrize(
    ("size", "shape", "message"),
    [
        (3, {}, r"tp is 3, which does not divide num_attention_heads \(4\); for this model it must be 1, 2 or 4"),
        (0, {}, "tp is 0; for this model it must be 1, 2 or 4"),
        (8, {}, r"tp is 8, which does not divide num_attention_heads \(4\)"),
        (4, {"intermediate_size": 130}, r"does not divide intermediate_size \(130\); for this model it must be 1 or 2"),
        (2, {"vocab_size": 321}, r"does not divide vocab_size \(321\); for this model it must be 1$"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 132, "vocab_size": 324},
            r"num_key_value_heads \(3\) and is no multiple of it; for this model it must be 1, 3 or 6",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_model(
    size: int, shape: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, **shape)
    with pytest.raises(ConfigError, match=message):
        export(checkpoint, tmp_path / "engine", tp=size)
    assert not (tmp_path / "engine").exists()


def test_what_is_not_split_is_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match="weights is 'int8' and tp is 2: what is split over ranks is stored in float32"
    ):
        export(tiny_checkpoint, tmp_path / "engine", weights="int8", tp=2)
    with pytest.raises(ConfigError, match="max_lora_rank is 4 and tp is 2"):
        export(tiny_checkpoint, tmp_path / "engine", max_lora_rank=4, tp=2)
    with pytest.raises(
        ConfigError, match="weights is 'fp8' and tp is 2: what is split over ranks is stored in bfloat16"
    ):
        export(tiny_checkpoint, tmp_path / "engine", target="tensorrt", weights="fp8", tp=2)


def test_more_ranks_than_kv_heads_share_them_in_order(tiny_checkpoint: Path) -> None:
    tp = TensorParallel.of(ModelConfig.from_dir(tiny_checkpoint), 4)
    parameter = "model.layers.0.self_attn.qkv_proj.kv_proj.weight"
    assert [tp.place(parameter, rank, tied=True)[1:] for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert tp.rank_view(ModelConfig.from_dir(tiny_checkpoint)).num_kv_heads == 1
