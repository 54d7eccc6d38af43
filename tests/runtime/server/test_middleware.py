"""API keys, CORS, and bodies that are too much."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from qwenrt.runtime import LLM
from qwenrt.runtime.server import middleware

from .conftest import Server

PROMPT = {"model": "demo", "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[Server]:
    server = Server(
        LLM(tiny_engine, num_kv_blocks=64), api_keys=["first-key", "second-key"], cors_origins=["https://a.example"]
    )
    yield server
    server.stop()


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_a_key_opens(server: Server, key: str) -> None:
    assert server.client(api_key=key).completions.create(**PROMPT).choices


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-key x", "Basic first-key", "é"]
)
def test_without_a_key_nothing_is_served(server: Server, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/nothing"),
    ):
        status, received, _ = server.request(method, path, PROMPT if method == "POST" else None, headers)
        assert (status, received["www-authenticate"]) == (401, "Bearer")
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()


def test_what_tells_nothing_needs_no_key(server: Server) -> None:
    for path in ("/", "/health", "/ready", "/metrics", "/openapi.json"):
        assert server.request("GET", path)[0] == 200


def test_pages_of_the_named_origin_alone_may_read(server: Server) -> None:
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        _, headers, _ = server.request("GET", "/health", headers={"Origin": origin})
        assert headers.get("access-control-allow-origin") == allowed
    preflight = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    assert server.request("OPTIONS", "/v1/completions", headers=preflight)[0] == 200


def test_cors_is_off_unless_it_is_asked_for(tiny_engine: Path) -> None:
    server = Server(LLM(tiny_engine, num_kv_blocks=64))
    try:
        assert (
            "access-control-allow-origin"
            not in server.request("GET", "/health", headers={"Origin": "https://a.example"})[1]
        )
    finally:
        server.stop()


def test_a_body_without_end_is_cut_off(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    head = {"Content-Type": "application/json", "Authorization": "Bearer first-key"}
    # The server stops reading: the client is told why, or finds the connection closed while it still sends.
    with contextlib.suppress(ConnectionError):
        connection.request("POST", "/v1/completions", iter([b" " * (1 << 20)] * 64), head)
        pytest.fail("64 MiB were taken")
    connection.close()
    server.until(lambda: server.request("GET", "/health")[0] == 200)


def test_a_body_that_does_not_come_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT", 0.2)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    for name, value in (
        ("Content-Type", "application/json"),
        ("Authorization", "Bearer first-key"),
        ("Content-Length", "9"),
    ):
        connection.putheader(name, value)
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    connection.close()


def test_all_bodies_together_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES_BYTES", 100)
    status, headers, _ = server.request(
        "POST", "/v1/completions", {"prompt": "a" * 200}, {"Authorization": "Bearer first-key"}
    )
    assert (status, headers["retry-after"]) == (429, "5")
    assert server.client(api_key="first-key").completions.create(**PROMPT).choices
