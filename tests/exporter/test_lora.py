"""Adapters merged at export: the engine gives the tokens of transformers with PEFT; whatever is wrong is one clear error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwenrt.exporter import export
from qwenrt.plugins import ConfigError
from qwenrt.runtime import LLM
from qwenrt.runtime.lora import LoraAdapter
from tests.adapters import merge_adapter, write_adapter
from tests.checkpoints import quantize_checkpoint, write_checkpoint
from tests.oracle import Oracle
from tests.runtime.test_families import GREEDY, NUM_NEW, check_tokens, prompts

ADAPTERS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 8, "lora_alpha": 2},
    "some modules, some layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "patterns": {
        "rank_pattern": {"q_proj": 7, "^model.layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 16, "v_proj": 0.5},
    },
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lora") / "checkpoint", seed=9, num_hidden_layers=2)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_adapter_gives_the_tokens_of_peft(name: str, base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, **ADAPTERS[name])
    reference = merge_adapter(tmp_path / "reference", base, adapter)
    check_tokens(base, tmp_path / "engine", reference, lora=adapter)
    prompt = prompts(320)[1]
    [output] = LLM(tmp_path / "engine").generate([prompt], GREEDY)
    assert output.outputs[0].token_ids != Oracle(base).greedy(prompt, NUM_NEW)


def test_an_adapter_of_an_untied_head_and_of_another_family(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family="qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    adapter = write_adapter(tmp_path / "adapter", base, target_modules=["lm_head", "k_proj"])
    check_tokens(base, tmp_path / "engine", merge_adapter(tmp_path / "reference", base, adapter), lora=adapter)


def test_an_adapter_merges_into_decoded_matrices(tmp_path: Path) -> None:
    packed, decoded = write_checkpoint(tmp_path / "packed", num_hidden_layers=2), tmp_path / "decoded"
    quantize_checkpoint(packed, decoded, "awq")
    adapter = write_adapter(tmp_path / "adapter", decoded)
    check_tokens(packed, tmp_path / "engine", merge_adapter(tmp_path / "reference", decoded, adapter), lora=adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3", only LORA'),
        ({"use_dora": True}, "use_dora is true, which is not supported; merge the adapter with PEFT"),
        ({"bias": "all"}, 'bias is "all"'),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is list"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights is "pissa_niter_4", which changes the base'),
        ({"r": 0}, "r is 0, must be an integer from 1 to 1024"),
        ({"r": 10**9}, "r is 1000000000, must be"),
        ({"r": True}, "r is true, must be"),
        ({"r": 5}, "makes their rank 5"),
        ({"lora_alpha": "6"}, 'lora_alpha is "6", must be a number'),
        ({"lora_alpha": float("nan")}, "lora_alpha is NaN, must be a number"),
        ({"use_rslora": 1}, "use_rslora is 1, must be true or false"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern must be an object whose keys are names"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 2.5}}, "r is 2.5, must be an integer"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_field(
    change: dict[str, Any], message: str, adapter: Path
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(adapter, message)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {}, "holds no tensors"),
        (lambda tensors: {QUERY: tensors[QUERY]}, "q_proj has no lora_B.weight"),
        (lambda tensors: {**tensors, QUERY: tensors[QUERY] * float("nan")}, "holds what is no finite number"),
        (lambda tensors: {**tensors, QUERY: tensors[QUERY].int()}, "is I32 of shape"),
        (lambda tensors: {**tensors, QUERY: tensors[QUERY][0].clone()}, r"is F32 of shape \[64\]"),
        (renamed("lora_A.weight", "lora_embedding_A"), "is no lora_A.weight or lora_B.weight of a Linear layer"),
        (lambda tensors: {**tensors, "x.lora_magnitude_vector": torch.ones(2, 2)}, "is no lora_A.weight"),
        (renamed("model.layers.0.", "model.layers.7."), "changes model.layers.7.* no projection of this model"),
        (renamed("self_attn.q_proj", "embed_tokens"), "embed_tokens.* no projection"),
        (renamed("k_proj", "up_proj"), r"mlp.up_proj|self_attn.up_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: Any, message: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name: value.contiguous() for name, value in change(load_file(path)).items()}, path)
    with pytest.raises(ConfigError, match=message) as caught:
        export(base, tmp_path / "engine", lora=adapter)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "engine").exists()


def test_an_adapter_of_another_shape_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=2, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"shape \[64, 128\], the model's is \[64, 96\]"):
        export(other, tmp_path / "engine", lora=adapter)


def test_files_that_are_damaged_missing_or_leave_the_folder_are_refused(adapter: Path, tmp_path: Path) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    data, text = weights.read_bytes(), config.read_text()
    for damaged, message in (
        (data[:-10], "is damaged"),
        (b"", "is damaged"),
        (struct.pack("<Q", 1 << 60) + data[8:], "names a header of"),
    ):
        weights.write_bytes(damaged)
        refused(adapter, message)
    weights.write_bytes(data)
    for wrong in ("", "[", "[]", "[" * 10000, '{"peft_type": "LORA", "r": 4}' + " " * (1 << 20)):
        config.write_text(wrong)
        refused(adapter, "adapter_config.json")
    config.unlink()
    refused(adapter, "adapter_config.json is missing")
    (tmp_path / "elsewhere.json").write_text(text)
    config.symlink_to(tmp_path / "elsewhere.json")
    refused(adapter, "is a link that leaves its folder")
    refused(tmp_path / "nowhere", "does not exist")


def refused(adapter: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LoraAdapter.from_dir(adapter)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
