"""What goes over the wire where nothing is generated: OpenAI's embeddings, and vLLM's rerank, score and classify."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .protocol import QueuedRequest, RequestModel, ResponseModel, one_error

MAX_INPUTS = 2048
"""Inputs, documents or pairs of one request."""

Inputs = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(one_error)]
"""One input or many, as text or as token ids."""
_Texts = str | Annotated[list[str], Field(fail_fast=True)]


class EmbeddingRequest(QueuedRequest):
    """The body of POST /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the float32 numbers, the lowest byte first."""
    dimensions: int | None = None
    """Keep only so many numbers, the first."""

    normalize: bool = True
    """Whether embeddings are scaled to length 1."""
    instruction: str | None = None
    """What the inputs are queries for, put before them as Qwen3-Embedding has it; documents get none."""


class RerankDocument(RequestModel):
    """A document as an object."""

    text: str


class RerankRequest(QueuedRequest):
    """The body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)]
    top_n: int = Field(0, ge=0)
    """Give only so many results, the best; 0 for all."""
    return_documents: bool = True

    instruction: str | None = None
    """What a document must do to be relevant; by default answer a web search query."""


class ScoreRequest(QueuedRequest):
    """The body of POST /score: one text against one or many, or as many texts pair by pair."""

    text_1: _Texts
    text_2: _Texts

    instruction: str | None = None
    """What a document, text_2, must do to be relevant; by default answer a web search query."""


class ClassifyRequest(QueuedRequest):
    """The body of POST /classify."""

    input: Inputs


class PoolingUsage(ResponseModel):
    """How many tokens a request took."""

    prompt_tokens: int
    total_tokens: int


class Embedding(ResponseModel):
    """The embedding of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of them."""


class EmbeddingList(ResponseModel):
    """The embeddings of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class RerankResult(ResponseModel):
    """A document and how relevant it is."""

    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankResponse(ResponseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class Score(ResponseModel):
    """The score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(ResponseModel):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class Classification(ResponseModel):
    """The classes of an input."""

    index: int
    label: str
    """The most likely one."""
    probs: list[float]
    num_classes: int


class ClassificationList(ResponseModel):
    """The classes of all inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
