"""Plans built by TensorRT for RTX's own parser and builder, with no GPU, and what happens when one cannot be built."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest

from qwenrt.exporter import build_plans, export
from qwenrt.exporter.tensorrt import process
from qwenrt.exporter.tensorrt.profiles import plan_profiles
from qwenrt.plugins import ConfigError, library
from qwenrt.plugins.schema import PLAN_VERSION
from qwenrt.runtime import LLM, EngineDir
from qwenrt.runtime.plan import Plan
from qwenrt.tools.make_checkpoint import SHAPES, make_checkpoint
from tests.checkpoints import write_checkpoint

from .folders import DEMO, files_of

RTX = "rtx1.7.1"


def test_a_checkpoint_becomes_a_complete_folder_for_two_gpu_generations(demo: Path) -> None:
    folder = EngineDir.open(demo)
    folder.verify()
    manifest = folder.manifest
    assert (manifest.target, manifest.dtype, manifest.weights, manifest.kv_dtype) == ("tensorrt-rtx", *["bfloat16"] * 3)
    assert [plan.file for plan in manifest.plans] == [f"model.sm89-{RTX}.plan", f"model.sm120-{RTX}.plan"]
    for plan, capability in zip(manifest.plans, ("8.9", "12.0"), strict=True):
        expected = Plan(
            file=plan.file,
            compute_capability=capability,
            tensorrt_version="1.7.1.116",
            plan_version=PLAN_VERSION,
            stripped=False,
            activation_bytes=plan.activation_bytes,
            profiles=plan_profiles(manifest),
        )
        assert plan == expected
        # A full prefill step has at least its packed gate and up projections.
        assert plan.activation_bytes > 1024 * 2 * 512 * 2
        content = folder.file(plan.file).read_bytes()
        assert len(content) > folder.file("model.safetensors").stat().st_size
        assert content.count(b"PagedAttention") >= 4
        assert manifest.network_name().encode() in content
    assert {path.name for path in demo.iterdir()} == {"engine.json", *manifest.files}


def test_every_rank_of_a_split_engine_has_a_plan_with_tensorrts_own_collectives(tmp_path: Path) -> None:
    """What TensorRT's parser and builder take of them; to run them takes two GPUs."""
    engine = export(DEMO, tmp_path / "engine", target="tensorrt-rtx", tp=2, compute_capabilities=["8.9"])
    engine.verify()
    plans = engine.manifest.plans
    assert [(plan.rank, plan.file) for plan in plans] == [(r, f"model.rank{r}.sm89-{RTX}.plan") for r in range(2)]
    whole = engine.file("model.safetensors").stat().st_size
    for plan in plans:
        content = engine.file(plan.file).read_bytes()
        assert engine.manifest.network_name(plan.rank).encode() in content
        assert b"model.layers.3.mlp.down_proj.all_reduce" in content
        assert len(content) < 2 * whole
    with pytest.raises(ConfigError, match="which backend tensorrt cannot run; use --backend torch"):
        LLM(engine.path, backend="tensorrt")


def test_a_plan_is_added_and_replaced_without_the_checkpoint(engine: Path) -> None:
    before = EngineDir.open(engine).manifest
    lines: list[str] = []
    stages: list[tuple[str, int, int]] = []
    build_plans(
        engine,
        compute_capabilities=["8.6"],
        notice=lines.append,
        progress=lambda stage, done, total: stages.append((stage, done, total)),
    )
    added = EngineDir.open(engine)
    added.verify()
    assert [plan.compute_capability for plan in added.manifest.plans] == ["8.9", "12.0", "8.6"]
    assert added.manifest.plans[:2] == before.plans
    assert before.files.items() <= added.manifest.files.items()
    assert len(lines) == 1
    assert lines[0].startswith(f"model.sm86-{RTX}.plan: ")
    told = {stage for stage, _, _ in stages}
    assert any(stage.startswith("TensorRT for RTX for compute capability 8.6: ") for stage in told)
    assert all(0 <= done <= total for _, done, total in stages)
    build_plans(engine, compute_capabilities=["8.9"])
    replaced = EngineDir.open(engine)
    replaced.verify()
    assert [plan.compute_capability for plan in replaced.manifest.plans] == ["12.0", "8.6", "8.9"]
    assert sorted(path.name for path in engine.iterdir()) == sorted(["engine.json", *replaced.manifest.files])
    assert not list(engine.parent.glob(".*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_capabilities": ["9.0"]}, r"compute capability is '9.0', must be one of 8.0, 8.6, 8.9, 12.0"),
        ({"compute_capabilities": ["8.9", "sm_89"]}, r"compute capability is 'sm_89'"),
        ({"compute_capabilities": ["8.6"], "weights": "fp8"}, r"compute capability 8.6 has no float8; .* than fp8"),
        ({"target": "tensorrt", "compute_capabilities": ["8.9"]}, r"leave it out, TensorRT builds for the GPU in this"),
        ({"target": "onnxruntime", "compute_capabilities": ["8.9"]}, r"leave it out, onnxruntime has no plans"),
        ({"dtype": "float32"}, r"dtype is 'float32', must be bfloat16 or float16"),
        ({"weights": "float32"}, r"weights is 'float32', must be bfloat16 or fp8 or fp8-channel or int4"),
        ({"kv_dtype": "float16"}, r"kv_dtype is 'float16', must be bfloat16 or fp8"),
        ({"kv_dtype": "int8"}, r"kv_dtype is 'int8', must be bfloat16 or fp8"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_before_anything_is_written(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(DEMO, tmp_path / "engine", **{"target": "tensorrt-rtx", **options})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_engine_for_the_cpu_has_no_plans(tiny_engine: Path) -> None:
    with pytest.raises(ConfigError, match="is for onnxruntime, which needs no plan; export with --target tensorrt"):
        build_plans(tiny_engine)


def test_a_damaged_folder_is_not_built_from(engine: Path) -> None:
    weights = engine / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed after the export"):
        build_plans(engine)


def test_a_model_that_the_kernels_do_not_take_is_named_by_tensorrt(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    with pytest.raises(ConfigError) as caught:
        export(checkpoint, tmp_path / "engine", target="tensorrt-rtx", max_model_len=64)
    message = str(caught.value)
    assert 'PagedAttention: node "model.layers.0.self_attn": head_dim must be 64 or 128' in message
    assert message.endswith(f"Where it can be built, run: qwenrt build {tmp_path / 'engine'}")
    assert "\n" not in message
    folder = EngineDir.open(tmp_path / "engine")
    folder.verify()
    assert folder.manifest.plans == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "engine"]


def test_an_abort_in_the_library_is_an_error(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its unversioned name the ONNX parser finds no library for a plugin node, and ends the process."""
    before = files_of(engine)
    monkeypatch.setattr(process, "library_with_unversioned_name", lambda target: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    with pytest.raises(
        ConfigError, match=r"TensorRT for RTX for compute capability 8\.6: it was ended by SIG(ABRT|SEGV)"
    ):
        build_plans(engine, compute_capabilities=["8.6"])
    assert files_of(engine) == before
    assert not list(engine.parent.glob(".*"))


def test_a_plugin_that_is_no_library_is_named(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "libwrong.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setattr(library, "tensorrt_library", lambda: wrong)
    with pytest.raises(ConfigError, match=r"libwrong\.so"):
        build_plans(engine, compute_capabilities=["8.6"])


def test_a_plan_without_weights_needs_a_gpu(engine: Path) -> None:
    with pytest.raises(ConfigError, match="this machine has no NVIDIA GPU"):
        build_plans(engine, compute_capabilities=["8.6"], strip_weights=True)


EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("weights", ["int4", "fp8"])
def test_experts_in_other_formats_are_refused(weights: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, **EXPERTS)
    with pytest.raises(ConfigError, match=f"weights is '{weights}', must be bfloat16: .* stored for tensorrt-rtx"):
        export(checkpoint, tmp_path / "engine", target="tensorrt-rtx", weights=weights)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_is_built(dtype: str, tmp_path: Path) -> None:
    shape = {"head_dim": 64, "num_hidden_layers": 3, "mlp_only_layers": [1], **EXPERTS}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **shape)
    engine = export(checkpoint, tmp_path / "engine", target="tensorrt-rtx", dtype=dtype, compute_capabilities=["8.9"])
    (plan,) = engine.manifest.plans
    content = engine.file(plan.file).read_bytes()
    assert content.count(b"MixtureOfExperts") >= 2
    assert len(content) > engine.file("model.safetensors").stat().st_size
    # The workspace: each of the largest step's tokens goes to two experts.
    assert plan.activation_bytes > 2 * engine.manifest.limits.max_num_batched_tokens * 2 * (64 + 32)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int4", "fp8"])
def test_a_decoder_with_biases_and_without_norms_of_q_and_k_is_built(weights: str, tmp_path: Path) -> None:
    shape = {"head_dim": 64, "hidden_size": 256, "tie_word_embeddings": False, "num_hidden_layers": 2}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family="qwen2", **shape)
    engine = export(
        checkpoint, tmp_path / "engine", target="tensorrt-rtx", weights=weights, compute_capabilities=["8.9"]
    )
    assert [plan.compute_capability for plan in engine.manifest.plans] == ["8.9"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "capability"),
    [
        *itertools.product(("bfloat16", "int4"), ("8.0", "8.6", "8.9", "12.0")),
        *itertools.product(("fp8", "fp8-channel"), ("8.9", "12.0")),
    ],
)
def test_every_format_is_built_for_every_generation_that_has_it(tmp_path: Path, capability: str, weights: str) -> None:
    options = {"kv_dtype": "fp8"} if weights == "fp8" else {}
    engine = export(
        DEMO, tmp_path / "engine", target="tensorrt-rtx", weights=weights, compute_capabilities=[capability], **options
    )
    assert [plan.compute_capability for plan in engine.manifest.plans] == [capability]


@pytest.fixture(scope="module")
def checkpoint_of_28_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-0.6B, random weights."""
    return make_checkpoint(tmp_path_factory.mktemp("28") / "checkpoint", SHAPES["0.6B"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "dtype", "capability"),
    [
        ("bfloat16", "bfloat16", "8.9"),
        ("float16", "float16", "12.0"),
        ("int4", "bfloat16", "8.9"),
        ("fp8", "bfloat16", "12.0"),
        ("fp8-channel", "float16", "8.9"),
    ],
)
def test_28_layers_are_built(
    checkpoint_of_28_layers: Path, tmp_path: Path, weights: str, dtype: str, capability: str
) -> None:
    engine = export(
        checkpoint_of_28_layers,
        tmp_path / "engine",
        target="tensorrt-rtx",
        dtype=dtype,
        weights=weights,
        compute_capabilities=[capability],
    )
    (plan,) = engine.manifest.plans
    assert plan.compute_capability == capability
    with engine.file(plan.file).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert all(content.find(f"model.layers.{layer}.self_attn".encode()) >= 0 for layer in range(28))
        assert len(content) > engine.file("model.safetensors").stat().st_size
