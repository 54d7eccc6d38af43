"""POST /v1/responses, for text: OpenAI's newer shape around the same chat. Nothing is stored."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from qwenrt.plugins import RequestError

from .chat import Chat, start_chat
from .chat_protocol import ChatCompletionRequest, ChatMessage, ContentPart, MessageModel
from .generation import Generation, Service
from .protocol import JsonSchemaFormat, RequestModel, ResponseFormat, ResponseModel, Usage


class InputItem(MessageModel):
    """A message; reasoning of earlier answers may be sent along and has no effect."""

    type: Literal["message", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class TextFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """How text is given."""

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    """Whether the model thinks first: "none" switches it off, anything else on."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(RequestModel):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    """Has no effect."""
    store: bool | None = None
    """Has no effect: nothing is stored."""

    timeout: float | None = Field(None, gt=0)
    """As in chats."""


class TextPart(ResponseModel):
    """A part of an item's text."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None


class OutputItem(ResponseModel):
    """The answer, or the thinking before it."""

    id: str
    type: Literal["message", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    summary: list[Any] | None = None
    content: list[TextPart]


class InputTokensDetails(ResponseModel):
    """Of the input's tokens."""

    cached_tokens: int


class OutputTokensDetails(ResponseModel):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """How many tokens the response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseModel):
    """The answer to a responses request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float | None
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float | None
    store: Literal[False]
    usage: ResponseUsage | None


class ResponseEvent(ResponseModel):
    """A piece of a streamed response; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: TextPart | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[Any] | None = None


async def start_response(service: Service, body: ResponsesRequest, tenant: str) -> Responses:
    """Take a response in; raises RequestError (ApiError, QueueFullError) if it cannot be served."""
    chat = await start_chat(service, as_chat(body), tenant)
    return Responses(chat.generation.model, body, chat)


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that a response is the answer of; raises RequestError."""
    return ChatCompletionRequest(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        timeout=body.timeout,
    )


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    for index, item in enumerate(body.input):
        if item.type == "reasoning":
            continue
        if item.role is None:
            raise RequestError(f"input[{index}].role is missing; it must be system, developer, user or assistant")
        messages.append(ChatMessage(role=item.role, content=_content(index, item)))
    return messages


def _content(index: int, item: InputItem) -> str | None:
    if not isinstance(item.content, list):
        return item.content
    for part in item.content:
        if part.type not in ("input_text", "output_text") or part.text is None:
            raise RequestError(
                f"input[{index}].content has a part of type {part.type[:40]!r}; only texts are supported"
            )
    return "\n".join(part.text or "" for part in item.content)


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    schema = JsonSchemaFormat(name=form.name or "answer", schema=form.schema_) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema)


Kind = Literal["reasoning", "message"]
Done = Literal["completed", "incomplete"]


class Responses:
    """A response that was taken in; to be given out once, by `chunks` or `whole`. Closing `generation` ends it."""

    def __init__(self, model: str, body: ResponsesRequest, chat: Chat) -> None:
        self.generation: Generation = chat.generation
        self._body = body
        self._chat = chat
        self._model = model
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._numbers = itertools.count()

    async def whole(self) -> ResponseObject:
        """The response at once: what its last event has."""
        async for event in self.chunks():
            last = event
        assert last.response is not None
        return last.response

    async def chunks(self) -> AsyncIterator[ResponseEvent]:
        """The response as events."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        output: list[OutputItem] = []
        done: Done = "completed"
        async for chunk in self._chat.chunks():
            for choice in chunk.choices:
                if choice.finish_reason == "length":
                    done = "incomplete"
                for event in self._add(output, "reasoning", choice.delta.reasoning_content):
                    yield event
                for event in self._add(output, "message", choice.delta.content):
                    yield event
        if not output:
            for event in self._begin(output, "message"):
                yield event
        for event in self._end(output, done):
            yield event
        yield self._event(f"response.{done}", response=self._response(done, output))

    def _add(self, output: list[OutputItem], kind: Kind, text: str | None) -> Iterator[ResponseEvent]:
        """Text for the last item, or for a new one if it is of another kind."""
        if not text:
            return
        if not output or output[-1].type != kind:
            yield from self._end(output, "completed")
            yield from self._begin(output, kind)
        part = output[-1].content[0]
        part.text += text
        yield self._about(output, f"response.{part.type}.delta", content_index=0, delta=text, **_logprobs(part))

    def _begin(self, output: list[OutputItem], kind: Kind) -> Iterator[ResponseEvent]:
        identifier = uuid.uuid4().hex
        if kind == "message":
            part = TextPart(type="output_text", text="", annotations=[])
            item = OutputItem(id=f"msg_{identifier}", type=kind, status="in_progress", role="assistant", content=[part])
        else:
            part = TextPart(type="reasoning_text", text="")
            item = OutputItem(id=f"rs_{identifier}", type=kind, status="in_progress", summary=[], content=[part])
        output.append(item)
        empty = item.model_copy(update={"content": []})
        yield self._event("response.output_item.added", item=empty, output_index=len(output) - 1)
        yield self._about(output, "response.content_part.added", content_index=0, part=part.model_copy())

    def _end(self, output: list[OutputItem], done: Done) -> Iterator[ResponseEvent]:
        """Complete the last item, if there is one."""
        if not output:
            return
        item, part = output[-1], output[-1].content[0]
        item.status = done
        yield self._about(output, f"response.{part.type}.done", content_index=0, text=part.text, **_logprobs(part))
        yield self._about(output, "response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", item=item, output_index=len(output) - 1)

    def _about(self, output: list[OutputItem], kind: str, **fields: Any) -> ResponseEvent:
        """An event about the last item."""
        return self._event(kind, item_id=output[-1].id, output_index=len(output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)

    def _response(self, status: Literal["in_progress"] | Done, output: list[OutputItem]) -> ResponseObject:
        body = self._body
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created,
            model=self._model,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            output=output,
            parallel_tool_calls=False,
            temperature=body.temperature,
            tool_choice="none",
            tools=[],
            top_p=body.top_p,
            store=False,
            usage=None if status == "in_progress" else _usage(self.generation.usage()),
        )


def _logprobs(part: TextPart) -> dict[str, list[Any]]:
    """OpenAI's client expects the field with an answer's text."""
    return {"logprobs": []} if part.type == "output_text" else {}


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
