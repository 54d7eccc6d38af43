"""One answer while it grows: tokens become text, and text or tokens end it. Or what is wanted is one row of logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .outputs import CompletionDelta, CompletionOutput, TokenLogprobs
from .request import Request
from .sampling.params import SamplingParams
from .sampling.sampler import SampledToken
from .text.detokenizer import OutputText
from .text.tokenizer import Tokenizer


class Completion:
    """The output side of a Request that is sampled with `params`."""

    def __init__(
        self,
        index: int,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._text = OutputText(tokenizer, params)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._endings = self._eos_token_ids | set(params.stop_token_ids)
        self._num_tokens = 0
        self._cumulative_logprob = 0.0
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        """Of the prompt's tokens from the second on."""
        self._untold_prompt = self.prompt_logprobs
        self._num_taken = 0
        self._taken_whole = False

    def append_prompt(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Take those of the prompt's tokens from `start` + 1 on; a preempted request comes to them again."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[start:] = logprobs

    def append(self, sampled: SampledToken) -> None:
        """Take the next of the request's tokens; sets `finish_reason` if it is the last."""
        self._num_tokens += 1
        if self._logprobs is not None:
            assert sampled.logprob is not None
            self._cumulative_logprob += sampled.logprob
            self._logprobs.append(TokenLogprobs(sampled.token_id, sampled.logprob, sampled.top_logprobs or {}))
        token = sampled.token_id
        if token in self._endings:
            if self._params.include_stop_str_in_output:
                self._text.push(token)
            self.finish("stop", None if token in self._eos_token_ids else token)
        elif (stop := self._text.push(token)) is not None:
            self.finish("stop", stop)
        elif self._num_tokens >= self.request.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the answer and release the text that was held back."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._text.finish()

    def output(self) -> CompletionOutput:
        """The answer so far, as a caller sees it."""
        first = self.request.num_prompt
        return CompletionOutput(
            index=self.index,
            text=self._text.text,
            token_ids=self.request.token_ids[first : first + self._num_tokens],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def take_delta(self) -> CompletionDelta | None:
        """What is new since the last call; None if nothing is."""
        if self._taken_whole or (self._num_tokens == self._num_taken and self.finish_reason is None):
            return None
        first, self._num_taken = self._num_taken, self._num_tokens
        self._taken_whole = self.finish_reason is not None
        prompt_logprobs, self._untold_prompt = self._untold_prompt, None
        start = self.request.num_prompt
        return CompletionDelta(
            index=self.index,
            text=self._text.take_delta(),
            token_ids=self.request.token_ids[start + first : start + self._num_tokens],
            logprobs=None if self._logprobs is None else self._logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_logprobs=prompt_logprobs,
        )


class Pooling:
    """The output side of a Request of which the last token's logits are wanted, those in `columns` or all."""

    def __init__(self, request: Request, columns: tuple[int, ...] | None) -> None:
        self.request = request
        self.values: npt.NDArray[np.float32] | None = None
        self.finish_reason: str | None = None
        self._columns = None if columns is None else list(columns)

    def take(self, logits: npt.NDArray[np.float32]) -> None:
        """Keep what is wanted of a row, which ends the request."""
        self.values = logits.copy() if self._columns is None else logits[self._columns]
        self.finish("stop")

    def take_delta(self) -> None:
        """Nothing: no text comes of it."""

    def finish(self, reason: str, stop_reason: str | None = None) -> None:
        """End the request."""
        self.finish_reason = reason
