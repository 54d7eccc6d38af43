"""OpenVINO GenAI with paged attention: python -m peers.openvino FOLDER --workload NAME, in its environment.

Weights in float32 are computed in float32; otherwise it chooses (bfloat16 where the CPU has it). Prefixes are cached in workload
shared-prefix alone, where that helps.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from qwenrt.tools.bench.workloads import Workload

from .rival import main

_CACHE_GIB = 2


class OpenVino:
    """A pipeline with continuous batching."""

    def __init__(self, model: Path, threads: int, workload: Workload) -> None:
        self.pid = os.getpid()
        self._next_id = 0
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = bool(workload.shared_tokens)
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if model.name.endswith("float32"):
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """As Rival.generate."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new_tokens, False, True
        start = perf_counter()
        handles = []
        for prompt in prompts:
            handles.append(
                self._pipeline.add_request(self._next_id, openvino.Tensor(np.array([prompt], np.int64)), config)
            )
            self._next_id += 1
        first, made = 0.0, 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle in handles:
                while handle.can_read():
                    made += sum(len(output.generated_ids) for output in handle.read().values())
            if made and not first:
                first = perf_counter() - start
        total = perf_counter() - start
        assert made == len(prompts) * new_tokens, f"{made} tokens"
        return first, total


if __name__ == "__main__":
    main(OpenVino)
