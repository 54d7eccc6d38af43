"""Every family of decoders: exported, it gives the greedy tokens of transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError, QwenrtWarning
from qwenrt.runtime import LLM, SamplingParams
from qwenrt.runtime.model_runner import StepInputs
from tests import packing
from tests.checkpoints import quantize_checkpoint, write_checkpoint
from tests.oracle import Oracle
from tests.tolerance import relative_error

NUM_NEW = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}
MOE: dict[str, Any] = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "qwen3-windows-from-the-second-layer": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3-windows-by-layer-types": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {"family": "qwen2"},
    "qwen2-untied-windows": {
        "family": "qwen2",
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "llama": {"family": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True, "rope_theta": 1e4},
    "moe": MOE,
    "moe-shares-of-all": {**MOE, "norm_topk_prob": False, "tie_word_embeddings": False},
    "moe-plain-layers": {**MOE, "mlp_only_layers": [1], "attention_bias": True},
    "moe-every-second-layer": {**MOE, "decoder_sparse_step": 2, "num_experts_per_tok": 1},
    "moe-128-experts": {**MOE, "num_experts": 128, "num_experts_per_tok": 8},
    "moe-windows": {**MOE, "use_sliding_window": True, "sliding_window": 6},
    "qwen3-yarn": {"family": "qwen3", "rope_parameters": YARN, "max_position_embeddings": 32},
    "llama3": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500000.0,
        },
    },
}


def prompts(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab_size, length).tolist() for length in (1, 9, 40)]


def check_tokens(checkpoint: Path, engine: Path, reference: Path | None = None, **options: Any) -> None:
    """Export, and compare the tokens of prompts that are answered together with those of transformers, one by one.

    `reference` is the checkpoint for transformers, by default the same; `options` are for the export.
    """
    manifest = export(checkpoint, engine, block_size=8, **options).manifest
    batch = prompts(manifest.model.vocab_size)
    oracle = Oracle(reference or checkpoint)
    for prompt, output in zip(batch, LLM(engine).generate(batch, GREEDY), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_NEW
        assert tokens == oracle.choices(prompt, tokens)


def test_a_prompt_as_long_as_dynamic_scaling_was_exported_for(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    checkpoint = write_checkpoint(
        tmp_path / "checkpoint", num_hidden_layers=2, max_position_embeddings=32, rope_parameters=rope
    )
    prompt = np.random.default_rng(0).integers(0, 320, 63).tolist()
    with pytest.warns(QwenrtWarning, match="dynamic"):
        export(checkpoint, tmp_path / "engine", max_model_len=64)
    [output] = LLM(tmp_path / "engine").generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    assert output.outputs[0].token_ids == Oracle(checkpoint).greedy(prompt, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=3, num_hidden_layers=2, **FAMILIES[name])
    check_tokens(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize("kind", packing.CONFIGS)
def test_a_quantized_checkpoint_gives_the_tokens_of_what_its_matrices_stand_for(kind: str, tmp_path: Path) -> None:
    """Case L10: some projections and the head are plain, as `modules_to_not_convert` has it."""
    family = MOE if kind == "fp8" else {"family": "qwen2" if kind == "gptq" else "qwen3"}
    tied = kind != "awq"
    checkpoint, reference = tmp_path / "checkpoint", tmp_path / "reference"
    write_checkpoint(checkpoint, seed=5, num_hidden_layers=2, tie_word_embeddings=tied, **family)
    quantize_checkpoint(checkpoint, reference, kind, plain=lambda name: ".1.self_attn." in name)
    check_tokens(checkpoint, tmp_path / "engine", reference)


@pytest.mark.parametrize("name", ["qwen2", "moe"])
def test_the_torch_backend_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    export(write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2, **FAMILIES[name]), tmp_path / "engine")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = [
        LLM(tmp_path / "engine", backend=b).generate([prompts(320)[1]], params) for b in ("onnxruntime", "torch")
    ]
    ours, theirs = (output.outputs[0].token_ids for [output] in answers)
    assert ours == theirs


def test_a_config_as_tinyllama_has_it_needs_no_head_dim(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=2, family="llama", head_dim=16)
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    for name in ("head_dim", "mlp_bias", "attention_bias", "dtype"):
        del config[name]
    old = {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": theta, "torch_dtype": "float32"}
    path.write_text(json.dumps(config | old))
    check_tokens(checkpoint, tmp_path / "engine")


def logits(llm: LLM, prompt: list[int], slot: int | None = None) -> npt.NDArray[np.float32]:
    """Of every token of a prompt, with the adapter of a slot."""
    count = len(prompt)
    blocks = np.arange(-(-count // llm.engine.manifest.block_size), dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    ends = np.array([0, count], np.int32)
    adapters = None if slot is None else np.full(count, slot, np.int32)
    inputs = StepInputs(np.array(prompt, np.int32), rows, blocks[None], ends[1:], ends, rows, adapters)
    return llm.engine.backend.execute(inputs).copy()


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_experts_in_integers(weights: str, tolerance: float, tmp_path: Path) -> None:
    # Every token goes to every expert: what is rounded cannot choose others.
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    config = {**MOE, **experts, "mlp_only_layers": [1], "tie_word_embeddings": False}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=1, num_hidden_layers=2, **config)
    export(checkpoint, tmp_path / "plain")
    export(checkpoint, tmp_path / "integers", weights=weights)
    llm = LLM(tmp_path / "integers")
    prompt = prompts(320)[2]
    error = relative_error(logits(llm, prompt), logits(LLM(tmp_path / "plain"), prompt))
    assert tolerance / 20 < error < tolerance
    with safe_open(tmp_path / "integers" / "model.safetensors", "numpy") as weights_file:
        kinds = {name: weights_file.get_slice(name).get_dtype() for name in weights_file.keys()}  # noqa: SIM118
    assert kinds["model.layers.0.mlp.gate.weight"] == "F32"
    assert kinds["model.layers.0.mlp.experts.down_proj"] == ("I8" if weights == "int8" else "U8")
    together = llm.generate(prompts(320), GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts(320)]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]


def test_experts_that_do_not_fill_panels_are_refused_in_integers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, **{**MOE, "moe_intermediate_size": 40})
    with pytest.raises(ConfigError, match="multiples of 16, not 64 and 40; store them in float32"):
        export(checkpoint, tmp_path / "engine", weights="int8")
    assert not (tmp_path / "engine").exists()
