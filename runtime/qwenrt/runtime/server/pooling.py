"""POST /v1/embeddings, /v1/rerank, /score and /classify: requests that generate nothing."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import RequestError

from ..async_llm import QueueFullError, RequestStream, UnavailableError
from ..pooling import PooledRow, PoolingWork, Result, classification_work, embedding_work, scoring_work
from .generation import Service
from .metrics import RequestMeter
from .pooling_protocol import (
    MAX_INPUTS,
    Classification,
    ClassificationList,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PoolingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from .protocol import QueuedRequest, as_list


async def embeddings(service: Service, body: EmbeddingRequest, tenant: str) -> EmbeddingList:
    """Embed inputs; raises RequestError (ApiError, QueueFullError) if they cannot be served."""
    service.check_model(body.model)
    inputs = _bounded("input", as_list(body.input))
    work = embedding_work(
        _manifest(service),
        inputs,
        dimensions=body.dimensions,
        normalize=body.normalize,
        instruction=body.instruction,
    )
    outputs, usage = await _run(service, work, body, tenant)

    def encoded(values: npt.NDArray[np.float32]) -> list[float] | str:
        if body.encoding_format == "base64":
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        numbers: list[float] = values.tolist()
        return numbers

    data = [
        Embedding(object="embedding", index=index, embedding=encoded(output.embedding))
        for index, output in enumerate(outputs)
    ]
    return EmbeddingList(**_head(service, "embd"), data=data, usage=usage)


async def rerank(service: Service, body: RerankRequest, tenant: str) -> RerankResponse:
    """Order documents by how well they suit a query; raises RequestError if that cannot be served."""
    service.check_model(body.model)
    documents = [one if isinstance(one, str) else one.text for one in _bounded("documents", body.documents)]
    scores, usage = await _score(service, [body.query], documents, body, tenant)
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n or None]:
        result = RerankResult(index=index, relevance_score=scores[index])
        if body.return_documents:
            result.document = RerankDocument(text=documents[index])
        results.append(result)
    return RerankResponse(id=f"rerank-{uuid.uuid4().hex}", model=service.model, usage=usage, results=results)


async def score(service: Service, body: ScoreRequest, tenant: str) -> ScoreList:
    """Score pairs of texts; raises RequestError if that cannot be served."""
    service.check_model(body.model)
    queries = _bounded("text_1", as_list(body.text_1))
    documents = _bounded("text_2", as_list(body.text_2))
    scores, usage = await _score(service, queries, documents, body, tenant)
    data = [Score(object="score", index=index, score=value) for index, value in enumerate(scores)]
    return ScoreList(**_head(service, "score"), data=data, usage=usage)


async def classify(service: Service, body: ClassifyRequest, tenant: str) -> ClassificationList:
    """Classify inputs; raises RequestError if that cannot be served."""
    service.check_model(body.model)
    manifest = _manifest(service)
    work = classification_work(manifest, _bounded("input", as_list(body.input)))
    outputs, usage = await _run(service, work, body, tenant)
    data = [
        Classification(
            index=index,
            label=manifest.labels[int(output.probs.argmax())],
            probs=output.probs.tolist(),
            num_classes=len(manifest.labels),
        )
        for index, output in enumerate(outputs)
    ]
    return ClassificationList(**_head(service, "classify"), data=data, usage=usage)


async def _score(
    service: Service,
    queries: Sequence[str],
    documents: Sequence[str],
    body: RerankRequest | ScoreRequest,
    tenant: str,
) -> tuple[list[float], PoolingUsage]:
    tokenizer = service.llm.llm.engine.tokenizer
    work = scoring_work(_manifest(service), tokenizer, queries, documents, instruction=body.instruction)
    outputs, usage = await _run(service, work, body, tenant)
    return [output.score for output in outputs], usage


def _manifest(service: Service) -> Any:
    return service.llm.llm.engine.manifest


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": service.model,
    }


def _bounded(name: str, items: list[Any]) -> list[Any]:
    if not 1 <= len(items) <= MAX_INPUTS:
        raise RequestError(f"{name} has {len(items)} entries; it must have 1 to {MAX_INPUTS}")
    return items


async def _run(
    service: Service, work: PoolingWork[Result], body: QueuedRequest, tenant: str
) -> tuple[list[Result], PoolingUsage]:
    """What comes of `work`, and the tokens that it took."""
    rows = await _Rows(service, work, body, tenant).compute()
    tokens = sum(len(row.prompt_token_ids) for row in rows)
    return work.results(rows), PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


class _Rows:
    """The rows of one HTTP request's prompts.

    As many of them as a step takes are in the engine or wait for it at once. The first must find a place, or the request is
    refused; the others take the places that there are, and each place serves for one prompt after the other.
    """

    def __init__(self, service: Service, work: PoolingWork[Any], body: QueuedRequest, tenant: str) -> None:
        self._service = service
        self._work = work
        self._body = body
        self._tenant = tenant
        self._arrival = time.perf_counter()
        self._since = asyncio.get_running_loop().time()
        self._left = deque(range(len(work.prompts)))
        self._rows: dict[int, PooledRow] = {}

    async def compute(self) -> list[PooledRow]:
        """All rows, in the order of the prompts; raises what ended one of them."""
        places = min(len(self._left), self._service.llm.llm.engine.limits.max_num_seqs)
        first = self._left.popleft()
        stream = await self._submit(first)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._use_place(first, stream))
                for _ in range(places - 1):
                    group.create_task(self._find_place())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            stream.close()
        return [self._rows[number] for number in range(len(self._rows))]

    async def _submit(self, number: int, place_of: RequestStream | None = None) -> RequestStream:
        return await self._service.llm.submit(
            self._work.prompts[number],
            self._work.params,
            add_special_tokens=self._work.add_special_tokens,
            priority=self._body.priority,
            tenant=self._tenant,
            timeout=self._body.timeout,
            since=self._since,
            place_of=place_of,
        )

    async def _find_place(self) -> None:
        if self._left:
            number = self._left.popleft()
            try:
                stream = await self._submit(number)
            except (QueueFullError, UnavailableError):
                self._left.appendleft(number)
            else:
                await self._use_place(number, stream)

    async def _use_place(self, number: int, stream: RequestStream) -> None:
        """Compute one row after the other."""
        try:
            await self._finish(number, stream)
            while self._left:
                number = self._left.popleft()
                stream = await self._submit(number, place_of=stream)
                await self._finish(number, stream)
        finally:
            stream.close()

    async def _finish(self, number: int, stream: RequestStream) -> None:
        token_ids = stream.prepared.token_ids
        meter = RequestMeter(self._service.metrics, len(token_ids), self._arrival)
        try:
            async for delta in stream:
                meter.see(delta)
                if delta.pooled is not None:
                    self._rows[number] = PooledRow(delta.pooled, token_ids, delta.num_cached_tokens)
        finally:
            meter.end(1)
