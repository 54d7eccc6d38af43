"""OpenAI's own client against the server: what it gets is what the engine gives offline (CASES V02, V03, P03, P06, S05)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from demo.tasks import Example, held_out
from openai import OpenAI
from pydantic import BaseModel

from qwenrt.runtime import SamplingParams

from .conftest import Server

SUM = [{"role": "user", "content": "27+58=?"}]
WORKING = "7+8+0=15\n2+5+1=8"


def ask(client: OpenAI, messages: Any = SUM, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0, **fields})


def streamed(client: OpenAI, messages: Any = SUM, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The first answer put together from its chunks, and all chunks."""
    chunks = list(ask(client, messages, stream=True, **fields))
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index:
                continue
            answer["content"] += choice.delta.content or ""
            answer["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                name, arguments = answer["calls"].get(call.index, (call.function.name, ""))
                answer["calls"][call.index] = (name, arguments + call.function.arguments)
            answer["finish_reason"] = choice.finish_reason or answer["finish_reason"]
    return answer, chunks


def thinking(enable: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": enable}}


def test_the_model_is_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_a_chat_is_answered_with_its_thinking_apart(client: OpenAI) -> None:
    response = ask(client)
    (choice,) = response.choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("85", WORKING, "stop")
    usage = response.usage
    assert usage.completion_tokens_details.reasoning_tokens == 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens == 14 + 24


@pytest.mark.parametrize(
    ("fields", "content", "reasoning", "finish_reason"),
    [
        (thinking(True), "85", WORKING, "stop"),
        ({}, "85", WORKING, "stop"),
        ({**thinking(True), "max_tokens": 5}, None, WORKING[:3], "length"),
        ({**thinking(True), "thinking_budget": 0}, "85", None, "stop"),
    ],
)
def test_thinking_on_off_and_cut(
    client: OpenAI, fields: dict[str, Any], content: str | None, reasoning: str | None, finish_reason: str
) -> None:
    fields = dict(fields)
    max_tokens = fields.pop("max_tokens", None)
    named = {} if max_tokens is None else {"max_tokens": max_tokens}
    (choice,) = ask(client, extra_body=fields, **named).choices
    assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == (content, reasoning)
    answer, _ = streamed(client, extra_body=fields, **named)
    assert (answer["content"] or None, answer["reasoning"] or None) == (content, reasoning)
    assert answer["finish_reason"] == choice.finish_reason == finish_reason


@pytest.mark.parametrize("off", [{"extra_body": thinking(False)}, {"reasoning_effort": "none"}])
def test_with_thinking_off_the_answer_is_the_content(client: OpenAI, off: dict[str, Any]) -> None:
    (choice,) = ask(client, **off).choices
    assert choice.message.content in ("85", "86", "84", "75", "95")
    assert getattr(choice.message, "reasoning_content", None) is None
    assert streamed(client, **off)[0]["content"] == choice.message.content


@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_that_is_no_boolean_is_refused(client: OpenAI, value: Any) -> None:
    if value is None:
        assert ask(client, extra_body=thinking(None)).choices[0].message.content == "85"
        return
    with pytest.raises(openai.BadRequestError, match="enable_thinking"):
        ask(client, extra_body=thinking(value))


def test_an_unknown_template_argument_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="nonsense is not an argument"):
        ask(client, extra_body={"chat_template_kwargs": {"nonsense": 1}})


def examples(count: int) -> list[Example]:
    tasks = ("copy", "reverse", "add_thinking", "tool_answer")
    return [example for task in tasks for example in held_out(task, count, 5)]


def test_64_streams_at_once_give_what_the_engine_gives_offline(server: Server, client: OpenAI) -> None:
    every = examples(16)
    prompts = [server.llm.render(one.messages, tools=one.tools, enable_thinking=one.enable_thinking) for one in every]

    def stream(prompt: str) -> tuple[str, int]:
        chunks = list(
            client.completions.create(
                model="demo",
                prompt=prompt,
                stream=True,
                temperature=0,
                max_tokens=200,
                stream_options={"include_usage": True},
            )
        )
        return "".join(chunk.choices[0].text for chunk in chunks[:-1]), chunks[-1].usage.completion_tokens

    with ThreadPoolExecutor(64) as pool:
        given = list(pool.map(stream, prompts))
    server.until(lambda: server.is_idle)
    offline = server.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200))
    outputs = [output.outputs[0] for output in offline]
    assert given == [(output.text, len(output.token_ids)) for output in outputs]


def test_streams_and_whole_answers_agree_on_usage(client: OpenAI) -> None:
    for fields in ({}, {"n": 2}, {"stop": ["+5"]}, {"max_tokens": 3}, {"max_completion_tokens": 1}):
        whole = ask(client, **fields)
        _, chunks = streamed(client, stream_options={"include_usage": True}, **fields)
        assert chunks[-1].choices == []
        assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == 14
    _, chunks = streamed(client)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_n_answers_have_their_indices_and_one_prompt_in_the_usage(client: OpenAI) -> None:
    response = ask(client, n=3, temperature=1, seed=4)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.usage.prompt_tokens == 14
    again = ask(client, n=3, temperature=1, seed=4)
    assert [c.message.content for c in again.choices] == [c.message.content for c in response.choices]


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    (choice,) = ask(client, stop=["+5"], extra_body=thinking(True)).choices
    assert choice.message.reasoning_content == WORKING.split("+5")[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "+5")


def test_logprobs_of_chats(client: OpenAI) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=2).choices
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content[:-1]).decode() == f"<think>\n{WORKING}\n</think>\n\n85"
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    _, chunks = streamed(client, logprobs=True, top_logprobs=2)
    given = [token for chunk in chunks for one in chunk.choices if one.logprobs for token in one.logprobs.content]
    assert [token.token for token in given] == [token.token for token in content]
    (choice,) = ask(client, logprobs=True).choices
    assert [token.top_logprobs for token in choice.logprobs.content] == [[]] * len(content)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"top_k": 1}, "temperature": 1},
        {"temperature": 0.01},
        {"logit_bias": {"5": -100}},
        {"response_format": {"type": "json_object"}, "max_tokens": 40},
    ],
)
def test_logprobs_are_numbers_whatever_is_ruled_out(server: Server, fields: dict[str, Any]) -> None:
    extra = fields.get("extra_body", {})
    body = {
        "messages": SUM,
        "logprobs": True,
        "top_logprobs": 5,
        **{k: v for k, v in fields.items() if k != "extra_body"},
        **extra,
    }
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200
    for token in answer["choices"][0]["logprobs"]["content"]:
        assert all(-9999 <= one["logprob"] <= 0 for one in [token, *token["top_logprobs"]])


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_alarm",
        "description": "Alarm set",
        "parameters": {
            "type": "object",
            "properties": {"label": {"type": "string"}, "hour": {"type": "integer"}},
            "required": ["label", "hour"],
            "additionalProperties": False,
        },
    },
}
CALL = [{"role": "user", "content": "Call set_alarm with tea, 7"}]


def test_the_model_calls_a_tool_and_answers_with_its_result(client: OpenAI) -> None:
    example = held_out("tool_call_single", 1, 6)[0]
    response = ask(client, example.messages, tools=example.tools)
    (choice,) = response.choices
    (call,) = choice.message.tool_calls
    expected = json.loads(example.answer.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    assert (call.function.name, json.loads(call.function.arguments)) == (expected["name"], expected["arguments"])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    answer, _ = streamed(client, example.messages, tools=example.tools)
    assert answer["calls"] == {0: (call.function.name, call.function.arguments)}
    assert answer["finish_reason"] == "tool_calls"
    messages = [
        *example.messages,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "winter 42"},
    ]
    final = ask(client, messages, tools=example.tools).choices[0]
    assert (final.message.content, final.finish_reason) == ("winter 42", "stop")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_alarm"}}], ids=["required", "named"]
)
def test_a_call_that_must_be_made_is_made_and_fits_its_schema(client: OpenAI, choice: Any) -> None:
    (whole,) = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200, parallel_tool_calls=False).choices
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "set_alarm"
    assert list(arguments) == ["label", "hour"] and type(arguments["hour"]) is int
    assert streamed(client, tools=[TOOL], tool_choice=choice, max_tokens=200, parallel_tool_calls=False)[0][
        "calls"
    ] == {0: ("set_alarm", call.function.arguments)}


def test_no_tool_is_called_where_none_may_be(client: OpenAI) -> None:
    (choice,) = ask(client, CALL, tools=[TOOL], tool_choice="none", max_tokens=30).choices
    assert choice.message.tool_calls is None


def test_a_strict_tool_gets_arguments_that_fit_where_the_model_chooses(client: OpenAI) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    (choice,) = ask(client, CALL, tools=[tool], max_tokens=200).choices
    (call,) = choice.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"label", "hour"}
    (choice,) = ask(client, tools=[tool], max_tokens=200).choices
    assert (choice.message.content, choice.message.tool_calls) == ("85", None)


class Answer(BaseModel):
    total: int
    sure: bool


def test_an_answer_fits_its_schema_after_thinking(client: OpenAI) -> None:
    response = client.chat.completions.parse(
        model="demo",
        messages=SUM,
        response_format=Answer,
        temperature=0,
        max_tokens=300,  # type: ignore[arg-type]
    )
    message = response.choices[0].message
    assert isinstance(message.parsed, Answer)
    assert message.reasoning_content == WORKING  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "(a|b)c"}, {"ac", "bc"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"structured_outputs": {"choice": ["🙂", "é"]}}, {"🙂", "é"}),
        ({"structured_outputs": {"json": {"const": "é🙂"}}}, {'"é🙂"'}),
    ],
)
def test_answers_keep_to_a_form(client: OpenAI, extra: dict[str, Any], allowed: set[str]) -> None:
    for fields in ({}, thinking(False)):
        (choice,) = ask(client, extra_body={**extra, **fields}, max_tokens=100).choices
        assert (choice.message.content, choice.finish_reason) in {(text, "stop") for text in allowed}
    completion = client.completions.create(model="demo", prompt="say", temperature=1, max_tokens=50, extra_body=extra)
    assert completion.choices[0].text in allowed


def test_json_mode_gives_an_object_unless_it_is_cut(client: OpenAI) -> None:
    (choice,) = ask(
        client, response_format={"type": "json_object"}, max_tokens=1000, extra_body=thinking(False)
    ).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


def test_an_answer_may_be_a_call_or_have_a_form(client: OpenAI) -> None:
    fields = {"tools": [TOOL], "extra_body": {"guided_choice": ["none of them"]}, "max_tokens": 200}
    (choice,) = ask(client, **fields).choices
    assert choice.message.tool_calls or choice.message.content == "none of them"


def test_tokenize_and_detokenize(server: Server) -> None:
    status, answer = server.post("/tokenize", {"prompt": "é 27", "return_token_strs": True})
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "é 27"})
    status, chat = server.post("/tokenize", {"messages": SUM})
    assert (status, chat["count"]) == (200, 14)


def test_responses_are_chats_in_another_shape(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input="27+58=?", temperature=0)
    reasoning, _ = response.output
    assert (response.output_text, response.status) == ("85", "completed")
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", WORKING)  # type: ignore[union-attr, index]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 20
    again: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "27+58=?"}]},
        *response.model_dump(exclude_none=True)["output"],
        {"role": "user", "content": "Copy:\nabc"},
    ]
    follow_up = client.responses.create(model="demo", input=again, temperature=0, reasoning={"effort": "none"})
    assert follow_up.output_text == "abc"


def test_streamed_responses_tell_their_parts(client: OpenAI) -> None:
    events = list(client.responses.create(model="demo", input="27+58=?", temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "85"
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == WORKING
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "reasoning",
        "message",
    ]
    final: Any = events[-1]
    assert final.response.output_text == "85"
    cut = client.responses.create(model="demo", input="27+58=?", temperature=0, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


def test_responses_keep_to_a_schema(client: OpenAI) -> None:
    response = client.responses.parse(model="demo", input="27+58=?", text_format=Answer, temperature=0)
    assert isinstance(response.output_parsed, Answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"content": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        {"input": []},
    ],
)
def test_what_responses_cannot_do_is_refused(client: OpenAI, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{"model": "demo", "input": "a", **fields})
