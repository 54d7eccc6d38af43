"""What goes over the wire in chats: OpenAI's requests and responses, with vLLM's additional fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .protocol import FinishReason, GenerationRequest, RequestModel, ResponseModel, Usage


class MessageModel(BaseModel):
    """A part of a conversation; what clients add to one that they were given (index, refusal ...) has no effect."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FunctionCall(MessageModel):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(MessageModel):
    """A call that an assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(MessageModel):
    """A part of a message; only texts are supported."""

    type: str
    text: str | None = None


class ChatMessage(MessageModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Whether its arguments must fit the schema, also where the model chooses whether to call it."""


class Tool(RequestModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedToolChoice(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    """Takes the place of max_tokens; without either an answer may have as many tokens as fit."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call where a call is required; elsewhere it is the model's choice."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """"none" switches thinking off, anything else on."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the checkpoint's chat template, such as enable_thinking."""
    thinking_budget: int | None = None
    """Thinking ends after so many tokens."""
    metadata: dict[str, str] | None = None
    """Has no effect."""
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs true")
        return self


class TopLogprob(ResponseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    """Natural logarithm, -9999 at the least."""
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Of all tokens of a choice, those of thinking and of tool calls too."""

    content: list[TokenLogprob]


class CalledFunction(ResponseModel):
    """A function's name and its arguments as JSON text, or what a chunk has of them."""

    name: str | None = None
    arguments: str


class ToolCallOut(ResponseModel):
    """A call that the model makes, or what a chunk has of it (by index)."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessageOut(ResponseModel):
    """An answer, or what a chunk has of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class ChatChoice(ResponseModel):
    """One of n answers."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, as in vLLM."""


class ChatCompletion(ResponseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(ResponseModel):
    """What a chunk has of one of n answers."""

    index: int
    delta: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatChunk(ResponseModel):
    """A piece of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
