"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from qwenrt.plugins import RequestError

from ..outputs import CompletionDelta
from .generation import Generation, Service
from .logprobs import CompletionLogprobsWriter, joined
from .protocol import MAX_PROMPTS, Completion, CompletionChoice, CompletionRequest
from .sampling import answer_form, sampling_params

_DEFAULT_MAX_TOKENS = 16


async def start_completions(service: Service, body: CompletionRequest, tenant: str) -> Completions:
    """Take completions in; raises RequestError (ApiError, QueueFullError) if one cannot be served."""
    model = service.model_of(body.model)
    prompts = body.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} prompts; it must have 1 to {MAX_PROMPTS}")
    if body.suffix:
        raise RequestError("suffix is not supported: Qwen3 models do not fill in the middle; leave it out")
    if body.best_of not in (None, body.n or 1):
        raise RequestError(f"best_of is {body.best_of}; only the value of n is supported")
    params = sampling_params(
        body,
        service.recommended,
        structured=answer_form(body),
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    generation = await service.start(prompts, params, body, model=model, tenant=tenant)
    return Completions(service, body, generation)


class Completions:
    """Completions that were taken in; to be given out once, by `chunks` or `whole`. Closing `generation` ends them."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        self.generation = generation
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._common: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model,
        }
        tokenizer = service.llm.llm.engine.tokenizer
        choices = range(generation.num_choices)
        self._echoes = [""] * len(choices)
        if body.echo:
            self._echoes = [tokenizer.decode(generation.prompt_token_ids(choice), False) for choice in choices]
        self._logprobs = [CompletionLogprobsWriter(tokenizer) for _ in choices]

    async def chunks(self) -> AsyncIterator[Completion]:
        """The completions as chunks."""
        common = {**self._common, "usage": None} if self._includes_usage else self._common
        async for place, delta in self.generation.deltas():
            for output in delta.outputs:
                choice = self._choice(place, output)
                if choice.text or choice.logprobs is not None or choice.finish_reason is not None:
                    yield Completion(**common, choices=[choice])
        if self._includes_usage:
            yield Completion(**self._common, choices=[], usage=self.generation.usage())

    async def whole(self) -> Completion:
        """The completions as one response."""
        wholes: dict[int, CompletionChoice] = {}
        texts: dict[int, list[str]] = {}
        async for place, delta in self.generation.deltas():
            for output in delta.outputs:
                choice = self._choice(place, output)
                texts.setdefault(choice.index, []).append(choice.text)
                if choice.index in wholes and (earlier := wholes[choice.index].logprobs) is not None:
                    choice.logprobs = joined(earlier, choice.logprobs)
                wholes[choice.index] = choice
        for index, choice in wholes.items():
            choice.text = "".join(texts[index])
        choices = [wholes[index] for index in sorted(wholes)]
        return Completion(**self._common, choices=choices, usage=self.generation.usage())

    def _choice(self, place: int, output: CompletionDelta) -> CompletionChoice:
        index = place * self.generation.n + output.index
        echo, self._echoes[index] = self._echoes[index], ""
        if output.prompt_logprobs is None:
            logprobs = self._logprobs[index].write(output.logprobs)
        else:
            prompt = self.generation.prompt_token_ids(index)
            logprobs = self._logprobs[index].write_prompt(prompt, output.prompt_logprobs, output.logprobs)
        choice = CompletionChoice(
            index=index,
            text=echo + output.text,
            logprobs=logprobs,
            finish_reason=None
            if output.finish_reason is None
            else "length"
            if output.finish_reason == "length"
            else "stop",
        )
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        return choice
