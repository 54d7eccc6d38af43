"""Hugging Face transformers in float32: the judge of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """A checkpoint in transformers' own modules, eager attention."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely tokens after `prompt`, end-of-text tokens included like any other."""
        token_ids, cache, generated = torch.tensor([list(prompt)]), None, []
        for _ in range(count):
            result = self.model(token_ids, cache=cache, use_cache=True)
            cache = result.cache
            token_ids = result.logits[:, -1].argmax(-1, keepdim=True)
            generated.append(int(token_ids))
        return generated
