"""The exported graph and weight file: structure, names, shapes, and that ONNX Runtime computes what eager PyTorch does."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qwenrt.exporter import ModelConfig, export
from qwenrt.exporter.modeling import Qwen3ForCausalLM, parameter_sources
from qwenrt.plugins import ConfigError, reference
from qwenrt.plugins.library import cpu_library
from qwenrt.plugins.schema import register_onnx_schemas
from qwenrt.runtime import EngineDir
from tests.checkpoints import write_checkpoint

from .eager import Step, load_module, make_step, run, scattered_blocks

BLOCK_SIZE = 32


def graph_of(engine: Path) -> onnx.GraphProto:
    return onnx.load(engine / "model.onnx", load_external_data=False).graph


def shape_of(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_a_layer_is_four_products_two_norms_one_attention_and_swiglu(tiny_engine: Path) -> None:
    graph = graph_of(tiny_engine)
    layers = Counter(
        (match[1], node.op_type) for node in graph.node if (match := re.match(r"model\.layers\.(\d+)\.", node.name))
    )
    layer = {"Linear": 4, "RMSNormalization": 2, "PagedAttention": 1, "Add": 2, "SwiGlu": 1}
    assert layers == {(str(i), op): count for i in range(4) for op, count in layer.items()}
    rest = [(node.name, node.op_type) for node in graph.node if not node.name.startswith("model.layers.")]
    assert rest == [
        ("model.embed_tokens", "Gather"),
        ("gather", "Gather"),
        ("model.norm", "RMSNormalization"),
        ("lm_head", "Linear"),
    ]


def test_names_are_those_of_modules_and_parameters(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    graph = graph_of(tiny_engine)
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    for module in (
        "self_attn",
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
        "input_layernorm",
    ):
        assert f"model.layers.3.{module}" in names
    for node in graph.node:
        values = [name for name in node.output if name != "logits" and not name.startswith("kv_cache_out.")]
        assert values == [node.name] or values == [f"{node.name}.{i}" for i in range(len(values))]
    config = ModelConfig.from_dir(tiny_checkpoint)
    with torch.device("meta"):
        state = Qwen3ForCausalLM(config, block_size=32, max_model_len=256).state_dict()
    assert {tensor.name: list(tensor.dims) for tensor in graph.initializer} == {
        k: list(v.shape) for k, v in state.items()
    }
    assert not any(node.doc_string or node.metadata_props for node in graph.node)


def test_inputs_and_outputs_are_those_of_the_design(tiny_engine: Path) -> None:
    graph = graph_of(tiny_engine)
    cache = ["num_blocks", 2, 2, BLOCK_SIZE, 32]
    int32, float32 = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
    layers = range(4)
    assert [(v.name, v.type.tensor_type.elem_type, shape_of(v)) for v in graph.input] == [
        ("input_ids", int32, ["T"]),
        ("positions", int32, ["T"]),
        ("block_tables", int32, ["S", "max_blocks"]),
        ("seq_lens", int32, ["S"]),
        ("query_start", int32, ["S + 1"]),
        ("logits_indices", int32, ["R"]),
        *((f"kv_cache.{i}", float32, cache) for i in layers),
    ]
    assert [(v.name, v.type.tensor_type.elem_type, shape_of(v)) for v in graph.output] == [
        ("logits", float32, ["R", 320]),
        *((f"kv_cache_out.{i}", float32, cache) for i in layers),
    ]


def test_every_value_has_a_shape_and_the_batch_stays_symbolic(tiny_engine: Path) -> None:
    graph = graph_of(tiny_engine)
    shapes = {value.name: shape_of(value) for value in (*graph.value_info, *graph.output)}
    for name in itertools.chain.from_iterable(node.output for node in graph.node):
        assert shapes[name][0] in ("T", "R", "num_blocks"), name
        assert all(isinstance(size, int) and size > 0 for size in shapes[name][1:]), name
    assert shapes["model.layers.2.self_attn"] == ["T", 4 * 32], "heads * head_dim, which is not hidden_size"
    assert shapes["model.layers.2.self_attn.qkv_proj"] == ["T", (4 + 2 * 2) * 32]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_shape_inference_holds_for_any_number_of_kv_heads(kv_heads: int, tmp_path: Path) -> None:
    """Case E03: from the inputs alone, strictly, with our schema; and by the stock package from what is recorded."""
    folder = write_checkpoint(tmp_path / "checkpoint", num_key_value_heads=kv_heads, num_hidden_layers=1)
    export(folder, tmp_path / "engine")
    path = tmp_path / "engine" / "model.onnx"
    register_onnx_schemas()
    onnx.checker.check_model(path, full_check=True, check_custom_domain=True)
    model = onnx.load(path, load_external_data=False)
    recorded = {value.name: shape_of(value) for value in model.graph.value_info}
    del model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert {value.name: shape_of(value) for value in inferred.graph.value_info} == recorded
    assert recorded["model.layers.0.self_attn"] == ["T", 128]
    code = (
        "import onnx, sys; path = sys.argv[1]; onnx.checker.check_model(path)\n"
        "model = onnx.load(path, load_external_data=False)\n"
        "result = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)\n"
        "assert result.graph.output == model.graph.output\n"
        "assert 'qwenrt' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, env={"PATH": os.environ["PATH"]}, cwd=tmp_path)


class TestWeightFile:
    def test_it_is_a_safetensors_file_whose_tensors_are_the_checkpoints(
        self, tiny_engine: Path, tiny_checkpoint: Path
    ) -> None:
        source = load_file(tiny_checkpoint / "model.safetensors")
        with safe_open(tiny_engine / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = ModelConfig.from_dir(tiny_checkpoint)
        for name, parts in parameter_sources(config).items():
            assert torch.equal(weights.pop(name), torch.cat([source[part] for part in parts]))
        assert weights.keys() == {"rope"}
        np.testing.assert_array_equal(weights["rope"].numpy(), config.rope.table(256, 32))

    def test_onnx_finds_in_it_what_safetensors_does(self, tiny_engine: Path) -> None:
        model = onnx.load(tiny_engine / "model.onnx")
        weights = load_file(tiny_engine / "model.safetensors")
        for tensor in model.graph.initializer:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weights[tensor.name].numpy())

    def test_matrices_start_on_pages(self, tiny_engine: Path) -> None:
        for tensor in graph_of(tiny_engine).initializer:
            data = {entry.key: entry.value for entry in tensor.external_data}
            assert data["location"] == "model.safetensors"
            if int(data["length"]) % 4096 == 0:
                assert int(data["offset"]) % 4096 == 0

    def test_a_tied_embedding_lies_in_it_once(self, tiny_engine: Path) -> None:
        graph = graph_of(tiny_engine)
        uses = [node.name for node in graph.node if "model.embed_tokens.weight" in node.input]
        assert uses == ["model.embed_tokens", "lm_head"]
        size = sum(
            int(entry.value) for tensor in graph.initializer for entry in tensor.external_data if entry.key == "length"
        )
        header = int.from_bytes((tiny_engine / "model.safetensors").read_bytes()[:8], "little") + 8
        assert header % 4096 == 0
        assert (tiny_engine / "model.safetensors").stat().st_size == header + size


def session(engine: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(engine / "model.onnx", options, providers=["CPUExecutionProvider"])


def run_onnx(
    graph: ort.InferenceSession, step: Step, caches: list[npt.NDArray[Any]]
) -> tuple[npt.NDArray[np.float32], list[npt.NDArray[Any]]]:
    feeds = step._asdict() | {f"kv_cache.{i}": cache for i, cache in enumerate(caches)}
    logits, *caches = graph.run(None, feeds)
    return logits, caches


CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {"num_hidden_layers": 2},
    "untied-bias": {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 2},
    "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("name", "weights", "kv_dtype"),
    [
        ("tied", "float32", "float32"),
        ("tied", "bfloat16", "float32"),
        ("tied", "float16", "float16"),
        ("tied", "float32", "int8"),
        ("untied-bias", "float32", "float32"),
        ("untied-bias", "bfloat16", "float32"),
        ("windows", "float32", "float32"),
    ],
)
def test_onnx_runtime_computes_what_eager_pytorch_does(name: str, weights: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", seed=3, **CONFIGS[name])
    engine = export(folder, tmp_path / "engine", weights=weights, kv_dtype=kv_dtype)
    assert (engine.manifest.dtype, engine.manifest.weights, engine.manifest.kv_dtype) == ("float32", weights, kv_dtype)
    module = load_module(folder, block_size=BLOCK_SIZE)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.to(getattr(torch, weights)))
    stored = load_file(engine.path / "model.safetensors")
    for parameter, value in module.named_parameters():
        assert torch.equal(stored[parameter].float(), value), "rounded as torch rounds"
    graph = session(engine.path)
    random = np.random.default_rng(0)
    first, second = random.integers(0, 320, 70).tolist(), random.integers(0, 320, 3).tolist()
    tables = scattered_blocks(2, 3, 8)
    shape = (8, 2, 2, BLOCK_SIZE, engine.manifest.kv_row)
    eager = [torch.zeros(shape, dtype=getattr(torch, kv_dtype)) for _ in module.model.layers]
    caches: list[npt.NDArray[Any]] = [np.zeros(shape, kv_dtype) for _ in module.model.layers]
    tolerance = {"float32": 1e-5, "float16": 1e-3, "int8": 1e-2}[kv_dtype]
    for step in (
        make_step([(first[:33], 0), (second[:2], 0)], tables),
        make_step([(first[33:69], 33), (second[2:], 2)], tables, rows=[36, 0]),
        make_step([(first[69:], 69)], tables[:1]),
    ):
        expected, eager = run(module, step, eager)
        before = [cache.copy() for cache in caches]
        logits, after = run_onnx(graph, step, caches)
        for old, cache in zip(before, caches, strict=True):
            np.testing.assert_array_equal(old, cache, "without binding the input stays as it was")
        caches = after
        scale = float(expected.abs().max())
        np.testing.assert_allclose(logits, expected.numpy(), atol=tolerance * scale, rtol=0)
        for found, wanted in zip(caches, eager, strict=True):
            np.testing.assert_allclose(
                reference.kv_values(found), reference.kv_values(wanted.numpy()), atol=tolerance * 10, rtol=0
            )


def test_weights_are_stored_in_the_type_asked_for_and_nothing_is_computed_in_it(tmp_path: Path) -> None:
    """Case E04."""
    folder = write_checkpoint(tmp_path / "checkpoint", dtype="bfloat16", num_hidden_layers=1)
    for weights in ("float32", "bfloat16"):
        engine = export(folder, tmp_path / weights, weights=weights).path
        graph = graph_of(engine)
        expected = onnx.TensorProto.DataType.Value("FLOAT" if weights == "float32" else "BFLOAT16")
        for tensor in graph.initializer:
            matrix = len(tensor.dims) == 2 and tensor.name != "rope"
            assert tensor.data_type == (expected if matrix else onnx.TensorProto.FLOAT), tensor.name
        types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        computed = [name for node in graph.node for name in node.output if types.get(name) == onnx.TensorProto.BFLOAT16]
        assert computed == ([] if weights == "float32" else ["model.embed_tokens.bfloat16"])
        session(engine)
    source = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    stored = load_file(tmp_path / "bfloat16" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(stored, source)


class TestMoved:
    """Case E02."""

    def test_a_moved_folder_loads_from_anywhere(
        self, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(tiny_engine, tmp_path / "far" / "away")
        monkeypatch.chdir(tmp_path)
        session(Path("far") / "away")
        monkeypatch.chdir("/")
        session(tmp_path / "far" / "away")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("location", "../model.safetensors"),
            ("location", "/etc/passwd"),
            ("location", ""),
            ("offset", "999999999999"),
            ("offset", "-4096"),
            ("length", "999999999999"),
            ("length", "-1"),
        ],
    )
    def test_an_edited_location_is_refused(self, key: str, value: str, tiny_engine: Path, tmp_path: Path) -> None:
        engine = tmp_path / "engine"
        shutil.copytree(tiny_engine, engine)
        model = onnx.load(engine / "model.onnx", load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            if entry.key == key:
                entry.value = value
        (engine / "model.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(ConfigError, match=r"model\.onnx (was changed|has \d+ bytes)"):
            EngineDir.open(engine)

    def test_a_link_in_place_of_the_weights_is_refused(self, tiny_engine: Path, tmp_path: Path) -> None:
        engine = tmp_path / "engine"
        shutil.copytree(tiny_engine, engine)
        (engine / "model.safetensors").rename(tmp_path / "weights")
        (engine / "model.safetensors").symlink_to(tmp_path / "weights")
        with pytest.raises(ConfigError, match=r"model\.safetensors is missing or not a plain file"):
            EngineDir.open(engine)
