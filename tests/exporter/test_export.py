"""`export`: all or nothing, whatever is wrong with the arguments, the checkpoint, the disk, or the moment it is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, QwenrtWarning
from qwenrt.runtime import EngineDir
from qwenrt.runtime.text.chat_template import ChatTemplate
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("one-layer") / "checkpoint", num_hidden_layers=1)


@pytest.fixture
def checkpoint(one_layer: Path, tmp_path: Path) -> Path:
    """One that a test may damage."""
    return Path(shutil.copytree(one_layer, tmp_path / "checkpoint"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for engines."""
    path = tmp_path / "engines"
    path.mkdir()
    return path


def refused(model: str | Path, place: Path, message: str, **options: Any) -> None:
    """The export fails with one line and leaves `place` as it was."""
    before = sorted(place.iterdir())
    with pytest.raises(ConfigError, match=message) as caught:
        export(model, place / "engine", **options)
    assert "\n" not in str(caught.value)
    assert sorted(place.iterdir()) == before


def test_the_manifest_tells_what_was_exported(tiny_engine: Path) -> None:
    manifest = EngineDir.open(tiny_engine).manifest
    assert (manifest.target, manifest.dtype, manifest.weights, manifest.kv_dtype) == ("onnxruntime",) + ("float32",) * 3
    assert (manifest.block_size, manifest.opset) == (32, 23)
    assert manifest.limits.max_model_len == 256
    assert manifest.model.num_parameters == 217_920
    assert manifest.model.head_dim == 32
    assert set(manifest.files) == {
        "model.onnx",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    EngineDir.open(tiny_engine).verify()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrices_are_stored_as_in_the_checkpoint_unless_told_otherwise(dtype: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", dtype=dtype, num_hidden_layers=1)
    engine = export(checkpoint, tmp_path / "engine")
    assert (engine.manifest.weights, engine.manifest.dtype, engine.manifest.kv_dtype) == (dtype, "float32", "float32")
    name = "model.layers.0.mlp.down_proj.weight"
    stored, source = (load_file(folder / "model.safetensors")[name] for folder in (engine.path, checkpoint))
    assert stored.dtype == source.dtype and torch.equal(stored, source)
    assert export(checkpoint, tmp_path / "wide", weights="float32").manifest.weights == "float32"


def test_matrices_of_several_types_and_merged_ones_are_stored_in_float32(checkpoint: Path, place: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, checkpoint / "model.safetensors")
    adapter = write_adapter(place.parent / "adapter", checkpoint)
    assert export(checkpoint, place / "merged", lora=adapter).manifest.weights == "float32"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(
        {key: value if key == name else value.bfloat16() for key, value in weights.items()},
        checkpoint / "model.safetensors",
    )
    assert export(checkpoint, place / "mixed").manifest.weights == "float32"


def test_text_files_are_the_checkpoints(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tiny_engine / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_two_exports_are_the_same_to_the_byte_and_do_not_grow(
    tiny_checkpoint: Path, tiny_engine: Path, place: Path
) -> None:
    for _ in range(2):
        export(tiny_checkpoint, place / "engine", overwrite=True)
        for path in tiny_engine.iterdir():
            assert (place / "engine" / path.name).read_bytes() == path.read_bytes()
        assert list(place.iterdir()) == [place / "engine"]


def test_sharded_and_flat_checkpoints_give_the_same_engine(
    tiny_checkpoint: Path, tiny_engine: Path, tmp_path: Path
) -> None:
    flat, sharded = tmp_path / "flat", write_checkpoint(tmp_path / "sharded", shards=3)
    shutil.copytree(tiny_checkpoint, flat)
    weights = load_file(flat / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, flat / "model.safetensors")
    for folder in (flat, sharded):
        engine = export(folder, tmp_path / f"engine-of-{folder.name}").path
        assert (engine / "model.safetensors").read_bytes() == (tiny_engine / "model.safetensors").read_bytes()


def test_progress_tells_the_stages_and_counts_the_bytes(checkpoint: Path, place: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = export(checkpoint, place / "engine", progress=lambda *report: seen.append(report))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == [
        "reading the checkpoint",
        "tracing",
        "writing weights",
        "sealing",
    ]
    written = [(done, total) for stage, done, total in seen if stage == "writing weights"]
    size = engine.manifest.files["model.safetensors"].size
    assert written == sorted(written)
    assert written[-1] == (size, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tpu"}, "target is 'tpu', must be onnxruntime"),
        ({"target": "cuda"}, "target is 'cuda', must be onnxruntime or tensorrt or tensorrt-rtx"),
        ({"weights": "int3"}, "weights is 'int3', must be float32 or float16 or bfloat16 or int8 or int4"),
        ({"weights": "torch.float32"}, "weights is 'torch.float32'"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype is 'bfloat16', must be float32 or float16 or int8"),
        ({"block_size": 0}, "block_size is 0, must be an integer from 1 to"),
        ({"block_size": 2**20}, "block_size is 1048576"),
        ({"block_size": 32.0}, "block_size is 32.0"),
        ({"block_size": True}, "block_size is True"),
        ({"max_model_len": 2**22 + 1}, "max_model_len is 4194305, must be an integer from 1 to 4194304"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            r"max_num_seqs is 65, .* 1 to 64 \(max_num_batched_tokens\)",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], message: str, tiny_checkpoint: Path, place: Path) -> None:
    refused(tiny_checkpoint, place, message, **options)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "default", "rope_theta": 1e6},
            "max_model_len is 300 and the model has 256 positions; expect worse",
        ),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "300 and .* 256 positions; dynamic RoPE .* the frequencies of 300 tokens",
        ),
    ],
    ids=["default", "dynamic"],
)
def test_more_positions_than_the_model_has_are_a_warning(
    rope: dict[str, Any], message: str, checkpoint: Path, place: Path
) -> None:
    _edit("config.json", rope_parameters=rope)(checkpoint)
    with pytest.warns(QwenrtWarning, match=message):
        engine = export(checkpoint, place / "engine", max_model_len=300)
    assert engine.manifest.limits.max_model_len == 300


def test_an_unknown_argument_is_an_error(tiny_checkpoint: Path, place: Path) -> None:
    with pytest.raises(TypeError, match="quantize"):
        export(tiny_checkpoint, place / "engine", quantize="int4")  # type: ignore[call-arg]


def _edit(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_edit("config.json", architectures=["MistralForCausalLM"]), '"MistralForCausalLM" is not supported'),
        (_edit("config.json", quantization_config={"quant_method": "hqq"}), 'quant_method is "hqq"'),
        (_edit("config.json", vocab_size=321), r"embed_tokens\.weight has shape \[320, 64\].*\[321, 64\]"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json is not JSON"),
        (lambda folder: (folder / "generation_config.json").write_text("["), r"generation_config\.json is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has neither model\.safetensors nor"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), r"model\.safetensors is truncated"),
        (_edit("tokenizer.json", model={"type": "BPE"}), r"tokenizer\.json is no tokenizer"),
        (_edit("tokenizer.json", decoder=None), r"tokenizer\.json: decoder is None; supported are ByteLevel"),
        (
            _edit("tokenizer_config.json", eos_token="<|none|>"),
            r"names the token '<\|none\|>', which tokenizer\.json lacks",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), r"chat_template is no Jinja template"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("x" * (2 << 20)),
            r"chat_template\.jinja has 2097152 bytes; at most 262144 are read",
        ),
    ],
)
def test_a_bad_checkpoint_leaves_nothing(
    damage: Callable[[Path], None], message: str, checkpoint: Path, place: Path
) -> None:
    damage(checkpoint)
    refused(checkpoint, place, message)


def test_optional_text_files_may_be_missing_and_the_template_may_lie_in_the_tokenizers(
    checkpoint: Path, place: Path
) -> None:
    template = (checkpoint / "chat_template.jinja").read_text()
    (checkpoint / "chat_template.jinja").unlink()
    _edit("tokenizer_config.json", chat_template=template)(checkpoint)
    (checkpoint / "generation_config.json").unlink()
    engine = export(checkpoint, place / "engine")
    assert set(engine.manifest.files) == {"model.onnx", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    found = ChatTemplate.from_dir(engine.path)
    assert found is not None
    assert found.render([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user\nHi<|im_end|>")


def test_weights_beyond_float16_are_refused_and_nothing_is_left(checkpoint: Path, place: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][5, 5] = 70_000
    save_file(weights, checkpoint / "model.safetensors")
    refused(checkpoint, place, r"gate_up_proj\.weight has values beyond float16's 65504", weights="float16")
    export(checkpoint, place / "engine", weights="bfloat16")


def test_what_is_there_is_not_overwritten(one_layer: Path, place: Path) -> None:
    out = place / "engine"
    out.write_text("mine")
    refused(one_layer, place, "exists and is not an engine folder")
    out.unlink()
    out.mkdir()
    (out / "precious").write_text("mine")
    refused(one_layer, place, "exists and is not an engine folder")
    refused(one_layer, place, "exists and is not an engine folder", overwrite=True)
    assert (out / "precious").read_text() == "mine"
    shutil.rmtree(out)
    export(one_layer, out)
    refused(one_layer, place, "exists; choose another name or pass --force")
    assert export(one_layer, out, block_size=16, overwrite=True).manifest.block_size == 16


def test_a_checkpoint_is_never_taken_for_the_place_of_the_engine(checkpoint: Path) -> None:
    before = sorted(path.name for path in checkpoint.iterdir())
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="exists and is not an engine folder"):
            export(checkpoint, checkpoint, overwrite=overwrite)
    assert sorted(path.name for path in checkpoint.iterdir()) == before


@pytest.mark.parametrize("parent", ["file", "/proc/engines", "/sys"])
def test_an_unwritable_place_is_named(parent: str, one_layer: Path, tmp_path: Path) -> None:
    if parent == "file":
        (tmp_path / "file").write_text("")
    out = tmp_path / parent / "engine"
    with pytest.raises(ConfigError, match=f"cannot write engine folder {out}: .*; choose a folder that you can write"):
        export(one_layer, out)


class TestDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
        """Mounts a tmpfs of a size."""
        path = tmp_path / "disk"
        path.mkdir()

        def mount(size: str) -> Path:
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
            return path

        yield mount
        subprocess.run(["umount", path], capture_output=True, check=False)

    def test_a_disk_without_room_is_refused_before_the_weights(
        self, small_disk: Callable[[str], Path], one_layer: Path
    ) -> None:
        refused(one_layer, small_disk("500k"), r"the engine needs .* GB in .*, 0\.00 GB are free; choose another disk")

    def test_a_disk_that_fills_up_is_named_and_left_empty(
        self, small_disk: Callable[[str], Path], one_layer: Path
    ) -> None:
        place = small_disk("80m")
        ballast = place / "ballast"

        def fill(stage: str, done: int, total: int) -> None:
            if stage == "writing weights" and not ballast.exists():
                free = shutil.disk_usage(place).free
                ballast.write_bytes(b"x" * (free - 100_000))

        with pytest.raises(ConfigError, match=r"the disk is full: engine folder .*engine was not written"):
            export(one_layer, place / "engine", progress=fill)
        assert list(place.iterdir()) == [ballast]
        ballast.unlink()
        export(one_layer, place / "engine")


def _export_in_a_process(checkpoint: Path, out: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from qwenrt.exporter import export\n"
        "export(sys.argv[1], sys.argv[2], progress=lambda *report: print(*report, flush=True))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, checkpoint, out], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _kill_when(process: subprocess.Popen[bytes], stage: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(stage.encode()):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_export_leaves_no_engine_and_the_next_one_cleans_up(checkpoint: Path, place: Path) -> None:
    process = _export_in_a_process(checkpoint, place / "engine")
    _kill_when(process, "writing weights")
    (leftover,) = place.iterdir()
    assert leftover.name.startswith(f".engine.partial-{process.pid}-")
    with pytest.raises(ConfigError, match="does not exist"):
        EngineDir.open(place / "engine")
    export(checkpoint, place / "engine")
    assert list(place.iterdir()) == [place / "engine"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_engine_or_none(checkpoint: Path, place: Path) -> None:
    started = time.monotonic()
    assert _export_in_a_process(checkpoint, place / "engine").wait() == 0
    duration = time.monotonic() - started
    moments = random.Random(0)
    for attempt in range(12):
        shutil.rmtree(place / "engine", ignore_errors=True)
        process = _export_in_a_process(checkpoint, place / "engine")
        # Half of the kills hit the end, where files are written and the folder gets its name.
        time.sleep(duration * (moments.random() if attempt % 2 else moments.uniform(0.85, 1.0)))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (place / "engine").exists():
            EngineDir.open(place / "engine").verify()


def test_without_torch_the_missing_package_is_named(tiny_checkpoint: Path, place: Path) -> None:
    code = (
        "import sys; sys.modules[sys.argv[3]] = None\n"
        "from qwenrt.exporter import export; from qwenrt.plugins import ConfigError\n"
        "try:\n    export(sys.argv[1], sys.argv[2])\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    for package in ("torch", "onnxscript", "onnx_ir"):
        done = subprocess.run(
            [sys.executable, "-c", code, tiny_checkpoint, place / "engine", package],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"export needs {package}" in done.stdout
        assert "pip install 'qwenrt[export]'" in done.stdout
        assert list(place.iterdir()) == []


PEAK = """
import sys
from qwenrt.exporter import export
engine = export(sys.argv[1], sys.argv[2], weights="float32")
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(peak, engine.manifest.files["model.safetensors"].size)
"""


@pytest.mark.slow
def test_an_export_from_bfloat16_to_float32_takes_little_memory_even_beyond_2_gib(tmp_path: Path) -> None:
    """Case E01 too: an embedding of 550 000 x 1024, 2.2 GB in float32."""
    folder = write_checkpoint(
        tmp_path / "checkpoint", dtype="bfloat16", hidden_size=1024, vocab_size=550_000, num_hidden_layers=1
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK, folder, tmp_path / "engine"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, size = map(int, done.stdout.split())
    assert size > 2**31
    assert peak < 1.3 * size + 1.5 * 2**30, "the bound"
    assert peak < 2.2 * 2**30, "what it takes: torch, and one bfloat16 tensor's pages"
    EngineDir.open(tmp_path / "engine").verify()
    import onnx

    from qwenrt.plugins.schema import register_onnx_schemas

    register_onnx_schemas()
    onnx.checker.check_model(tmp_path / "engine" / "model.onnx", full_check=True)
    stored = load_file(tmp_path / "engine" / "model.safetensors")["model.embed_tokens.weight"]
    source = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stored[-1000:], source[-1000:].float())
