"""llama.cpp through its server: python -m peers.llama FILE.gguf --workload NAME, with LLAMA_SERVER naming the binary.

One slot a sequence. Prompts go as token ids; times are the server's own where there is one sequence, and the client's otherwise.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from qwenrt.tools.bench.workloads import Workload

from .ports import free_port
from .rival import main


class Llama:
    """A llama-server."""

    def __init__(self, model: Path, threads: int, workload: Workload) -> None:
        self._slots = workload.sequences
        self._port = free_port()
        context = max(512, -(-(workload.length + 32) // 256) * 256) * self._slots
        self._server = subprocess.Popen(
            [
                *(os.environ["LLAMA_SERVER"], "-m", str(model), "-t", str(threads), "-c", str(context)),
                *("-np", str(self._slots), "--port", str(self._port), "--no-kv-unified"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self._server.kill)
        self.pid = self._server.pid
        while not self._ready():
            if self._server.poll() is not None:
                raise SystemExit(f"llama-server ended with status {self._server.returncode}")
            time.sleep(0.01)

    def _ready(self) -> bool:
        try:
            return self._call("GET", "/health")[0] == 200
        except OSError:
            return False

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def _complete(self, prompt: list[int], new_tokens: int) -> dict[str, float]:
        """What the server says of a request's times."""
        body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
        status, answer = self._call("POST", "/completion", body)
        timings: dict[str, float] = answer["timings"]
        assert status == 200 and timings["predicted_n"] == new_tokens, answer
        return timings

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """As Rival.generate."""
        start = perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            timings = list(pool.map(lambda prompt: self._complete(prompt, new_tokens), prompts))
        total = perf_counter() - start
        if len(prompts) == 1:
            first = timings[0]["prompt_ms"] / 1000
            return first, first + timings[0]["predicted_ms"] / 1000
        return min(timing["prompt_ms"] for timing in timings) / 1000, total


if __name__ == "__main__":
    main(Llama)
