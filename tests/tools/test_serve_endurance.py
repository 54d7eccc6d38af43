"""Many requests leave nothing behind: no memory, no KV block, no wrong answer."""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from demo.tasks import held_out

from qwenrt.runtime import LLM, SamplingParams

from .served import Served

CLIENTS = 16
EXAMPLES = [example for task in ("copy", "add_thinking", "reverse") for example in held_out(task, 8, 11)]


class Clients:
    """Threads that keep their connections and send a mix of requests, each checked against the offline answer."""

    def __init__(self, served: Served, expected: list[str]) -> None:
        self._served = served
        self._expected = expected
        self._local = threading.local()

    def run(self, count: int, seed: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._one, range(seed, seed + count)))

    def _one(self, seed: int) -> None:
        chance = random.Random(seed)
        index = chance.randrange(len(EXAMPLES))
        example = EXAMPLES[index]
        body: dict[str, Any] = {
            "messages": example.messages,
            "chat_template_kwargs": {"enable_thinking": example.enable_thinking},
            "temperature": 0,
            "max_tokens": 100,
        }
        kind = chance.choice(["whole", "stream", "leave", "wrong", "form"])
        match kind:
            case "leave":
                self._leave({**body, "stream": True, "ignore_eos": True})
            case "wrong":
                assert self._post({**body, "temperature": -1})[0] == 400
            case "form":
                status, answer = self._post({**body, "guided_regex": f"[a-z]{{{seed % 50 + 1}}}"})
                assert status == 200, answer
            case "whole":
                status, answer = self._post(body)
                assert (status, answer["choices"][0]["message"]["content"]) == (200, self._expected[index])
            case "stream":
                assert self._stream({**body, "stream": True}) == self._expected[index]

    def _request(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(
                "127.0.0.1", self._served.port, timeout=300
            )
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response: http.client.HTTPResponse = connection.getresponse()
        return response

    def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        response = self._request(body)
        return response.status, json.loads(response.read())

    def _stream(self, body: dict[str, Any]) -> str:
        lines = [line.removeprefix("data: ") for line in self._request(body).read().decode().split("\n\n")]
        assert lines[-2:] == ["[DONE]", ""]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-2])

    def _leave(self, body: dict[str, Any]) -> None:
        self._request(body).read(200)
        self._local.connection.close()
        self._local.connection = None


def endure(engine: Path, warm_up: int, count: int) -> None:
    llm = LLM(engine, num_kv_blocks=512)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    prompts = [llm.render(example.messages, enable_thinking=example.enable_thinking) for example in EXAMPLES]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params)]
    served = Served(engine)
    try:
        clients = Clients(served, [text.split("</think>")[-1].lstrip("\n") for text in texts])
        clients.run(warm_up, seed=0)
        before = served.resident_bytes()
        clients.run(count, seed=1000)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            assert served.metric(name) == 0
        # What Python and the allocators keep varies by a few MiB whatever the number of requests.
        assert served.resident_bytes() - before < 24 << 20
        assert served.end(signal.SIGTERM) == (0, "")
    finally:
        served.process.kill()
        served.process.communicate()


def test_hundreds_of_requests_leave_nothing(demo_engine: Path) -> None:
    endure(demo_engine, 100, 200)


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing(demo_engine: Path) -> None:
    endure(demo_engine, 500, 10_000)
