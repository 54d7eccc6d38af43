"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (nats) of a generated token, and of the most likely ones by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's prompt and its answers."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = field(default=0)
    """Prompt tokens whose K and V came from the prefix cache (of the first answer)."""
