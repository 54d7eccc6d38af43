"""`qwenrt serve` as a process: it tells where it listens, and ends well whatever it is doing."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .command import qwenrt
from .conftest import Here
from .served import Served


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[Served] = []

    def begin(engine: Path, *arguments: str) -> Served:
        running.append(Served(engine, *arguments))
        return running[-1]

    yield begin
    for served in running:
        served.process.kill()
        served.process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once_with_exit_status_0(demo_engine: Path, serve: Any, signum: signal.Signals) -> None:
    served = serve(demo_engine, "--served-model-name", "demo")
    assert served.post({"prompt": "a", "max_tokens": 2, "model": "demo"})[0] == 200
    assert served.end(signum) == (0, "")


def test_sigterm_under_load_lets_every_accepted_request_finish(demo_engine: Path, serve: Any) -> None:
    served = serve(demo_engine, "--drain-timeout", "300", "--max-num-seqs", "16")
    body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(48) as pool:
        whole = [pool.submit(served.post, body) for _ in range(24)]
        streamed = [pool.submit(served.stream, body) for _ in range(24)]
        while not served.metric("vllm:num_requests_running"):
            time.sleep(0.01)
        time.sleep(0.2)
        status, stderr = served.end(signal.SIGTERM)
        assert (status, stderr) == (0, "")
        texts = set()
        for future in whole:
            code, answer = future.result()
            assert code == 200, answer
            texts.add(answer["choices"][0]["text"])
        for future in streamed:
            events = future.result()
            assert events[-1] == "[DONE]"
            texts.add("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))
    assert len(texts) == 1


def test_what_does_not_finish_in_time_gets_an_error_and_newcomers_a_refusal(demo_engine: Path, serve: Any) -> None:
    served = serve(demo_engine, "--drain-timeout", "1.5", "--max-num-seqs", "1")
    body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        whole = [pool.submit(served.post, body) for _ in range(3)]
        streamed = [pool.submit(served.stream, body) for _ in range(3)]
        while not served.metric("vllm:num_requests_running"):
            time.sleep(0.01)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert served.post(body)[0] == 503
        _, stderr = served.process.communicate(timeout=120)
        assert (served.process.returncode, stderr) == (0, b"")
        for future in whole:
            code, answer = future.result()
            assert code == 200 or (code, answer["error"]["code"]) == (503, "unavailable")
        assert any(future.result()[0] == 503 for future in whole)
        for future in streamed:
            events = future.result()
            assert events[-1] == "[DONE]"


def test_a_second_signal_ends_it_at_once(demo_engine: Path, serve: Any) -> None:
    served = serve(demo_engine, "--drain-timeout", "600", "--max-num-seqs", "1")
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(served.post, {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True})
        while not served.metric("vllm:num_requests_running"):
            time.sleep(0.01)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert served.process.poll() is None
        assert served.end(signal.SIGTERM)[0] == 0


def test_a_port_in_use_shows_before_the_engine_is_loaded(tiny_engine: Path, here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, stdout, stderr = here("serve", tiny_engine, "--port", str(taken.getsockname()[1]))
    assert (status, stdout) == (1, "")
    assert re.search(
        r"cannot listen on 127\.0\.0\.1 port \d+: Address already in use; choose another --host or --port", stderr
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--port", "70000"), 2, "70000"),
        (("--host", "no.such.host.invalid"), 1, "cannot listen on no.such.host.invalid"),
        (("--api-key", " "), 2, "--api-key must be ASCII"),
        (("--max-num-seqs", "100000"), 1, "max_num_seqs is 100000"),
        (("--request-timeout", "0"), 2, "--request-timeout"),
    ],
)
def test_wrong_options_are_one_line(
    tiny_engine: Path, here: Here, arguments: tuple[str, ...], status: int, message: str
) -> None:
    given, stdout, stderr = here("serve", tiny_engine, "--port", "0", *arguments)
    assert (given, stdout) == (status, "")
    assert message in stderr


def test_without_its_packages_it_says_what_to_install(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("serve", tiny_engine, blocked=("fastapi",))
    assert (status, stdout) == (1, "")
    assert stderr == "qwenrt: error: this needs fastapi; install it with: pip install 'qwenrt[serve]'\n"


def test_a_key_is_asked_for(tiny_engine: Path, serve: Any) -> None:
    served = serve(tiny_engine, "--api-key", "secret")
    assert served.post({"prompt": "a"})[0] == 401
    assert served.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("modules", [["a"], ["=x"], ["a="], ["a=x", "a=y"], ["demo=x"]])
def test_adapters_need_a_name_of_their_own(modules: list[str], demo_engine: Path, here: Here) -> None:
    options = [option for module in modules for option in ("--lora-modules", module)]
    status, _, stderr = here("serve", demo_engine, "--served-model-name", "demo", "--port", "0", *options)
    assert status == 2
    assert "--lora-modules must be NAME=PATH" in stderr


def test_an_adapter_that_cannot_be_served_ends_the_start(demo_engine: Path, tmp_path: Path) -> None:
    status, _, stderr = qwenrt("serve", demo_engine, "--port", "0", "--lora-modules", f"a={tmp_path}")
    assert status == 1
    assert "this engine takes no adapters; export it again with --max-lora-rank" in stderr
    assert stderr.count("\n") == 1
