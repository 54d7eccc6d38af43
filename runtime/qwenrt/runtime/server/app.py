"""The application: which path does what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRouter
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from . import chat, completions, pooling, responses, tokens
from .chat_protocol import ChatCompletion, ChatCompletionRequest
from .errors import ApiError, add_error_handlers
from .generation import Generation, Service
from .metrics import CONTENT_TYPE
from .middleware import BodyCheck, KeyCheck
from .pooling_protocol import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
)
from .protocol import Completion, CompletionRequest, ErrorResponse, Model, ModelList
from .streaming import ClientLeftError, EventStream, until_client_leaves

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504)
}
# Before OpenAPI 3.2 the schema of a stream is that of an event in it.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": _EVENT}},
        "description": "The answer, or a stream of it",
    }
}
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)


def create_app(service: Service, *, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()) -> FastAPI:
    """The ASGI application that serves `service` to clients."""
    app = create_inner_app(service)
    add_guards(app, api_keys=api_keys, cors_origins=cors_origins)
    return app


def create_inner_app(service: Service) -> FastAPI:
    """The application without what keeps clients in check; a request's scope must have a `tenant` in its state."""
    app = FastAPI(title="qwenrt", version=version("qwenrt"), docs_url=None, redoc_url=None, responses=_ERRORS)
    add_error_handlers(app)
    app.add_exception_handler(ClientLeftError, _nobody_listens)
    app.include_router(_generation_routes(service))
    app.include_router(_pooling_routes(service))
    app.include_router(_information_routes(service))
    return app


def add_guards(app: Starlette, *, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()) -> None:
    """Make an application check its clients: keys, bodies, and which web pages they come from."""
    app.add_middleware(BodyCheck)
    app.add_middleware(KeyCheck, keys=api_keys)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])


def _generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAMS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(request, body.stream, lambda: chat.start_chat(service, body, request.state.tenant))

    @router.post("/v1/completions", response_model=Completion, responses=_STREAMS)
    async def completions_(body: CompletionRequest, request: Request) -> Response:
        """Go on with texts."""
        return await _answer(
            request, body.stream, lambda: completions.start_completions(service, body, request.state.tenant)
        )

    @router.post("/v1/responses", response_model=responses.ResponseObject, responses=_STREAMS)
    async def responses_(body: responses.ResponsesRequest, request: Request) -> Response:
        """Answer an input, in the shape of OpenAI's responses."""
        return await _answer(
            request, body.stream, lambda: responses.start_response(service, body, request.state.tenant)
        )

    return router


def _pooling_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts."""
        return await _whole(request, pooling.embeddings(service, body, request.state.tenant))

    @router.post("/v1/rerank", response_model=RerankResponse)
    @router.post("/rerank", response_model=RerankResponse)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Order documents by how relevant they are to a query."""
        return await _whole(request, pooling.rerank(service, body, request.state.tenant))

    @router.post("/v1/score", response_model=ScoreList)
    @router.post("/score", response_model=ScoreList)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts."""
        return await _whole(request, pooling.score(service, body, request.state.tenant))

    @router.post("/classify", response_model=ClassificationList)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Classify texts."""
        return await _whole(request, pooling.classify(service, body, request.state.tenant))

    return router


def _information_routes(service: Service) -> APIRouter:
    router = APIRouter()
    llm = service.llm
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @router.post("/tokenize")
    async def tokenize(body: tokens.TokenizeRequest) -> tokens.TokenizeResponse:
        """The tokens of a prompt or of a conversation."""
        return await tokens.tokenize(service, body)

    @router.post("/detokenize")
    async def detokenize(body: tokens.DetokenizeRequest) -> tokens.DetokenizeResponse:
        """The text of tokens."""
        return await tokens.detokenize(service, body)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The model that is served and its adapters, in a list."""
        return ModelList(object="list", data=[_model(service, name) for name in (service.model, *service.adapters)])

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        """The model that is served, or an adapter."""
        return _model(service, service.model_of(name))

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine lives; it may be shutting down."""
        if not llm.alive:
            raise ApiError(503, llm.refusal or "the engine stopped")
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether requests are taken."""
        if llm.refusal is not None:
            raise ApiError(503, llm.refusal, retry_after=5)
        return {"status": "ok"}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @router.get("/", response_class=HTMLResponse)
    async def chat_page() -> HTMLResponse:
        """A page to chat with the model."""
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    return router


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="qwenrt",
        max_model_len=service.llm.llm.engine.limits.max_model_len,
        parent=service.model if name in service.adapters else None,
    )


class _Job(Protocol):
    """Something that was taken in and is given out in one way or the other."""

    generation: Generation

    def chunks(self) -> AsyncIterator[BaseModel]: ...

    async def whole(self) -> BaseModel: ...


async def _answer(request: Request, stream: bool | None, start: Callable[[], Coroutine[None, None, _Job]]) -> Response:
    """Start a job and give it out; it ends when the client leaves."""
    if stream:
        job = await until_client_leaves(request.receive, start())
        return EventStream(job.chunks(), job.generation.close)

    async def work() -> BaseModel:
        job = await start()
        async with job.generation:
            return await job.whole()

    return await _whole(request, work())


async def _whole(request: Request, work: Coroutine[None, None, BaseModel]) -> Response:
    """The result of `work`, which ends when the client leaves."""
    whole = await until_client_leaves(request.receive, work)
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
