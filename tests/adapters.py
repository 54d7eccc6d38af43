"""LoRA adapters made, and merged, by PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(path: Path, checkpoint: Path, seed: int = 0, **config: Any) -> Path:
    """Let PEFT save an adapter of random weights for a checkpoint; `config` is for its LoraConfig. Returns `path`."""
    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS, "init_lora_weights": False, **config}
    model = get_peft_model(_base(checkpoint), LoraConfig(task_type="CAUSAL_LM", **values))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
    # Else it saves a copy of a head that the adapter changes.
    model.save_pretrained(path, save_embedding_layers=False)
    return path


def merge_adapter(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """Let PEFT merge an adapter into a checkpoint, in float32, and save the result as one. Returns `path`."""
    PeftModel.from_pretrained(_base(checkpoint), adapter).merge_and_unload().save_pretrained(path)
    return path


def _base(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
