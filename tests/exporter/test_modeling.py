"""Our torch modules against transformers': logits, and the output of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qwenrt.exporter import ModelConfig
from qwenrt.exporter.modeling import parameter_sources
from tests.checkpoints import write_checkpoint

from .eager import empty_caches, load_module, make_step, run, scattered_blocks

BLOCK_SIZE = 8
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "untied-bias": {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 3},
    "one-kv-head": {"num_key_value_heads": 1, "head_dim": 64},
    "as-many-kv-heads": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3, "rope_theta": 1e4},
    "bfloat16-weights": {"dtype": "bfloat16"},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e6,
        },
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        },
    },
    "experts": {
        "family": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 320, count).tolist()
    return ids


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Within `tolerance` of the largest value."""
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


class Outputs(list[torch.Tensor]):
    """What some modules return, gathered while they run."""

    def hook(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.append(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_each_layers_output_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", seed=1, **CONFIGS[name])
    module = load_module(folder, block_size=BLOCK_SIZE)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ours, theirs = Outputs(), Outputs()
    for outputs, layers in ((ours, module.model.layers), (theirs, oracle.model.layers)):
        for layer in layers:
            layer.register_forward_hook(outputs.hook)
    prompts = [random_ids(length, length) for length in (1, 37, 2, 8, 9)]
    step = make_step([(ids, 0) for ids in prompts], scattered_blocks(5, 5, 30))
    logits, _ = run(module, step, empty_caches(module, 30, BLOCK_SIZE))
    for ids, start in zip(prompts, step.query_start, strict=False):
        theirs.clear()
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).logits[0]
        rows = slice(start, start + len(ids))
        assert close(logits[rows], expected)
        for layer, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
            assert close(found[rows], wanted.reshape(len(ids), -1)), f"layer {layer}"


def test_a_prompt_in_chunks_beside_others_has_the_logits_that_it_has_whole(tiny_checkpoint: Path) -> None:
    module = load_module(tiny_checkpoint, block_size=BLOCK_SIZE)
    first, second = random_ids(30, 1), random_ids(20, 2)
    tables = scattered_blocks(2, 5, 12)
    whole, _ = run(module, make_step([(first, 0), (second, 0)], tables), empty_caches(module, 12, BLOCK_SIZE))
    caches = empty_caches(module, 12, BLOCK_SIZE)
    logits = {}
    for chunks in (
        [(0, 0, 7), (1, 0, 1)],
        [(0, 7, 8), (1, 1, 19)],
        [(0, 8, 30)],
    ):
        step = make_step(
            [((first, second)[s][start:end], start) for s, start, end in chunks], tables[[s for s, _, _ in chunks]]
        )
        rows, caches = run(module, step, caches)
        for (s, _, end), row in zip(chunks, step.query_start[1:] - 1, strict=True):
            logits[s, end] = rows[row]
    for (s, end), row in logits.items():
        assert close(row, whole[s * 30 + end - 1], 1e-5)


def test_logits_come_for_the_rows_that_are_asked_for_in_their_order(tiny_checkpoint: Path) -> None:
    module = load_module(tiny_checkpoint, block_size=BLOCK_SIZE)
    ids, tables = random_ids(9, 3), scattered_blocks(1, 2, 2)
    everything, _ = run(module, make_step([(ids, 0)], tables), empty_caches(module, 2, BLOCK_SIZE))
    some, _ = run(module, make_step([(ids, 0)], tables, rows=[8, 0, 3, 3]), empty_caches(module, 2, BLOCK_SIZE))
    assert close(some, everything[[8, 0, 3, 3]], 1e-5)
    none, _ = run(module, make_step([(ids, 0)], tables, rows=[]), empty_caches(module, 2, BLOCK_SIZE))
    assert none.shape == (0, 320)


@pytest.mark.parametrize("tied", [True, False, None])
def test_a_head_that_differs_from_the_embedding_is_used_if_it_is_not_tied(tied: bool | None, tmp_path: Path) -> None:
    """Case L02; without the key transformers' default for Qwen3 holds, which is not tied."""
    folder = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding + 10
    save_file(weights, folder / "model.safetensors")
    text = (folder / "config.json").read_text()
    assert '"tie_word_embeddings": false' in text
    key = "" if tied is None else f'"tie_word_embeddings": {str(tied).lower()}'
    (folder / "config.json").write_text(text.replace('"tie_word_embeddings": false', key or '"unused": 0'))
    module = load_module(folder, block_size=BLOCK_SIZE)
    hidden = Outputs()
    module.model.norm.register_forward_hook(hidden.hook)
    step = make_step([(random_ids(5, 4), 0)], scattered_blocks(1, 1, 1))
    logits, _ = run(module, step, empty_caches(module, 1, BLOCK_SIZE))
    assert close(logits, hidden[0] @ (embedding if tied else embedding + 10).T, 1e-5)
    assert ("lm_head.weight" in parameter_sources(ModelConfig.from_dir(folder))) != bool(tied)


@pytest.mark.parametrize(
    "name", ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
)
def test_every_norm_weight_matters(name: str, tiny_checkpoint: Path) -> None:
    module = load_module(tiny_checkpoint, block_size=BLOCK_SIZE)
    step = make_step([(random_ids(9, 5), 0)], scattered_blocks(1, 2, 2))
    before, _ = run(module, step, empty_caches(module, 2, BLOCK_SIZE))
    weight = module.get_parameter(f"model.layers.1.{name}.weight")
    with torch.no_grad():
        weight.copy_(weight.flip(0))
    after, _ = run(module, step, empty_caches(module, 2, BLOCK_SIZE))
    assert not close(after, before, 1e-3)
