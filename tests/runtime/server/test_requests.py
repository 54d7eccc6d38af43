"""What is refused, and in which words (CASES P01, P02, S02, K07, V02); after each test the server serves as before."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "27+58=?"}]


@pytest.fixture(autouse=True)
def _unharmed(server: Server) -> Iterator[None]:
    yield
    status, answer = server.post(CHAT, {"messages": MESSAGES, "temperature": 0})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "85")
    server.until(lambda: server.is_idle)


def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused, in OpenAI's shape."""
    given, answer = server.post(path, body)
    assert given == status, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return dict(answer["error"])


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5, 1e-12, 1e-38, 1e-39, 5e-324, 0])
def test_a_tiny_temperature_is_greedy(server: Server, temperature: float) -> None:
    body = {"messages": MESSAGES, "temperature": temperature, "logprobs": True, "seed": 1}
    status, answer = server.post(CHAT, body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "85")
    assert all(math.isfinite(token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"])


def test_a_huge_temperature_is_served(server: Server) -> None:
    assert server.post(CHAT, {"messages": MESSAGES, "temperature": 1e6, "max_tokens": 5})[0] == 200


WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-1, "0", True, 1e400, [])],
    *[("top_p", value) for value in (0, -0.1, 1.0001, "1")],
    *[("top_k", value) for value in (-2, 1.5, 2**70)],
    *[("min_p", value) for value in (-0.1, 1.5)],
    *[("max_tokens", value) for value in (0, -1, 2**63, 3.5, "5")],
    *[("n", value) for value in (0, -1, 10**6)],
    *[("repetition_penalty", value) for value in (0, -1, 1e300)],
    *[("presence_penalty", value) for value in (2.5, -3)],
    *[("seed", value) for value in (2**64, 1.5)],
    *[("stop", value) for value in ("", [""], [1], ["a"] * 2000, {})],
    *[("stop_token_ids", value) for value in ([-1], [768], ["a"])],
    *[
        ("logit_bias", value)
        for value in ({"a": 1}, {"-1": 1}, {"768": 1}, {"1": 101}, {"1": "a"}, [1], {"9" * 5000: 1})
    ],
    *[("min_tokens", value) for value in (-1, 2**40)],
    *[("thinking_budget", value) for value in (-1, 1.5)],
    *[("priority", value) for value in ("high", 0.5)],
    *[("timeout", value) for value in (0, -1, "5", 1e400)],
    *[("stream", value) for value in ("yes", 1)],
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(server: Server, field: str, value: Any) -> None:
    error = refused(server, CHAT, {"messages": MESSAGES, "max_tokens": 4, field: value})
    assert field in error["message"]
    assert len(error["message"]) < 1100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 768),
        ("top_k", 2**31),
        ("min_p", 1),
        ("max_tokens", 10**8),
        ("max_tokens", None),
        ("repetition_penalty", 2.0),
        ("presence_penalty", 2),
        ("stop", ["x"] * 1000),
    ],
)
def test_a_value_at_the_edge_is_served(server: Server, field: str, value: Any) -> None:
    assert server.post(CHAT, {"messages": MESSAGES, "temperature": 0, "stop": ["\n2"], field: value})[0] == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "logit_bias", "tools", "chat_template_kwargs"])
def test_numbers_that_json_does_not_have_are_refused(server: Server, field: str, literal: str) -> None:
    value = {
        "logit_bias": f'{{"1": {literal}}}',
        "chat_template_kwargs": f'{{"enable_thinking": {literal}}}',
        "tools": f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"minimum": {literal}}}}}}}]',
    }.get(field, literal)
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 2, "{field}": {value}}}'
    status, _, data = server.request("POST", CHAT, body.encode())
    assert status == 400, data
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], [[1], []], [["a"]], [1, "a"], 5, None, {}, [-1], [768], [2**70]]
)
def test_an_empty_or_impossible_prompt_is_refused(server: Server, prompt: Any) -> None:
    refused(server, COMPLETIONS, {"prompt": prompt})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\ud800"}],
        ["hello"],
        "hello",
        None,
        [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": 1, "arguments": "{}"}}]}],
        [{}] * 100_000,
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_messages_are_refused_by_their_place(server: Server, messages: Any) -> None:
    assert "messages" in refused(server, CHAT, {"messages": messages})["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options is allowed only with stream"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs is 21"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ"),
        (CHAT, {"nonsense": 1}, "nonsense is not supported"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice needs tools"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "more than one form"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs has nothing"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (COMPLETIONS, {"suffix": "x"}, "suffix is not supported"),
        (COMPLETIONS, {"best_of": 3}, "best_of is 3"),
        (COMPLETIONS, {"prompt": ["a"] * 300}, "1 to 256"),
        (COMPLETIONS, {"prompt": [1] * 3000}, "3000 tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(server: Server, path: str, body: dict[str, Any], message: str) -> None:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    assert message in refused(server, path, {**base, **body})["message"]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [tool("f"), tool("f")]}, "two functions of one name"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "'g', which tools does not have",
        ),
        ({"tools": [tool("f", parameters={"type": "objekt"})], "tool_choice": "required"}, "objekt"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("f")], "guided_grammar": 'start: "a"\nb: "c"'}, "cannot be combined with tools"),
    ],
)
def test_impossible_tools_are_refused(server: Server, fields: dict[str, Any], message: str) -> None:
    assert message in refused(server, CHAT, {"messages": MESSAGES, **fields})["message"]


def test_another_model_is_not_found(server: Server) -> None:
    error = refused(server, CHAT, {"messages": MESSAGES, "model": "gpt-4\ud800"}, 404)
    assert error["code"] == "model_not_found"
    assert server.request("GET", "/v1/models/other")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b"", {}, 400),
        ("POST", CHAT, b"[]", {}, 400),
        ("POST", CHAT, b"\xff", {}, 400),
        ("POST", CHAT, b"[" * 100_000, {}, 400),
        ("POST", CHAT, b'{"n": ' + b"9" * 10_000 + b"}", {}, 400),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", CHAT, b" " * (5 << 20), {}, 413),
        ("GET", CHAT, None, {}, 405),
        ("GET", "/nothing", None, {}, 404),
        ("POST", "/nothing", b"{}", {}, 404),
    ],
)
def test_every_error_has_openais_shape(
    server: Server, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    given, received, data = server.request(method, path, body, headers)
    assert given == status, data
    error = json.loads(data)["error"]
    assert error["message"]
    assert received["content-type"] == "application/json"


def test_an_error_in_a_stream_comes_before_the_stream(server: Server) -> None:
    error = refused(server, CHAT, {"messages": MESSAGES, "stream": True, "temperature": -1})
    assert "temperature" in error["message"]


def test_health_ready_and_the_openapi_document(server: Server) -> None:
    for path in ("/health", "/ready"):
        status, _, data = server.request("GET", path)
        assert (status, json.loads(data)) == (200, {"status": "ok"})
    assert "/v1/chat/completions" in json.loads(server.request("GET", "/openapi.json")[2])["paths"]
