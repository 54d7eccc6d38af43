"""What goes over the wire: OpenAI's requests and responses, with vLLM's additional fields.

A field that is not here is refused by name. What values sampling parameters may have is `SamplingParams`' to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 256
"""Prompts of one completion request."""

# A list of a million wrong entries gives one error.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_Ids = Annotated[list[int], Field(fail_fast=True)]


class RequestModel(BaseModel):
    """A JSON object with known fields only, of exactly their types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        """One error for the first unknown field, where pydantic would have one for each."""
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in data:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "{field} is not supported here; leave it out", {"field": str(name)[:100]}
                    )
        return data


class ResponseModel(BaseModel):
    """What the server says; fields that were not set are left out of the JSON."""


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool = False
    """End the stream with a chunk that has the usage and no choices."""


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs: the form of the answer; one of the fields."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: _Strings | None = None
    grammar: str | None = None


class JsonSchemaFormat(RequestModel):
    """The schema of a response_format of type json_schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None
    """Answers always fit the schema."""


class ResponseFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class QueuedRequest(RequestModel):
    """What requests to the engine have in common."""

    model: str | None = None
    user: str | None = None
    """Has no effect."""

    priority: int = 0
    """Requests with a lower number go first."""
    timeout: float | None = Field(None, gt=0)
    """Seconds that the request may take, waiting included, where the server's own limit is not less."""


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > 1024:
        raise PydanticCustomError("too_long", "it may have 1024 entries")
    return value


class GenerationRequest(QueuedRequest):
    """What chats and completions have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | _Strings | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = None
    """By token id."""
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: _Strings | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is allowed only with stream true")
        return self


def one_error(value: Any) -> Any:
    """One error for a prompt of no kind, where pydantic would have one for each kind and entry."""
    kinds = {type(item) for item in value} if isinstance(value, list) else set()
    flat = kinds <= {str} or kinds <= {int}
    nested = kinds == {list} and all(type(item) is int for inner in value for item in inner)
    if not isinstance(value, str) and not (isinstance(value, list) and (flat or nested)):
        raise PydanticCustomError("prompt", "it must be text, token ids, or a list of texts or of lists of token ids")
    return value


def as_list(value: Any) -> list[Any]:
    """One prompt or many (text, token ids, or a list of either) as a list of them."""
    one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if one else value


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(one_error)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    """Not supported: Qwen3's models do not fill in the middle."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more."""
        return as_list(self.prompt)


class ErrorDetail(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Of the generated tokens."""

    reasoning_tokens: int


class Usage(ResponseModel):
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens of all choices, with those that end them."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(ResponseModel):
    """Of the tokens of a choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One answer, or what a chunk has of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class Completion(ResponseModel):
    """The answers to prompts, or a piece of them in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """A model that is served; `parent` is the one that an adapter belongs to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None = None


class ModelList(ResponseModel):
    """All models that are served: one, and its adapters."""

    object: Literal["list"]
    data: list[Model]
