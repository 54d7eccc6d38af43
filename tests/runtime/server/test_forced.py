"""Answers whose tokens are chosen, a byte each: streamed and whole they are the same (CASES V03, V04, P03, P04)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from qwenrt.runtime import LLM

from ..forced import PROMPT, ForcedBackend, bytes_of
from .conftest import Server

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")


@pytest.fixture(scope="module")
def server(long_engine: Path) -> Iterator[Server]:
    server = Server(LLM(long_engine, num_kv_blocks=600, max_model_len=4000, enable_prefix_caching=False))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


def token_ids(server: Server, text: str) -> list[int]:
    """The bytes of a text, and the tokens of its marks."""
    ids: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        token = server.llm.engine.tokenizer.token_id(mark) if mark else None
        ids += bytes_of(text[0]) if token is None or mark is None else [token]
        text = text.removeprefix(mark) if mark else text[1:]
    return ids


@contextlib.contextmanager
def forced(server: Server, tokens: list[int], num_prompt: int) -> Iterator[None]:
    engine = server.llm.engine
    real = engine.backend
    engine.backend = ForcedBackend(tokens, engine.manifest.model.vocab_size, num_prompt)
    try:
        yield
    finally:
        engine.backend = real


def chat(server: Server, client: OpenAI, text: str, tools: Any = None, **fields: Any) -> dict[str, Any]:
    """What a chat gives that is forced to `text`, which must be the same streamed and whole."""
    arguments: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 300, **fields}
    if tools is not None:
        arguments["tools"] = tools
    prompt = {"messages": MESSAGES, "chat_template_kwargs": fields.get("extra_body", {}).get("chat_template_kwargs")}
    count = server.post("/tokenize", prompt | ({} if tools is None else {"tools": tools}))[1]["count"]
    with forced(server, token_ids(server, text), count):
        (choice,) = client.chat.completions.create(**arguments).choices
        streamed: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
        for chunk in client.chat.completions.create(**arguments, stream=True):
            (news,) = chunk.choices
            streamed["content"] += news.delta.content or ""
            streamed["reasoning"] += getattr(news.delta, "reasoning_content", "")
            for call in news.delta.tool_calls or []:
                name, so_far = streamed["calls"].get(call.index, (call.function.name, ""))
                streamed["calls"][call.index] = (name, so_far + call.function.arguments)
            streamed["finish_reason"] = news.finish_reason or streamed["finish_reason"]
    message = choice.message
    whole = {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", ""),
        "calls": {
            index: (call.function.name, call.function.arguments) for index, call in enumerate(message.tool_calls or [])
        },
        "finish_reason": choice.finish_reason,
    }
    assert whole == streamed
    return whole


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "w", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call('{"t": "a </tool_call> b"}'), "", ['{"t": "a </tool_call> b"}']),
        (call('{"a": 1}') + "\n" + call('{"b": {"c": [{}]}}'), "", ['{"a": 1}', '{"b": {"c": [{}]}}']),
        (call('{"t": "+1"}'), "", ['{"t": "+1"}']),
        ("I look. " + call('{"t": "👋🏽 é"}'), "I look.", ['{"t": "👋🏽 é"}']),
    ],
)
def test_tool_calls_come_a_byte_at_a_time(
    server: Server, client: OpenAI, text: str, content: str, calls: list[str]
) -> None:
    answer = chat(server, client, f"<think>\nhm\n</think>\n\n{text}<|im_end|>", TOOLS)
    assert answer == {
        "content": content,
        "reasoning": "hm",
        "calls": {index: ("w", arguments) for index, arguments in enumerate(calls)},
        "finish_reason": "tool_calls",
    }
    assert all(json.loads(arguments) for arguments in calls)


def test_a_call_that_is_cut_off_says_so(server: Server, client: OpenAI) -> None:
    text = call('{"t": "abc"}')
    answer = chat(server, client, text, TOOLS, max_tokens=len(token_ids(server, text)) - 8)
    assert (answer["calls"], answer["finish_reason"]) == ({0: ("w", '{"t": "')}, "length")


def test_without_tools_a_call_is_text(server: Server, client: OpenAI) -> None:
    assert chat(server, client, call("{}") + "<|im_end|>")["content"] == call("{}")


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", None, "a", "b"),
        ("a\nb", None, "", "a\nb"),
        ("a</think>b", False, "", "a</think>b"),
        ("<think>\na", None, "a", ""),
    ],
)
def test_thinking_is_where_it_belongs(
    server: Server, client: OpenAI, text: str, thinking: bool | None, reasoning: str, content: str
) -> None:
    extra = {} if thinking is None else {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
    answer = chat(server, client, text + "<|im_end|>", **extra)
    assert (answer["reasoning"], answer["content"]) == (reasoning, content)


def complete(server: Server, client: OpenAI, tokens: list[int], **fields: Any) -> tuple[str, str, int]:
    """Text, finish reason and token count of a completion forced to `tokens`; the same streamed and whole."""
    arguments: dict[str, Any] = {
        "model": "demo",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": len(tokens),
        **fields,
    }
    with forced(server, tokens, len(PROMPT)):
        response = client.completions.create(**arguments)
        chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    (choice,) = response.choices
    news = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(one.text for one in news) == choice.text
    assert news[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == response.usage
    assert response.usage is not None
    return choice.text, choice.finish_reason, response.usage.completion_tokens


@pytest.mark.parametrize("text", ["Swift 社区", "삼겹살", "👋🏽", "👨\u200d👩\u200d👧", "e\u0301", "\ufffd"])
def test_characters_come_whole(server: Server, client: OpenAI, text: str) -> None:
    assert complete(server, client, bytes_of(text)) == (text, "length", len(text.encode()))


@pytest.mark.parametrize("tokens", [[97, 0xE7], [97, 0xFF, 98], [0xFF] * 60])
def test_bytes_that_are_no_text_are_replaced_and_do_not_stall(
    server: Server, client: OpenAI, tokens: list[int]
) -> None:
    extra = {"extra_body": {"ignore_eos": True}, "logprobs": 1}
    text, _, count = complete(server, client, tokens, **extra)
    assert (text, count) == (bytes(tokens).decode(errors="replace"), len(tokens))


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("own fox", "The quick br", "stop"),
        ("own foxes", "The quick brown fox", "length"),
        ("x", "The quick brown fo", "stop"),
        (["The", "zzz"], "", "stop"),
    ],
)
def test_stop_strings_and_the_tail(server: Server, client: OpenAI, stop: Any, text: str, reason: str) -> None:
    assert complete(server, client, bytes_of("The quick brown fox"), stop=stop)[:2] == (text, reason)
