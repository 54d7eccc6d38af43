"""OpenAI's own client against the server: texts completed, echoed and scored."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from .conftest import Server


def test_completions_take_texts_and_tokens_one_or_many(client: OpenAI, server: Server) -> None:
    prompts = ["27+58=", "Copy:\nabc"]
    ids = [server.llm.engine.tokenizer.encode(prompt) for prompt in prompts]
    for prompt, count in ((prompts[0], 1), (prompts, 2), (ids[0], 1), (ids, 2)):
        response = client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0)
        assert [choice.index for choice in response.choices] == list(range(count))
        assert response.usage.prompt_tokens == sum(map(len, ids[:count]))
    both = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0, n=1)
    texts: dict[int, str] = {}
    for chunk in client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[0], texts[1]] == [choice.text for choice in both.choices]


def test_echo_gives_the_prompt_back(client: OpenAI) -> None:
    plain = client.completions.create(model="demo", prompt="abc", max_tokens=4, temperature=0).choices[0].text
    echoed = client.completions.create(model="demo", prompt="abc", max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text == "abc" + plain
    stream = client.completions.create(model="demo", prompt="abc", max_tokens=4, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc" + plain


@pytest.mark.parametrize("warm", [False, True])
def test_echo_with_logprobs_tells_the_prompts_too(client: OpenAI, warm: bool) -> None:
    prompt = "abcabc27+58=" + "x" * 5
    fields: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "n": 2,
    }
    plain = client.completions.create(**fields).choices[0]
    echoed = client.completions.create(**fields, echo=True)
    for choice in echoed.choices:
        logprobs = choice.logprobs
        assert choice.text == prompt + plain.text
        assert "".join(logprobs.tokens[: -len(plain.logprobs.tokens)]) == prompt
        count = len(logprobs.tokens) - len(plain.logprobs.tokens)
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert all(-100 < value <= 0 for value in logprobs.token_logprobs[1:])
        assert [len(top) for top in logprobs.top_logprobs[1:count]] == [2] * (count - 1)
        assert logprobs.token_logprobs[count:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
        starts = [
            choice.text[start:].startswith(token)
            for start, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
        ]
        assert all(starts[:count])
    parts = [chunk.choices[0] for chunk in client.completions.create(**fields, echo=True, stream=True)]
    first = [part.logprobs for part in parts if part.index == 0]
    joined = [value for part in first for value in part.token_logprobs]
    assert joined[1:] == pytest.approx(echoed.choices[0].logprobs.token_logprobs[1:], abs=1e-4)


def test_echo_of_no_new_tokens_scores_the_prompt_alone(client: OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": ["27+58=85", "abc"], "logprobs": 3, "echo": True}
    longer = client.completions.create(**fields, max_tokens=1)
    prompts = server.metric("vllm:prompt_tokens_total")
    scored = client.completions.create(**fields, max_tokens=0)
    assert server.metric("vllm:prompt_tokens_total") - prompts == scored.usage.prompt_tokens
    assert (scored.usage.completion_tokens, len(scored.choices)) == (0, 2)
    for prompt, choice, other in zip(fields["prompt"], scored.choices, longer.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        assert "".join(choice.logprobs.tokens) == prompt
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:-1], abs=1e-4)
        assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [3] * (len(choice.logprobs.tokens) - 1)
    fields["prompt"] = fields["prompt"][0]
    *parts, last = client.completions.create(
        **fields, max_tokens=0, stream=True, stream_options={"include_usage": True}
    )
    assert [part.choices[0].finish_reason for part in parts] == ["length"]
    assert parts[0].choices[0].logprobs.tokens == scored.choices[0].logprobs.tokens
    assert last.usage.completion_tokens == 0


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 2}])
def test_no_new_tokens_without_the_prompts_logprobs_are_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0; it must be at least 1, unless"):
        client.completions.create(model="demo", prompt="abc", max_tokens=0, **fields)


def test_logprobs_of_completions(client: OpenAI) -> None:
    (choice,) = client.completions.create(model="demo", prompt="27+", max_tokens=4, temperature=0, logprobs=2).choices
    logprobs = choice.logprobs
    assert (
        len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    )
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
