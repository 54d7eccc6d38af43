"""`weights="checkpoint"`: an engine has a quantised checkpoint's own integers and scales, and computes what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qwenrt.exporter import export
from qwenrt.exporter.config import ModelConfig
from qwenrt.exporter.dequantize import GgufWeight
from qwenrt.exporter.gguf_blocks import FORMATS
from qwenrt.exporter.integers import ROW_GROUP, IntegerFormat
from qwenrt.exporter.modeling import parameter_sources
from qwenrt.exporter.quantization_config import Quantization
from qwenrt.exporter.quantized_weight import Part
from qwenrt.exporter.safetensors_file import TensorInfo
from qwenrt.plugins import ConfigError, reference
from qwenrt.plugins.schema import EMBEDDING, LINEAR, MIXTURE_OF_EXPERTS
from qwenrt.runtime import LLM
from tests import packing
from tests.checkpoints import quantize_checkpoint, write_checkpoint
from tests.gguf_files import write_gguf
from tests.runtime.test_families import GREEDY, MOE, logits, prompts
from tests.tolerance import relative_error

from .test_dequantize import quantized_weight

Array = npt.NDArray[Any]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
SPECS = {spec.name: [value.name for value in spec.inputs] for spec in (LINEAR, EMBEDDING, MIXTURE_OF_EXPERTS)}
PARTS = ("scale", "groups", "group_scale", "group_offset")


def stored(engine: Path) -> dict[str, Array]:
    """Each matrix of an engine's nodes, as what they take for it stands for in float32, by the name of its codes."""
    tensors = load_file(engine / "model.safetensors")
    found = {}
    for node in onnx.load(engine / "model.onnx", load_external_data=False).graph.node:
        names = SPECS.get(node.op_type, [])
        taken = dict(zip(names, node.input, strict=False))
        for matrix in {"gate_up", "down", "weight"} & taken.keys():
            prefix = "" if matrix == "weight" else f"{matrix}_"
            parts = [tensors.get(taken.get(prefix + part, "")) for part in PARTS]
            codes, *rest = (None if part is None else part.numpy() for part in (tensors[taken[matrix]].float(), *parts))
            assert codes is not None
            if rest[0] is not None:
                codes = tensors[taken[matrix]].numpy()
                depth = codes.shape[1] * (4 if rest[1] is None else 8)
                codes = reference.embedding(np.arange(len(rest[0])), codes, *rest, depth=depth)
            found[taken[matrix]] = codes
    return found


def check_values(engine: Path, reference_folder: Path) -> None:
    """Every matrix is to the bit what the checkpoint's tensors stand for, which lie in a folder in float32."""
    expected = load_file(reference_folder / "model.safetensors")
    sources = parameter_sources(ModelConfig.from_dir(reference_folder))
    matrices = stored(engine)
    assert len(matrices) > 4
    for name, value in matrices.items():
        want = torch.cat([expected[source] for source in sources[name]]).float().numpy()
        np.testing.assert_array_equal(value[:, : want.shape[1]], want, err_msg=name)


def check_logits(engine: Path, plain: Path, tolerance: float = 0.05) -> None:
    """An engine agrees with one in float32 but for how activations are rounded, and with itself in any batch."""
    llm = LLM(engine)
    prompt = prompts(320)[2]
    error = relative_error(logits(llm, prompt), logits(LLM(plain), prompt))
    assert 1e-4 < error < tolerance
    together = llm.generate(prompts(320), GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts(320)]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]


def dtypes(engine: Path) -> dict[str, str]:
    with safe_open(engine / "model.safetensors", "numpy") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("kind", "suffixes"),
    [
        ("awq", {"", "_scale", "_groups", "_group_scale"}),
        ("gptq-v2", {"", "_scale", "_groups", "_group_scale"}),
        ("w4a16", {"", "_scale", "_groups", "_group_scale"}),
        ("w8a8", {"", "_scale"}),
        ("gptq-int8", {"", "_scale"}),
    ],
)
def test_integers_and_scales_are_the_checkpoints(kind: str, suffixes: set[str], tmp_path: Path) -> None:
    """A last group of 8 columns, and k and v that fill no whole panel, are no hindrance."""
    config = {"intermediate_size": 168, "head_dim": 8, "num_key_value_heads": 1, "dtype": "bfloat16"}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=3, num_hidden_layers=1, **config)
    quantize_checkpoint(checkpoint, tmp_path / "reference", kind)
    lines: list[str] = []
    manifest = export(checkpoint, tmp_path / "engine", weights="checkpoint", notice=lines.append).manifest
    assert lines.pop().startswith("4 matrices of ") and not lines
    assert manifest.weights == "checkpoint" and manifest.kv_dtype == "float16"
    check_values(tmp_path / "engine", tmp_path / "reference")
    found = dtypes(tmp_path / "engine")
    gate_up = "model.layers.0.mlp.gate_up_proj.weight"
    assert {name.removeprefix(gate_up) for name in found if name.startswith(gate_up)} == suffixes
    assert found["model.embed_tokens.weight"] == "BF16"


@pytest.mark.parametrize("kind", ["awq", "w8a8"])
def test_logits_are_those_of_the_decoded_checkpoint(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=3, num_hidden_layers=2)
    quantize_checkpoint(checkpoint, tmp_path / "reference", kind)
    export(checkpoint, tmp_path / "engine", weights="checkpoint")
    export(tmp_path / "reference", tmp_path / "plain")
    check_logits(tmp_path / "engine", tmp_path / "plain")


def test_experts_keep_their_integers(tmp_path: Path) -> None:
    config = {
        **MOE,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    }
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=1, num_hidden_layers=1, **config)
    quantize_checkpoint(checkpoint, tmp_path / "reference", "awq")
    export(checkpoint, tmp_path / "engine", weights="checkpoint")
    export(tmp_path / "reference", tmp_path / "plain")
    check_values(tmp_path / "engine", tmp_path / "reference")
    check_logits(tmp_path / "engine", tmp_path / "plain")


@pytest.mark.parametrize("mix", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_blocks_of_a_gguf_file_are_kept(mix: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=2, num_hidden_layers=1, **WIDE)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tmp_path / "reference", mix)
    export(path, tmp_path / "engine", weights="checkpoint")
    check_values(tmp_path / "engine", tmp_path / "reference")
    # Where the pieces of one product are in several types, the form is one that holds all.
    codes = dtypes(tmp_path / "engine")["model.layers.0.self_attn.qkv_proj.weight"]
    assert codes == ("U8" if mix == "Q4_0" else "I8")
    [output] = LLM(tmp_path / "engine").generate(prompts(320)[:1], GREEDY)
    assert output.outputs[0].token_ids


@pytest.mark.parametrize("kind", FORMATS)
def test_every_block_type_is_read_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (64, 2048 // block, size)).astype(np.uint8)
    halves = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind, 1)
    at = slice(-2, None) if kind == "Q6_K" else slice(0, 2 * halves)
    data[:, :, at] = rng.uniform(-1, 1, (64, 2048 // block, halves)).astype(np.float16).view(np.uint8)
    data = data.reshape(64, -1)
    info = TensorInfo(Path("model.gguf"), 0, data.nbytes, kind, (64, 2048))
    weight = GgufWeight("x", {"weight": Part(info, lambda: data)}, (64, 2048), Quantization(method="gguf", bits=0))
    found = next(iter(weight.integer_rows()))
    groups = np.arange(2048) // found.group_size
    zero = 0 if found.zero_point is None else found.zero_point[:, groups].astype(np.float32)
    value = (found.codes - zero) * found.scale[:, groups]
    if found.offset is not None:
        value = value + found.offset[:, groups]
    np.testing.assert_array_equal(value.astype(np.float32), weight.decode())
    form = weight.integer_format()
    assert form.group_size == found.group_size and form.offset == (found.offset is not None)
    assert found.codes.dtype == (np.uint8 if form.bits == 4 else np.int8)


def decoded(
    tensors: packing.Tensors, quantization: Quantization, shape: tuple[int, int]
) -> tuple[Array, IntegerFormat]:
    """What a matrix's integers stand for, and their form."""
    weight = quantized_weight(tensors, quantization, shape)
    form, rows = weight.integer_format(), [one.arranged(weight.integer_format()) for one in weight.integer_rows()]
    codes, scale, *rest = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    size = form.group_size or ROW_GROUP
    groups = np.arange(shape[1]) // size
    value = codes.astype(np.float32)
    if form.bits == 4:
        value -= rest.pop(0)[:, groups]
    value *= rest.pop(0)[:, groups] if form.group_size else scale[:, None]
    return value + (rest.pop(0)[:, groups] if form.offset else 0), form


def test_zero_points_of_8_bits_become_offsets() -> None:
    """Codes less their zero points have 9 bits; but the two products of a half and 8 bits are exact."""
    matrix = packing.random_codes(32, 96, bits=8, group_size=32)
    value, form = decoded(
        packing.gptq(matrix, bits=8), Quantization(method="gptq", bits=8, group_size=32, zero_offset=1), (32, 96)
    )
    np.testing.assert_array_equal(value, matrix.value())
    assert form == IntegerFormat(8, 32, offset=True)


@pytest.mark.parametrize(("group_size", "expected"), [(96, 32), (256, 128), (-1, 0), (16, 16)])
def test_groups_of_other_sizes_are_several_of_the_kernels(group_size: int, expected: int) -> None:
    columns = 512 if group_size != 96 else 288
    size = columns if group_size < 0 else group_size
    matrix = packing.random_codes(32, columns, group_size=size)
    quantization = Quantization(method="gptq", bits=4, group_size=max(group_size, 0), zero_offset=1)
    value, form = decoded(packing.gptq(matrix), quantization, (32, columns))
    np.testing.assert_array_equal(value, matrix.value())
    assert form == IntegerFormat(4, expected)


class TestRefused:
    def refused(
        self, tensors: packing.Tensors, quantization: Quantization, shape: tuple[int, int], message: str
    ) -> None:
        weight = quantized_weight(tensors, quantization, shape)
        with pytest.raises(
            ConfigError, match=message + r", which weights checkpoint cannot keep; use weights int8 or float32"
        ):
            list(weight.integer_rows())

    def test_columns_in_any_order(self) -> None:
        matrix = packing.random_codes(32, 96, act_order=True)
        quantization = Quantization(method="gptq", bits=4, group_size=32, zero_offset=1)
        self.refused(
            packing.gptq(matrix), quantization, (32, 96), r"columns in groups of any order \(g_idx, act-order\)"
        )

    def test_floats_of_8_bits(self) -> None:
        tensors = packing.fp8(np.ones((32, 96)), np.ones((1, 1), np.float32))
        self.refused(tensors, Quantization(method="fp8", block=(128, 128)), (32, 96), "is of 8-bit floats")

    def test_groups_of_an_odd_size(self) -> None:
        matrix = packing.random_codes(32, 96, group_size=12)
        self.refused(
            packing.gptq(matrix), Quantization(method="gptq", bits=4, group_size=12), (32, 96), "groups of 12 columns"
        )

    def test_offsets_that_float32_does_not_hold(self) -> None:
        matrix = packing.random_codes(32, 96, bits=8, dtype=np.float32)
        quantization = Quantization(method="gptq", bits=8, group_size=32, zero_offset=1)
        self.refused(packing.gptq(matrix, bits=8), quantization, (32, 96), "whose products float32 does not hold")

    def test_an_export_names_the_matrix_and_leaves_nothing(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
        quantize_checkpoint(checkpoint, tmp_path / "reference", "gptq")
        with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\" has columns in groups of any order"):
            export(checkpoint, tmp_path / "engine", weights="checkpoint")
        assert not (tmp_path / "engine").exists()

    def test_a_checkpoint_of_floats(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
        with pytest.raises(
            ConfigError, match=r"weights checkpoint keeps the integers .* the checkpoint is not quantised"
        ):
            export(checkpoint, tmp_path / "engine", weights="checkpoint")

    def test_another_target(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="weights is 'checkpoint', must be bfloat16 or"):
            export(tmp_path, tmp_path / "engine", target="tensorrt", weights="checkpoint")
