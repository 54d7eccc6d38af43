"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from qwenrt.plugins import RequestError

from ..outputs import CompletionDelta
from ..pooling import check_task
from ..sampling.params import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.thinking import Thinking, thinking_after
from .chat_protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    ChatMessageOut,
    Tool,
    ToolCallOut,
)
from .errors import ApiError
from .generation import Generation, Service
from .logprobs import chat_logprobs
from .protocol import FinishReason
from .reasoning import ReasoningParser
from .sampling import answer_form, sampling_params
from .tool_calls import Piece, ToolCallDelta, ToolCallParser
from .tool_choice import ToolUse, tool_use


async def start_chat(service: Service, body: ChatCompletionRequest, tenant: str) -> Chat:
    """Take a chat in; raises RequestError (ApiError, QueueFullError) if it cannot be served."""
    model = service.model_of(body.model)
    check_task(service.llm.llm.engine.manifest, "generate", "generate text")
    use = tool_use(body, answer_form(body))
    params = _params(service, body, use)
    token_ids = await chat_tokens(service, body.messages, use.shown, template_arguments(body))
    generation = await service.start([token_ids], params, body, model=model, tenant=tenant)
    return Chat(service, body, generation, with_tools=use.shown is not None)


def template_arguments(body: ChatCompletionRequest) -> dict[str, Any]:
    """What the chat template gets beside messages and tools."""
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("enable_thinking", body.reasoning_effort != "none")
    return arguments


async def chat_tokens(
    service: Service, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, arguments: dict[str, Any]
) -> list[int]:
    """The prompt that the checkpoint's chat template makes of a conversation; raises RequestError if it cannot."""
    llm = service.llm.llm

    def encode() -> list[int]:
        text = prompt_text(llm.chat_template, messages, tools, arguments)
        return llm.engine.tokenizer.encode(text, add_special_tokens=False)

    return await service.llm.in_text_thread(encode)


def prompt_text(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    arguments: dict[str, Any],
) -> str:
    """The prompt as text; raises RequestError if there is no template or it refuses these messages."""
    if template is None:
        raise ApiError(404, "this model has no chat template; use /v1/completions")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in arguments:
            raise RequestError(f"chat_template_kwargs.{name} is not an argument; there are fields for that")
    plain = [_plain_message(message) for message in messages]
    dumped = None if tools is None else [tool.model_dump(exclude_unset=True) for tool in tools]
    return template.render(plain, tools=dumped, **arguments)


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """As templates have messages: without what is null, and with system for developer."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


def _params(service: Service, body: ChatCompletionRequest, use: ToolUse) -> SamplingParams:
    given = {tokens for tokens in (body.max_tokens, body.max_completion_tokens) if tokens is not None}
    if len(given) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ; give max_completion_tokens alone")
    return sampling_params(
        body,
        service.recommended,
        structured=use.form,
        max_tokens=given.pop() if given else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_budget=body.thinking_budget,
    )


class Chat:
    """A chat that was taken in; to be given out once, by `chunks` or `whole`. Closing `generation` ends it."""

    def __init__(
        self, service: Service, body: ChatCompletionRequest, generation: Generation, *, with_tools: bool
    ) -> None:
        self.generation = generation
        self._tokenizer = service.llm.llm.engine.tokenizer
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._common: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": generation.model,
        }
        thinking = thinking_after(self._tokenizer, generation.prompt_token_ids(0))
        self._answers = [_Answer(thinking, with_tools) for _ in range(generation.n)]

    async def chunks(self) -> AsyncIterator[ChatChunk]:
        """The chat as chunks."""
        for index in range(self.generation.n):
            first = ChatMessageOut(role="assistant", content="")
            yield self._chunk(ChatChunkChoice(index=index, delta=first, logprobs=None, finish_reason=None))
        async for _, delta in self.generation.deltas():
            for output in delta.outputs:
                for choice in self._chunk_choices(output):
                    yield self._chunk(choice)
        if self._includes_usage:
            usage = self.generation.usage()
            yield ChatChunk(**self._common, object="chat.completion.chunk", choices=[], usage=usage)

    async def whole(self) -> ChatCompletion:
        """The chat as one response."""
        wholes = [_Whole() for _ in self._answers]
        async for _, delta in self.generation.deltas():
            for output in delta.outputs:
                for choice in self._chunk_choices(output):
                    wholes[output.index].add(choice)
        choices = [whole.choice(index) for index, whole in enumerate(wholes)]
        return ChatCompletion(**self._common, object="chat.completion", choices=choices, usage=self.generation.usage())

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        common = {**self._common, "usage": None} if self._includes_usage else self._common
        return ChatChunk(**common, object="chat.completion.chunk", choices=[choice])

    def _chunk_choices(self, output: CompletionDelta) -> list[ChatChunkChoice]:
        """One for each kind of news; the last has the log-probabilities and how the answer ended."""
        answer = self._answers[output.index]
        deltas = answer.read(output)
        logprobs = chat_logprobs(self._tokenizer, output.logprobs)
        reason = answer.finish_reason(output)
        if not deltas and (reason is not None or logprobs is not None):
            deltas = [ChatMessageOut()]
        choices = [
            ChatChunkChoice(index=output.index, delta=delta, logprobs=None, finish_reason=None) for delta in deltas
        ]
        if choices:
            choices[-1].logprobs = logprobs
            choices[-1].finish_reason = reason
            if output.stop_reason is not None:
                choices[-1].stop_reason = output.stop_reason
        return choices


class _Answer:
    """The text of one answer, parted into thinking, answer and tool calls while it comes."""

    def __init__(self, thinking: Thinking, with_tools: bool) -> None:
        self._reasoning = ReasoningParser(thinking)
        self._tools = ToolCallParser() if with_tools else None

    def read(self, output: CompletionDelta) -> list[ChatMessageOut]:
        """What is new."""
        reasoning, text = self._reasoning.push(output.text)
        pieces: list[Piece] = [text] if self._tools is None else self._tools.push(text)
        if output.finish_reason is not None:
            more, text = self._reasoning.finish()
            reasoning += more
            pieces += [text] if self._tools is None else [*self._tools.push(text), *self._tools.finish()]
        deltas = [ChatMessageOut(reasoning_content=reasoning)] if reasoning else []
        return deltas + [_message_delta(piece) for piece in pieces if piece]

    def finish_reason(self, output: CompletionDelta) -> FinishReason | None:
        """In OpenAI's words."""
        if output.finish_reason is None:
            return None
        if output.finish_reason == "length":
            return "length"
        return "tool_calls" if self._tools is not None and self._tools.num_calls else "stop"


def _message_delta(piece: Piece) -> ChatMessageOut:
    if not isinstance(piece, ToolCallDelta):
        return ChatMessageOut(content=piece)
    if piece.id is None:
        call = ToolCallOut(index=piece.index, function=CalledFunction(arguments=piece.arguments))
    else:
        function = CalledFunction(name=piece.name, arguments=piece.arguments)
        call = ToolCallOut(index=piece.index, id=piece.id, type="function", function=function)
    return ChatMessageOut(tool_calls=[call])


class _Whole:
    """An answer put together from the very chunks that a stream would have."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallOut] = []
        self._logprobs: ChatLogprobs | None = None
        self._last: ChatChunkChoice | None = None

    def add(self, choice: ChatChunkChoice) -> None:
        self._last = choice
        self._content.append(choice.delta.content or "")
        self._reasoning.append(choice.delta.reasoning_content or "")
        for call in choice.delta.tool_calls or ():
            if call.index == len(self._calls):
                self._calls.append(call)
            else:
                self._calls[call.index].function.arguments += call.function.arguments
        if choice.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = ChatLogprobs(content=[])
            self._logprobs.content += choice.logprobs.content

    def choice(self, index: int) -> ChatChoice:
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        message = ChatMessageOut(role="assistant", content="".join(self._content))
        reasoning = "".join(self._reasoning)
        if reasoning:
            message.reasoning_content = reasoning
        if self._calls:
            message.tool_calls = self._calls
        if not message.content and (reasoning or self._calls):
            message.content = None
        choice = ChatChoice(index=index, message=message, logprobs=self._logprobs, finish_reason=last.finish_reason)
        if last.stop_reason is not None:
            choice.stop_reason = last.stop_reason
        return choice
