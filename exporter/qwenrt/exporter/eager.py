"""A checkpoint in the modules that engines are traced from, to be run as PyTorch runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qwenrt.runtime.lora import LoraAdapter

from .checkpoint import Checkpoint, open_checkpoint
from .config import ModelConfig
from .modeling import Qwen3ForCausalLM, parameter_sources


def load_module(
    folder: Path,
    *,
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    task: str | None = None,
    adapter: LoraAdapter | None = None,
) -> Qwen3ForCausalLM:
    """Qwen3ForCausalLM with the weights of a checkpoint folder in `dtype`; the table of RoPE is float32 always.

    task: as in `ModelConfig.from_dir`. adapter: merged into the matrices, in float32.

    Raises ConfigError if the folder is not a checkpoint that can be exported, or the adapter does not fit it.
    """
    config, checkpoint = ModelConfig.from_dir(folder, task), open_checkpoint(folder)
    checkpoint.check(config)
    if adapter is not None:
        checkpoint.merge(adapter, config)
    with torch.device("meta"):
        module = Qwen3ForCausalLM(config, block_size=block_size, max_model_len=max_model_len).eval()
    state = {
        name: torch.cat([_tensor(checkpoint, source) for source in sources]).to(dtype) if sources else torch.empty(0)
        for name, sources in parameter_sources(config).items()
    }
    state["rope"] = torch.from_numpy(config.rope.table(max_model_len, config.head_dim))
    module.load_state_dict(state, strict=True, assign=True)
    return module


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """A copy in float32."""
    array = np.array(checkpoint.read(name))
    checkpoint.forget(name)
    tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).float()
