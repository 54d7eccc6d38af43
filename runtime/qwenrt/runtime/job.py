"""What a caller asked for at once, before and after the engine has taken it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .completion import Completion, Pooling
from .lora import LoraAdapter
from .outputs import RequestDelta, RequestOutput, TokenLogprobs
from .pooling import PoolingParams
from .sampling.grammar import Matcher
from .sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt and its parameters, found to be what the engine can serve."""

    prompt: str | None
    """The prompt's text; None when token ids were given."""
    token_ids: list[int]
    params: SamplingParams | PoolingParams
    max_tokens: int
    """How many tokens may follow."""
    matcher: Matcher | None
    """The start of the grammar of `structured_outputs`."""
    adapter: LoraAdapter | None = None


class Job:
    """What a caller asked for at once: one prompt and its n answers, or what is pooled from it."""

    def __init__(self, request_id: str, prompt: str | None, answers: Sequence[Completion | Pooling]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.answers = answers

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        if len(self.answers) == 1:
            return self.answers[0].finish_reason is not None
        return all(answer.finish_reason for answer in self.answers)

    @property
    def pooled(self) -> npt.NDArray[np.float32] | None:
        """What a request with PoolingParams asked for, once it is there."""
        first = self.answers[0]
        return first.values if isinstance(first, Pooling) else None

    def output(self) -> RequestOutput:
        """The answers so far, as a caller sees them."""
        first = self.answers[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=[answer.output() for answer in self.answers if isinstance(answer, Completion)],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=first.num_cached or 0,
            pooled=self.pooled,
        )

    @property
    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        first = self.answers[0]
        known = first.prompt_logprobs if isinstance(first, Completion) else None
        return None if known is None else [None, *known]

    def take_delta(self) -> RequestDelta:
        """What the answers have new since the last call."""
        deltas = [delta for answer in self.answers if (delta := answer.take_delta()) is not None]
        return RequestDelta(deltas, self.finished, self.answers[0].request.num_cached or 0, self.pooled)
