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

    @torch.inference_mode()
    def choices(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The most likely token at each place of `answer`, given what stands before it.

        They are `answer` itself if, and only if, `greedy` would give it: one pass in place of one for each token.
        """
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0]
        choices: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return choices
