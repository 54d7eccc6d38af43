"""NVIDIA's own parser and builder take the plugin: TensorRT for RTX builds engines ahead of time, with no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import DOMAIN, MIXTURE_OF_EXPERTS, PAGED_ATTENTION

from .build import REPOSITORY, build_plugin, missing
from .rtx import missing_rtx, rtx_environment

ATTRIBUTES = {
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 32,
    "scale": 0.125,
    "norm_eps": 1e-6,
    "sliding_window": -1,
}
SHAPES: dict[str, list[int | str]] = {
    "qkv": ["T", (16 + 2 * 8) * 128],
    "positions": ["T"],
    "kv_cache": ["num_blocks", 2, 8, 32, 128],
    "block_tables": ["S", "max_blocks"],
    "seq_lens": ["S"],
    "query_start": ["S1"],
    "attn": ["T", 16 * 128],
    "kv_cache_out": ["num_blocks", 2, 8, 32, 128],
}

DEMO = REPOSITORY / "tools" / "demo" / "checkpoint"
POLYGRAPHY = ("-c", "from polygraphy.tools import main; main()")
"""Its command line."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plugin() -> Path:
    if reason := missing() or missing_rtx():
        pytest.skip(reason)
    return build_plugin()


def one_node(
    path: Path, dtype: int = TensorProto.FLOAT16, kv_dtype: int | None = None, norm: bool = True, **changes: Any
) -> Path:
    """An ONNX model of one PagedAttention node with constant norms and rope, written to `path`."""
    spec = PAGED_ATTENTION
    types = {
        "T": dtype,
        "T_kv": dtype if kv_dtype is None else kv_dtype,
        "F": TensorProto.FLOAT,
        "I": TensorProto.INT32,
    }
    names = [value.name for value in spec.inputs], [value.name for value in spec.outputs]
    node = helper.make_node(spec.name, *names, domain=DOMAIN, name="attention", **(ATTRIBUTES | changes))
    size = 128 if norm else 0
    constants = [helper.make_tensor(name, dtype, [size], [1.0] * size) for name in ("q_norm", "k_norm")]
    constants.append(numpy_helper.from_array(np.ones((4096, 128), np.float32), "rope"))
    values = {
        value.name: helper.make_tensor_value_info(value.name, types[value.type], SHAPES[value.name])
        for value in (*spec.inputs, *spec.outputs)
        if value.name in SHAPES
    }
    inputs = [values[name] for name in names[0] if name in values]
    graph = helper.make_graph([node], "one_node", inputs, [values[name] for name in names[1]], constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, spec.version)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def experts_node(path: Path, dtype: int = TensorProto.FLOAT16, hidden: int = 64, top_k: int = 2) -> Path:
    """An ONNX model of one MixtureOfExperts node with constant matrices of 8 experts, written to `path`."""
    spec, experts, inner = MIXTURE_OF_EXPERTS, 8, 32
    names = [value.name for value in spec.inputs][:4]
    node = helper.make_node(spec.name, names, ["y"], domain=DOMAIN, name="experts", top_k=top_k, norm_topk_prob=1)
    sizes = {"gate_up": [experts * 2 * inner, hidden], "down": [experts * hidden, inner]}
    matrices = [helper.make_tensor(name, dtype, size, [0.5] * (size[0] * size[1])) for name, size in sizes.items()]
    shapes = {"x": ["T", hidden], "router_logits": ["T", experts], "y": ["T", hidden]}
    values = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "experts_node", values[:2], values[2:], matrices)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, spec.version)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python command with TensorRT for RTX."""
    environment = rtx_environment() | variables
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def build_engine(model: Path, plugin: Path, capability: str = "SM89", how: str = "registry") -> dict[str, Any]:
    script = str(Path(__file__).with_name("build_engine.py"))
    done = run(script, str(model), str(plugin), capability, str(model.with_suffix(".plan")), how)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("capability", ["SM80", "SM89", "SM120"])
@pytest.mark.parametrize("how", ["registry", "loader"])
def test_engine_is_built_for(plugin: Path, tmp_path: Path, capability: str, how: str) -> None:
    told = build_engine(one_node(tmp_path / "model.onnx"), plugin, capability, how)
    assert told["creators"].count("/PagedAttention/1") == 1
    assert told["layers"].count("PLUGIN_V3") == 1
    assert told["outputs"] == {"attn": [[-1, 2048], "HALF"], "kv_cache_out": [[-1, 2, 8, 32, 128], "HALF"]}
    assert told["log"] == []
    assert told["bytes"] == (tmp_path / "model.plan").stat().st_size > 4096 * 128 * 4  # the rope table is in it
    assert b"PagedAttention" in (tmp_path / "model.plan").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (TensorProto.BFLOAT16, None),
        (TensorProto.FLOAT16, TensorProto.FLOAT8E4M3FN),
        (TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN),
    ],
    ids=["BF16", "HALF and FP8", "BF16 and FP8"],
)
def test_engine_of_other_types_is_built(plugin: Path, tmp_path: Path, dtype: int, kv_dtype: int | None) -> None:
    told = build_engine(one_node(tmp_path / "model.onnx", dtype, kv_dtype), plugin)
    assert told["bytes"] > 0, told["log"]
    assert [kind for _, kind in told["outputs"].values()] == [
        "BF16" if dtype == TensorProto.BFLOAT16 else "HALF",
        "FP8" if kv_dtype else "BF16" if dtype == TensorProto.BFLOAT16 else "HALF",
    ]


def test_engine_without_norms_is_built(plugin: Path, tmp_path: Path) -> None:
    assert build_engine(one_node(tmp_path / "model.onnx", norm=False), plugin)["bytes"] > 0


@pytest.mark.parametrize("capability", ["SM80", "SM89", "SM120"])
@pytest.mark.parametrize("how", ["registry", "loader"])
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["HALF", "BF16"])
def test_engine_with_experts_is_built_for(plugin: Path, tmp_path: Path, dtype: int, capability: str, how: str) -> None:
    told = build_engine(experts_node(tmp_path / "model.onnx", dtype), plugin, capability, how)
    assert told["creators"].count("/MixtureOfExperts/1") == 1
    assert told["layers"].count("PLUGIN_V3") == 1
    assert told["outputs"] == {"y": [[-1, 64], "BF16" if dtype == TensorProto.BFLOAT16 else "HALF"]}
    assert told["log"] == []
    assert told["bytes"] > 8 * 3 * 32 * 64 * 2  # the matrices are in it


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 60}, "hidden must be a multiple of 8"),
        ({"top_k": 9}, "top_k must be from 1 to num_experts, at most 32"),
        ({"top_k": 0}, 'node "experts": top_k is 0, must be positive'),
    ],
    ids=str,
)
def test_what_is_wrong_with_experts_stands_in_the_log(
    plugin: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    told = build_engine(experts_node(tmp_path / "model.onnx", **changes), plugin)
    assert told["bytes"] == 0
    assert any(line.startswith("ERROR: MixtureOfExperts: ") and named in line for line in told["log"]), told["log"]


@pytest.mark.parametrize("how", ["registry", "loader"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 96}, 'node "attention": head_dim must be 64 or 128'),
        ({"num_kv_heads": 4}, "qkv has shape [?, 4096], must be [T, 3072]"),
        ({"block_size": 64}, "kv_cache has shape [?, 2, 8, 32, 128], must be [num_blocks, 2, 8, 64, 128]"),
    ],
    ids=str,
)
def test_what_is_wrong_stands_in_the_log(
    plugin: Path, tmp_path: Path, changes: dict[str, Any], named: str, how: str
) -> None:
    told = build_engine(one_node(tmp_path / "model.onnx", **changes), plugin, how=how)
    assert told["bytes"] == 0
    assert any(line.startswith("ERROR: PagedAttention: ") and named in line for line in told["log"]), told["log"]


def test_polygraphy_converts_with_the_plugin(plugin: Path, tmp_path: Path) -> None:
    model, engine = one_node(tmp_path / "model.onnx"), tmp_path / "model.engine"
    shapes = {
        "qkv": "[8,4096]",
        "positions": "[8]",
        "kv_cache": "[64,2,8,32,128]",
        "block_tables": "[4,8]",
        "seq_lens": "[4]",
        "query_start": "[5]",
    }
    profile = [f"{name}:{shape}" for name, shape in shapes.items()]
    ranges = [word for bound in ("min", "opt", "max") for word in (f"--trt-{bound}-shapes", *profile)]
    options = [
        "--convert-to",
        "trt",
        "--plugins",
        str(plugin),
        "--compute-capabilities",
        "8.9",
        "--strongly-typed",
        "--preview-features",
        "ALIASED_PLUGIN_IO_10_03",
    ]
    done = run(
        *POLYGRAPHY,
        "convert",
        str(model),
        *options,
        *ranges,
        "-o",
        str(engine),
        POLYGRAPHY_USE_TENSORRT_RTX="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"PagedAttention" in engine.read_bytes()


def test_the_readmes_command_converts_a_whole_graph(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has all but its plan"):
        export(DEMO, tmp_path / "engine", target="tensorrt")
    readme = (REPOSITORY / "plugins" / "tensorrt" / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = (line.strip() for line in readme.splitlines() if " polygraphy convert " in line)
    name, _, command = line.replace("libqwenrt_tensorrt.so", str(plugin)).partition(" polygraphy ")
    variable, _, value = name.partition("=")
    done = subprocess.run(
        [sys.executable, *POLYGRAPHY, *command.split()],
        env=rtx_environment() | {variable: value},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = (tmp_path / "engine.plan").read_bytes()
    assert plan.count(b"PagedAttention") >= 4
    assert len(plan) > (tmp_path / "engine" / "model.safetensors").stat().st_size
