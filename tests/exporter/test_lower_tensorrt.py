"""The graph for TensorRT: its types, its norms, its Q/DQ nodes, and that it computes what the model does.

It is computed by onnx.reference, which knows every type and rounds after every node, with PagedAttention from our own reference.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from safetensors import safe_open
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qwenrt.exporter import export
from qwenrt.exporter.lower import tensorrt
from qwenrt.plugins import ConfigError, reference
from qwenrt.plugins.schema import DOMAIN
from qwenrt.runtime import EngineDir
from tests.checkpoints import write_checkpoint
from tests.tolerance import LOGITS, LOGITS_FLOAT8, relative_error

from .eager import empty_caches, load_module, make_step, run, scattered_blocks

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BLOCK_SIZE = 8


class PagedAttention(OpRun):  # type: ignore[misc]
    """The node, in float32 between inputs and outputs of the graph's types."""

    op_domain = DOMAIN

    def _run(self, *inputs: npt.NDArray[Any], **attributes: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        qkv, cache = inputs[0], inputs[5]
        wide = [value if value.dtype == np.int32 else value.astype(np.float32) for value in inputs]
        attn, cache_out = reference.paged_attention(*wide, **attributes)
        return attn.astype(qkv.dtype), cache_out.astype(cache.dtype)


class MixtureOfExperts(OpRun):  # type: ignore[misc]
    """The node, in float32 between inputs and outputs of the graph's types."""

    op_domain = DOMAIN

    def _run(self, *inputs: npt.NDArray[Any], **attributes: Any) -> tuple[npt.NDArray[Any]]:
        y = reference.mixture_of_experts(*(value.astype(np.float32) for value in inputs), **attributes)
        return (y.astype(inputs[0].dtype),)


NEW_OPS = [PagedAttention, MixtureOfExperts]


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Engine folders of a random checkpoint by (dtype, weights), exported for TensorRT where that is missing."""
    made: dict[tuple[str, str], Path] = {}

    def folder(dtype: str, weights: str) -> Path:
        if (dtype, weights) not in made:
            path = tmp_path_factory.mktemp("lowered") / "engine"
            made[dtype, weights] = export_graph(tiny_checkpoint, path, dtype=dtype, weights=weights)
        return made[dtype, weights]

    return folder


def export_graph(checkpoint: Path, out: Path, **options: Any) -> Path:
    """Export for TensorRT; head_dim 32 has no kernel there, so no plan is built on any machine."""
    with pytest.raises(ConfigError, match="has all but its plan"):
        export(checkpoint, out, target="tensorrt", block_size=BLOCK_SIZE, max_model_len=64, **options)
    return out


def graph_of(engine: Path) -> onnx.GraphProto:
    return onnx.load(engine / "model.onnx", load_external_data=False).graph


def types_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Element type of every value."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    types |= {value.name: value.data_type for value in graph.initializer}
    return {name: TensorProto.DataType.Name(kind) for name, kind in types.items()}


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "BFLOAT16"), ("float16", "FLOAT16")])
def test_all_but_norms_rope_and_logits_have_the_type(folders: Any, dtype: str, name: str) -> None:
    graph = graph_of(folders(dtype, dtype))
    types = types_of(graph)
    wide = {value for value, kind in types.items() if kind == "FLOAT"}
    assert wide == {"rope", "norm.ones", "logits"} | {
        f"{norm}.{step}"
        for node in graph.node
        if node.op_type == "RMSNormalization" and (norm := node.name.removesuffix(".normal"))
        for step in ("widened", "normal")
    }
    indices = {"input_ids", "positions", "block_tables", "seq_lens", "query_start", "logits_indices"}
    assert {value for value, kind in types.items() if kind == "INT32"} == indices
    assert {kind for value, kind in types.items() if value not in wide | indices} == {name}
    assert all(output for node in graph.node for output in node.output if output in types)


def test_the_nodes_of_a_layer(folders: Any) -> None:
    graph = graph_of(folders("bfloat16", "bfloat16"))
    layer = Counter(node.op_type for node in graph.node if re.match(r"model\.layers\.2\.", node.name))
    assert layer == {
        "Gemm": 4,
        "Cast": 4,
        "RMSNormalization": 2,
        "PagedAttention": 1,
        "Add": 2,
        "Split": 1,
        "Sigmoid": 1,
        "Mul": 4,
    }
    assert [node.op_type for node in graph.node][-2:] == ["Gemm", "Cast"]


def test_values_have_the_names_that_they_have_for_onnxruntime(folders: Any, tiny_engine: Path) -> None:
    ours = {output for node in graph_of(folders("bfloat16", "bfloat16")).node for output in node.output}
    assert {output for node in graph_of(tiny_engine).node for output in node.output} <= ours


@pytest.mark.parametrize("dtype", NUMPY)
def test_a_norm_is_transformers_own(dtype: str) -> None:
    """In float32, rounded, times the weight; float16 squares of 300 and more would overflow."""
    size, rng = 64, np.random.default_rng(0)
    x = (rng.standard_normal((50, size)) * np.geomspace(1e-3, 1e4, 50)[:, None]).astype(NUMPY[dtype])
    weight = rng.uniform(0.5, 1.5, size).astype(NUMPY[dtype])
    feeds = {"x": x, "weight": weight, "norm.ones": np.ones(size, np.float32)}
    actual = ReferenceEvaluator(norm_graph(size, dtype)).run(None, feeds)[0]
    norm = Qwen3RMSNorm(size, eps=1e-6)
    norm.weight.data = torch.from_numpy(weight.astype(np.float32)).to(getattr(torch, dtype))
    expected = norm(torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))).detach().float().numpy()
    assert actual.dtype == NUMPY[dtype]
    same = actual.astype(np.float32) == expected
    # float32 sums in another order round to another neighbour once in a while.
    assert same.mean() > 0.99
    assert np.allclose(actual.astype(np.float32), expected, rtol=2 * float(ml_dtypes.finfo(NUMPY[dtype]).eps), atol=0)


def norm_graph(size: int, dtype: str) -> onnx.ModelProto:
    """A lowered graph of one norm, whose initializers are inputs, after which come logits."""
    element = ir.DataType.FLOAT
    x, weight = (
        ir.Value(name=name, type=ir.TensorType(element), shape=ir.Shape(shape))
        for name, shape in (("x", ("T", size)), ("weight", (size,)))
    )
    norm = ir.node("RMSNormalization", [x, weight], {"axis": -1, "epsilon": 1e-6}, name="norm")
    norm.outputs[0].name, norm.outputs[0].shape, norm.outputs[0].dtype = "norm", x.shape, element
    graph = ir.Graph([x], [norm.outputs[0]], nodes=[norm], initializers=[], opset_imports={"": 23}, name="norm")
    graph.initializers["weight"] = weight
    tensorrt.lower(ir.Model(graph, ir_version=10), dtype, dtype, None)
    for name in ("weight", "norm.ones"):
        graph.inputs.append(graph.initializers.pop(name))
    x.dtype = ir.DataType[dtype.upper()]
    # The cast after the last node is for logits; here that node is the norm.
    graph.outputs[0] = graph[-2].outputs[0]
    return ir.to_proto(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        ("bfloat16", "dense"),
        ("bfloat16", "int4"),
        ("bfloat16", "fp8"),
        ("bfloat16", "fp8-channel"),
        ("float16", "dense"),
        pytest.param("float16", "int4", marks=pytest.mark.slow),
        pytest.param("float16", "fp8", marks=pytest.mark.slow),
        pytest.param("float16", "fp8-channel", marks=pytest.mark.slow),
    ],
)
def test_the_graph_computes_what_the_model_does(folders: Any, tiny_checkpoint: Path, dtype: str, weights: str) -> None:
    """Against float32 with the matrices that the folder holds, decoded: what is left is the rounding of activations."""
    engine = folders(dtype, dtype if weights == "dense" else weights)
    module = load_module(tiny_checkpoint, block_size=BLOCK_SIZE, max_model_len=64)
    module.load_state_dict(decoded_weights(engine), strict=False)
    tokens = np.random.default_rng(1).integers(0, 320, 26).tolist()
    blocks = scattered_blocks(2, 3, 8)
    steps = [
        make_step([(tokens[:15], 0), (tokens[15:20], 0)], blocks),
        make_step([(tokens[20:23], 15), (tokens[23:], 5)], blocks),
    ]
    caches = [np.zeros((8, 2, 2, BLOCK_SIZE, 32), NUMPY[dtype]) for _ in range(4)]
    expected_caches = empty_caches(module, 8, BLOCK_SIZE)
    evaluator = ReferenceEvaluator(onnx.load(engine / "model.onnx"), new_ops=NEW_OPS)
    for step in steps:
        logits, *caches = evaluator.run(
            None, step._asdict() | {f"kv_cache.{i}": cache for i, cache in enumerate(caches)}
        )
        expected, expected_caches = run(module, step, expected_caches)
        assert logits.dtype == np.float32
        assert relative_error(logits, expected) < (LOGITS_FLOAT8 if weights.startswith("fp8") else LOGITS[dtype])
    assert all(cache.dtype == NUMPY[dtype] for cache in caches)


class Exchange:
    """Where ranks that run in threads of their own meet."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: dict[int, npt.NDArray[Any]] = {}

    def of_all(self, rank: int, x: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """What every rank gives, in their order."""
        self._given[rank] = x
        self._barrier.wait()
        values = [value for _, value in sorted(self._given.items())]
        self._barrier.wait()
        return values


def dist_collective(exchange: Exchange, rank: int) -> type[OpRun]:
    """TensorRT's node for a rank: https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators/DistCollective.html"""

    def run_node(self: OpRun, x: npt.NDArray[Any], **attributes: Any) -> tuple[npt.NDArray[Any]]:
        assert (attributes["nb_rank"], attributes["root"]) == (2, -1)
        values = exchange.of_all(rank, x)
        kind = attributes["collective_operation"], attributes["reduce_op"]
        if kind == ("all_gather", "none"):
            return (np.concatenate(values),)
        assert kind == ("all_reduce", "sum")
        return (np.sum([value.astype(np.float32) for value in values], axis=0).astype(x.dtype),)

    return type("DistCollective", (OpRun,), {"op_domain": DOMAIN, "_run": run_node})


def test_the_graphs_of_two_ranks_compute_together_what_that_of_one_does(
    folders: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    engine = export_graph(tiny_checkpoint, tmp_path / "engine", tp=2)
    step = make_step([(list(range(15)), 0), (list(range(40, 45)), 0)], scattered_blocks(2, 3, 8))
    exchange = Exchange(2)

    def logits(graph: Path, kv_heads: int, *ops: type[OpRun]) -> npt.NDArray[np.float32]:
        shape = (8, 2, kv_heads, BLOCK_SIZE, 32)
        caches = {f"kv_cache.{layer}": np.zeros(shape, NUMPY["bfloat16"]) for layer in range(4)}
        evaluator = ReferenceEvaluator(onnx.load(graph), new_ops=[PagedAttention, *ops])
        found: npt.NDArray[np.float32] = evaluator.run(["logits"], step._asdict() | caches)[0]
        return found

    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(logits, engine / f"model.rank{rank}.onnx", 1, dist_collective(exchange, rank))
            for rank in range(2)
        ]
        first, second = (rank.result() for rank in ranks)
    np.testing.assert_array_equal(first, second)
    expected = logits(folders("bfloat16", "bfloat16") / "model.onnx", 2)
    assert first.shape == expected.shape == (20, 320)
    assert relative_error(first, expected) < LOGITS["bfloat16"]


@pytest.mark.parametrize("dtype", NUMPY)
def test_a_graph_with_experts_computes_what_the_model_does(dtype: str, tmp_path: Path) -> None:
    """With all experts for every token, since a router's logit that is rounded may choose another."""
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family="qwen3_moe", num_hidden_layers=2, **experts)
    engine = export_graph(checkpoint, tmp_path / "engine", dtype=dtype)
    graph, name = graph_of(engine), dtype.upper()
    nodes = [node for node in graph.node if node.op_type == "MixtureOfExperts"]
    types = types_of(graph)
    assert [[types[value] for value in (*node.input, *node.output)] for node in nodes] == [[name] * 5] * 2
    module = load_module(checkpoint, block_size=BLOCK_SIZE, max_model_len=64)
    module.load_state_dict(decoded_weights(engine), strict=False)
    step = make_step([(list(range(15)), 0), (list(range(40, 45)), 0)], scattered_blocks(2, 3, 8))
    caches = {f"kv_cache.{layer}": np.zeros((8, 2, 2, BLOCK_SIZE, 32), NUMPY[dtype]) for layer in range(2)}
    evaluator = ReferenceEvaluator(onnx.load(engine / "model.onnx"), new_ops=NEW_OPS)
    actual = evaluator.run(["logits"], step._asdict() | caches)[0]
    expected, _ = run(module, step, empty_caches(module, 8, BLOCK_SIZE))
    assert relative_error(actual, expected) < LOGITS[dtype]


@pytest.mark.parametrize(("task", "width"), [("embed", 64), ("classify", 3)])
def test_a_pooling_graph_computes_what_the_model_does(task: str, width: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", task=task, num_labels=3, num_hidden_layers=2)
    engine = export_graph(checkpoint, tmp_path / "engine", weights="int4")
    assert {"score.weight", "lm_head.weight"}.isdisjoint(
        value.removesuffix(".scale") for value in types_of(graph_of(engine)) if value.endswith(".scale")
    )
    module = load_module(checkpoint, block_size=BLOCK_SIZE, max_model_len=64)
    module.load_state_dict(decoded_weights(engine), strict=False)
    step = make_step([(list(range(15)), 0), (list(range(40, 45)), 0)], scattered_blocks(2, 3, 8))
    caches = {f"kv_cache.{layer}": np.zeros((8, 2, 2, BLOCK_SIZE, 32), NUMPY["bfloat16"]) for layer in range(2)}
    evaluator = ReferenceEvaluator(onnx.load(engine / "model.onnx"), new_ops=NEW_OPS)
    actual = evaluator.run(["logits"], step._asdict() | caches)[0]
    expected, _ = run(module, step, empty_caches(module, 8, BLOCK_SIZE))
    assert actual.dtype == np.float32 and actual.shape[1] == width
    assert relative_error(actual, expected) < LOGITS["bfloat16"]


def decoded_weights(engine: Path) -> dict[str, torch.Tensor]:
    """The folder's matrices as float32, read with the safetensors library; how they are encoded is told again here."""
    decoded = {}
    with safe_open(engine / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for name in names:
            value = file.get_tensor(name)
            if name.endswith(".scale") or name == "norm.ones":
                continue
            if f"{name}.scale" in names:
                scale = file.get_tensor(f"{name}.scale").float()
                if value.dtype == torch.uint8:
                    value = torch.stack([value & 15, value >> 4], dim=2).flatten(1).float()
                    value = torch.where(value > 7, value - 16, value)
                    scale = scale.repeat_interleave(value.shape[1] // scale.shape[1], dim=1)
                elif scale.ndim == 1:
                    scale = scale[:, None]
                value = value.float() * scale
            decoded[name] = value.float()
    return decoded


@pytest.mark.parametrize(
    ("weights", "nodes"),
    [
        ("int4", {"DequantizeLinear": 16}),
        ("fp8", {"QuantizeLinear": 16, "DequantizeLinear": 32}),
        ("fp8-channel", {"QuantizeLinear": 16, "DequantizeLinear": 32}),
    ],
)
def test_every_matrix_but_the_embedding_is_quantised(folders: Any, weights: str, nodes: dict[str, int]) -> None:
    engine = folders("bfloat16", weights)
    graph = graph_of(engine)
    counts = Counter(node.op_type for node in graph.node if node.op_type.endswith("Linear"))
    assert counts == nodes
    types = types_of(graph)
    assert types["model.embed_tokens.weight"] == "BFLOAT16"
    matrix = "model.layers.1.mlp.down_proj.weight"
    assert types[matrix] == ("INT4" if weights == "int4" else "FLOAT8E4M3FN")
    assert types[f"{matrix}.scale"] == "BFLOAT16"
    shapes = {value.name: list(value.dims) for value in graph.initializer}
    assert shapes[matrix] == [64, 128]
    assert shapes[f"{matrix}.scale"] == {"int4": [64, 2], "fp8": [], "fp8-channel": [64]}[weights]
    assert EngineDir.open(engine).manifest.weights == weights
    dense = (folders("bfloat16", "bfloat16") / "model.safetensors").stat().st_size
    assert (engine / "model.safetensors").stat().st_size < dense


def test_int4_takes_groups_of_128_where_all_matrices_divide(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", hidden_size=128, num_hidden_layers=1)
    graph = graph_of(export_graph(checkpoint, tmp_path / "engine", weights="int4"))
    sizes = [
        attribute.i
        for node in graph.node
        if node.op_type == "DequantizeLinear"
        for attribute in node.attribute
        if attribute.name == "block_size"
    ]
    assert sizes == [128] * 4


def test_int4_names_a_matrix_that_does_not_divide(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", intermediate_size=96, num_hidden_layers=1)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has 96 columns, .* groups of 64 or 128"
    ):
        export(checkpoint, tmp_path / "engine", target="tensorrt", weights="int4")
    assert not (tmp_path / "engine").exists()


def test_the_cache_may_be_float8(tiny_checkpoint: Path, tmp_path: Path) -> None:
    engine = export_graph(tiny_checkpoint, tmp_path / "engine", kv_dtype="fp8")
    types = types_of(graph_of(engine))
    assert types["kv_cache.0"] == types["kv_cache_out.3"] == "FLOAT8E4M3FN"
    manifest = EngineDir.open(engine).manifest
    assert manifest.kv_dtype == "fp8"
    assert manifest.kv_bytes_per_token == 4 * 2 * 2 * 32
