"""Requests that end otherwise than by their answer: clients that leave, steps that fail, full queues (CASES V01, S06)."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from qwenrt.runtime import LLM
from qwenrt.runtime.model_runner import StepInputs

from .conftest import Server

LONG = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 30_000, "temperature": 0}


@pytest.fixture(scope="module")
def server(long_engine: Path) -> Iterator[Server]:
    """One prompt token a step and two sequences, so that requests can be caught in every state."""
    llm = LLM(long_engine, num_kv_blocks=6000, max_num_seqs=2, max_num_batched_tokens=2)
    server = Server(llm, max_queue=3)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _nothing_left(server: Server) -> Iterator[None]:
    yield
    server.until(lambda: server.is_idle)


def send(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a completion request and read nothing."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    connection = send(server, {**LONG, "stream": stream})
    server.until(lambda: server.async_llm.num_running == 1)
    if stream:
        assert b"200 OK" in connection.recv(100)
    connection.close()
    server.until(lambda: server.is_idle, seconds=5)


def test_a_client_that_leaves_while_it_waits_is_never_run(server: Server) -> None:
    busy = [send(server, LONG) for _ in range(2)]
    server.until(lambda: server.async_llm.num_running == 2)
    waiting = send(server, LONG)
    server.until(lambda: server.async_llm.num_waiting == 1)
    waiting.close()
    server.until(lambda: server.async_llm.num_waiting == 0)
    assert server.async_llm.num_running == 2
    for connection in busy:
        connection.close()


def test_a_client_that_leaves_amid_its_prompt_frees_its_blocks(server: Server) -> None:
    connection = send(server, {**LONG, "prompt": list(range(250)) * 20})
    pool = server.llm.engine.scheduler.pool
    server.until(lambda: pool.num_free < pool.num_blocks)
    assert server.llm.engine.scheduler.running[0].num_generated == 0
    connection.close()
    server.until(lambda: server.is_idle, seconds=5)


def test_clients_that_come_and_go_at_random_leave_nothing(server: Server) -> None:
    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        connection = send(server, {**LONG, "stream": chance.random() < 0.5, "n": chance.choice([1, 1, 2])})
        time.sleep(chance.random() * 0.02)
        connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(200)))
    server.until(lambda: server.is_idle)
    answer = server.client().completions.create(model="demo", prompt="a", max_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_a_full_queue_refuses_with_retry_after_and_serves_again(server: Server) -> None:
    connections = [send(server, LONG) for _ in range(5)]
    server.until(lambda: server.async_llm.num_waiting == 3)
    status, headers, data = server.request("POST", "/v1/completions", LONG)
    assert status == 429
    assert 1 <= int(headers["retry-after"]) <= 60
    assert json.loads(data)["error"]["code"] == "rate_limit_exceeded"
    assert server.request("GET", "/health")[0] == 200
    for connection in connections:
        connection.close()
    server.until(lambda: server.is_idle)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_the_gauges_tell_what_runs_and_waits(server: Server) -> None:
    connections = [send(server, LONG) for _ in range(3)]
    server.until(lambda: server.async_llm.num_waiting == 1 and server.async_llm.num_running == 2)
    assert server.metric("vllm:num_requests_running") == 2
    assert server.metric("vllm:num_requests_waiting") == 1
    assert 0 < server.metric("vllm:kv_cache_usage_perc") <= 1
    for connection in connections:
        connection.close()
    server.until(lambda: server.is_idle)
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0


class FailingBackend:
    """Fails in a step that computes the token 7; no step ends before the gate is open."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.gate = threading.Event()

    def execute(self, inputs: StepInputs) -> Any:
        assert self.gate.wait(60)
        if 7 in inputs.input_ids[: inputs.query_start[-1]]:
            raise RuntimeError("out of luck")
        return self.real.execute(inputs)


def test_a_failed_step_fails_its_requests_alone(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    engine = server.llm.engine
    engine.backend = FailingBackend(engine.backend)
    try:
        with ThreadPoolExecutor(3) as pool:
            waiting = []
            # The second has the 7 and fails together with the first; the third finds no place before and is served.
            for prompt in ([1] * 9, [2] * 9 + [7], [3] * 3):
                body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
                waiting.append(pool.submit(server.post, "/v1/completions", body))
                server.until(lambda: server.async_llm.num_running + server.async_llm.num_waiting == len(waiting))
            engine.backend.gate.set()
            results = [one.result() for one in waiting]
        assert [status for status, _ in results] == [500, 500, 200]
        assert results[1][1]["error"] == {
            "message": "the engine failed while it computed this request (RuntimeError: out of luck)",
            "type": "server_error",
            "param": None,
            "code": "step_failed",
        }
        stream = server.client().completions.create(model="demo", prompt=[7], max_tokens=4, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)
    finally:
        engine.backend = engine.backend.real
    assert "a step failed" in caplog.text
    assert server.request("GET", "/health")[0] == 200


def test_logits_that_are_no_numbers_end_their_request_with_an_error(server: Server) -> None:
    class Nan:
        def __init__(self, real: Any) -> None:
            self.real = real

        def execute(self, inputs: StepInputs) -> Any:
            return np.full_like(self.real.execute(inputs), np.nan)

    engine = server.llm.engine
    real, engine.backend = engine.backend, Nan(engine.backend)
    try:
        status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
    finally:
        engine.backend = real
    assert (status, "gave nan as a logit" in answer["error"]["message"]) == (400, True)


def test_a_connection_serves_one_request_after_the_other(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": ""}, {"prompt": "a", "max_tokens": 1, "stream": True}):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == (400 if body == {"prompt": ""} else 200)
    connection.close()


def test_a_request_that_takes_too_long_ends_with_504(long_engine: Path) -> None:
    server = Server(LLM(long_engine, num_kv_blocks=6000), request_timeout=0.3)
    try:
        status, answer = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        stream = server.client().completions.create(
            model="demo", prompt="a", stream=True, max_tokens=30_000, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match=r"more than 0\.3 s"):
            list(stream)
        status, answer = server.post("/v1/completions", {**LONG, "timeout": 1000})
        assert (status, "more than 0.3 s" in answer["error"]["message"]) == (504, True)
        server.until(lambda: server.is_idle)
    finally:
        server.stop()


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_may_set_its_own_time_which_counts_while_it_waits(server: Server, waits: bool) -> None:
    busy = [send(server, LONG) for _ in range(2 if waits else 0)]
    server.until(lambda: server.async_llm.num_running == len(busy))
    status, answer = server.post("/v1/completions", {**LONG, "timeout": 0.2})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (504, "server_error", "timeout")
    assert "more than 0.2 s" in answer["error"]["message"]
    server.until(lambda: server.async_llm.num_running == len(busy) and server.async_llm.num_waiting == 0)
    _, _, events = server.request("POST", "/v1/completions", {**LONG, "timeout": 0.2, "stream": True})
    error, done = events.decode().strip().split("\n\n")[-2:]
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("timeout", "data: [DONE]")
    for connection in busy:
        connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ],
)
def test_every_endpoint_that_generates_has_a_timeout(server: Server, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(path, {**body, "timeout": 1e-6})
    assert (status, answer["error"]["code"]) == (504, "timeout")
