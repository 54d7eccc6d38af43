"""A backend that makes a single request emit a chosen list of tokens, so that endings do not depend on what a model says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwenrt.runtime import LLM, RequestOutput, SamplingParams
from qwenrt.runtime.model_runner import StepInputs

PROMPT = [65, 66, 67]


class ForcedBackend:
    """Gives token i of the list all the probability at the i-th generated position; after the list, id 0."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, num_prompt: int = len(PROMPT)) -> None:
        self.tokens = list(tokens)
        self.vocab_size = vocab_size
        self.num_prompt = num_prompt

    def execute(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits = np.full((len(inputs.logits_indices), self.vocab_size), -20.0, np.float32)
        for row, index in enumerate(inputs.logits_indices):
            place = int(inputs.positions[index]) - (self.num_prompt - 1)
            logits[row, self.tokens[place] if place < len(self.tokens) else 0] = 20.0
        return logits


def forced(llm: LLM, tokens: Sequence[int], params: SamplingParams) -> tuple[RequestOutput, list[str]]:
    """What a request gets that is forced to `tokens`, and its text after each step."""
    real = llm.engine.backend
    llm.engine.backend = ForcedBackend(tokens, llm.engine.manifest.model.vocab_size)
    texts: list[str] = []
    try:
        (output,) = llm.generate(PROMPT, params, on_output=lambda now: texts.append(now.outputs[0].text))
    finally:
        llm.engine.backend = real
    return output, texts


def bytes_of(text: str) -> list[int]:
    """Ids of `text` in a vocabulary whose first 256 tokens are the bytes in order."""
    return list(text.encode())


def load(engine: Path) -> LLM:
    return LLM(engine, num_kv_blocks=64, max_model_len=200, threads=1, enable_prefix_caching=False)
