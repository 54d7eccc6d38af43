"""What all endpoints that generate share: the served model, and its requests taken in, measured and followed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from qwenrt.plugins import RequestError

from ..adapters import LoRARequest
from ..async_llm import AsyncLLM, RequestStream
from ..llm import Prompt
from ..outputs import RequestDelta
from ..sampling.params import SamplingParams
from ..text.thinking import Thinking, ThinkingTokens
from .errors import ApiError
from .metrics import Metrics, RequestMeter
from .protocol import CompletionTokensDetails, PromptTokensDetails, QueuedRequest, Usage


class Service:
    """A model under the name it is served by, and LoRA adapters of it under theirs."""

    def __init__(
        self, llm: AsyncLLM, model: str, recommended: dict[str, Any], adapters: Iterable[LoRARequest] = ()
    ) -> None:
        self.llm = llm
        self.model = model
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.recommended = recommended
        """Sampling fields where a request has none."""
        self.metrics = Metrics(llm, model)
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model, or an adapter where none can be used."""
        if name is not None and name != self.model:
            raise _unknown_model(name, [self.model])

    def model_of(self, name: str | None) -> str:
        """The model or adapter that a request names, by default the model; raises ApiError if there is none of that name."""
        if name is None or name == self.model or name in self.adapters:
            return name or self.model
        raise _unknown_model(name, [self.model, *self.adapters])

    async def start(
        self, prompts: Sequence[Prompt], params: SamplingParams, body: QueuedRequest, *, model: str, tenant: str
    ) -> Generation:
        """Take in a request for each prompt; raises, and takes none, if one cannot be served. model: as `model_of` gives it."""
        arrival, since = time.perf_counter(), asyncio.get_running_loop().time()
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                streams.append(
                    await self.llm.submit(
                        prompt,
                        params,
                        lora_request=self.adapters.get(model),
                        priority=body.priority,
                        tenant=tenant,
                        timeout=body.timeout,
                        since=since,
                    )
                )
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return Generation(self, streams, params.n, arrival, model)


def _unknown_model(name: str, served: Sequence[str]) -> ApiError:
    message = f"the model {name!r} does not exist; this server has {', '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


class Generation:
    """Requests that were taken in together; choice `i * n + j` is the answer j to prompt i."""

    def __init__(self, service: Service, streams: list[RequestStream], n: int, arrival: float, model: str) -> None:
        self.model = model
        """What it was asked of."""
        self._streams = streams
        self._meters = [RequestMeter(service.metrics, len(stream.prepared.token_ids), arrival) for stream in streams]
        self._closed = False
        self.n = n
        self.num_choices = len(streams) * self.n
        self._counter = _TokenCounter(service, streams, self.n)

    def prompt_token_ids(self, choice: int) -> list[int]:
        """The prompt of a choice."""
        return self._streams[choice // self.n].prepared.token_ids

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._counter.usage()

    def close(self) -> None:
        """Abort what is not finished."""
        for stream in self._streams:
            stream.close()
        if not self._closed:
            self._closed = True
            for meter in self._meters:
                meter.end(self.n)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def deltas(self) -> AsyncIterator[tuple[int, RequestDelta]]:
        """News of the requests with the number of the prompt; raises what ended a request."""
        async for place, delta in _merged(self._streams):
            self._meters[place].see(delta)
            self._counter.see(place, delta)
            for output in delta.outputs:
                if output.finish_reason == "abort":
                    raise RequestError(f"the answer could not be finished: {output.stop_reason}")
            yield place, delta


class _TokenCounter:
    """Counts tokens for the usage."""

    def __init__(self, service: Service, streams: list[RequestStream], n: int) -> None:
        self._tokens = ThinkingTokens.of(service.llm.llm.engine.tokenizer)
        prompts = [stream.prepared.token_ids for stream in streams]
        self._n = n
        self._prompt = sum(map(len, prompts))
        self._cached = [0] * len(prompts)
        self._generated = 0
        self._reasoning = 0
        after = [Thinking.NONE if self._tokens is None else self._tokens.after(prompt) for prompt in prompts]
        self._thinking = [state for state in after for _ in range(n)]

    def see(self, place: int, delta: RequestDelta) -> None:
        """Count what came."""
        self._cached[place] = delta.num_cached_tokens
        for output in delta.outputs:
            self._generated += len(output.token_ids)
            choice = place * self._n + output.index
            if self._tokens is not None and self._thinking[choice] is not Thinking.NONE:
                self._see_thinking(self._tokens, choice, output.token_ids)

    def _see_thinking(self, tokens: ThinkingTokens, choice: int, token_ids: list[int]) -> None:
        for token in token_ids:
            if self._thinking[choice] is Thinking.POSSIBLE:
                self._thinking[choice] = Thinking.OPEN if token == tokens.open else Thinking.NONE
            if self._thinking[choice] is Thinking.NONE:
                return
            self._reasoning += 1
            if token == tokens.close:
                self._thinking[choice] = Thinking.NONE

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._generated,
            total_tokens=self._prompt + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached)),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self._reasoning),
        )


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestDelta]]:
    """The news of all streams as they come, with the place of the stream."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                news = task.result()
                if news is not None:
                    yield place, news
                    waiting[asyncio.ensure_future(anext(streams[place], None))] = place
    finally:
        for task in waiting:
            task.cancel()
