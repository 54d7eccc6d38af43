"""What a caller gets back: answers so far (`LLM`), or what is new of them (`AsyncLLM`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability (nats) of a generated token, and of the most likely ones by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a request, as far as it is."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the generated tokens' log-probabilities (nats); None unless `logprobs` was asked for."""
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    """None while it runs, then "stop", "length" or "abort"."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it, or why the engine gave up ("abort"); None for an end-of-text token."""


@dataclass(slots=True)
class RequestOutput:
    """A request's prompt and its answers."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of the prompt's tokens as far as they are computed, None for the first; None unless they were asked for."""
    num_cached_tokens: int = field(default=0)
    """Prompt tokens whose K and V came from the prefix cache (of the first answer)."""
    pooled: npt.NDArray[np.float32] | None = None
    """What a request with PoolingParams asked for, once it is finished; `outputs` is empty then."""


@dataclass(slots=True)
class EmbeddingOutput:
    """An input's embedding."""

    embedding: npt.NDArray[np.float32]
    """[dimensions]"""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose K and V came from the prefix cache."""


@dataclass(slots=True)
class ClassificationOutput:
    """The classes of an input."""

    probs: npt.NDArray[np.float32]
    """[labels] probabilities that sum to 1; of a single label its own, from 0 to 1."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose K and V came from the prefix cache."""


@dataclass(slots=True)
class ScoreOutput:
    """How well a document suits a query."""

    score: float
    """A reranker's probability, or the cosine of two embeddings."""
    prompt_token_ids: list[int]
    """Of the prompt of both, or of the query's and then the document's."""
    num_cached_tokens: int
    """Prompt tokens whose K and V came from the prefix cache."""


@dataclass(slots=True)
class CompletionDelta:
    """What one of the `n` answers has new."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """Of `token_ids`; None unless `logprobs` was asked for."""
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With the first news, if they were asked for: those of the prompt's tokens from the second on."""


@dataclass(slots=True)
class RequestDelta:
    """What a request's answers have new; answers without news are left out."""

    outputs: list[CompletionDelta]
    finished: bool
    num_cached_tokens: int
    """As in `RequestOutput`."""
    pooled: npt.NDArray[np.float32] | None = None
    """As in `RequestOutput`."""


def merge_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Consecutive news of one request (at least one) as one."""
    if len(deltas) == 1:
        return deltas[0]
    by_index: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        for output in delta.outputs:
            by_index.setdefault(output.index, []).append(output)
    last = deltas[-1]
    outputs = [_merge(outputs) for outputs in by_index.values()]
    return RequestDelta(outputs, last.finished, last.num_cached_tokens, last.pooled)


def _merge(outputs: list[CompletionDelta]) -> CompletionDelta:
    last = outputs[-1]
    logprobs = None if last.logprobs is None else [one for output in outputs for one in output.logprobs or ()]
    return CompletionDelta(
        index=last.index,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
