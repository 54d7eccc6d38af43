"""ONNX Runtime GenAI: python -m peers.ortgenai FOLDER --workload NAME, in its environment.

Its batches are static: prompts of one length that begin and end together. Prompts that share their beginning go one by one: it
has no prefix cache, and a batch of them takes the logits of all their tokens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter

import numpy as np
import onnxruntime_genai as genai

from qwenrt.tools.bench.workloads import Workload

from .rival import main


class OrtGenAi:
    """A model of ONNX Runtime GenAI."""

    def __init__(self, model: Path, threads: int, workload: Workload) -> None:
        self.pid = os.getpid()
        self._batched = not workload.shared_tokens
        config = genai.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = genai.Model(config)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """As Rival.generate."""
        if self._batched:
            return self._generate(prompts, new_tokens)
        times = [self._generate([prompt], new_tokens) for prompt in prompts]
        return times[0][0], sum(total for _, total in times)

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        length = len(prompts[0]) + new_tokens
        params = genai.GeneratorParams(self._model)
        # Beyond min_length it would stop at an end of text.
        params.set_search_options(do_sample=False, min_length=length, max_length=length, batch_size=len(prompts))
        start = perf_counter()
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = perf_counter() - start
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        total = perf_counter() - start
        assert all(len(generator.get_sequence(row)) == length for row in range(len(prompts)))
        return first, total


if __name__ == "__main__":
    main(OrtGenAi)
