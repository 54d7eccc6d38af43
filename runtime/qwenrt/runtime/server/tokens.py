"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from qwenrt.plugins import RequestError

from .chat import chat_tokens
from .chat_protocol import ChatMessage, Tool
from .generation import Service
from .protocol import RequestModel, ResponseModel


class TokenizeRequest(RequestModel):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(ResponseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    """The text of tokens."""

    prompt: str


async def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a prompt, or of a conversation through the chat template; raises RequestError."""
    service.model_of(body.model)
    llm = service.llm.llm
    tokenizer, limit = llm.engine.tokenizer, llm.engine.limits.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of the two")
    if body.messages is not None:
        tokens = await chat_tokens(service, body.messages, body.tools, dict(body.chat_template_kwargs or {}))
    else:
        tokens = await service.llm.in_text_thread(tokenizer.encode, body.prompt)
    response = TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens)
    if body.return_token_strs:
        response.token_strs = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return response


async def detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens, special ones included; raises RequestError."""
    service.model_of(body.model)
    engine = service.llm.llm.engine
    vocab_size = engine.manifest.model.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"tokens has the id {token}; the vocabulary has ids 0 to {vocab_size - 1}")
    return DetokenizeResponse(prompt=await service.llm.in_text_thread(engine.tokenizer.decode, body.tokens, False))
