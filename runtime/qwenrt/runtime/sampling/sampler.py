"""The sampler: one state per sequence, one call per step for all rows of logits."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from qwenrt.plugins import RequestError
from qwenrt.plugins.row_sampling import GREEDY, describe_row, sample_rows, sampling_rule

from ..outputs import TokenLogprobs
from .constraint import Constraint
from .params import SamplingParams
from .processors import Floats, Penalties

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class SampledToken(NamedTuple):
    """A token, and its log-probability (nats) where the request asked for log-probabilities.

    Log-probabilities are those of the model's own distribution, before any processing; finite, -9999.0 at the least.
    """

    token_id: int
    logprob: float | None
    top_logprobs: dict[int, float] | None
    """The most likely tokens, most likely first."""


@functools.cache
def _without_logprobs(token_id: int) -> SampledToken:
    """One object for all times that a token is drawn, since every sequence draws one in every step."""
    return SampledToken(token_id, None, None)


class SequenceSampler:
    """The sampling state of one sequence: its random generator, how many tokens it has, and which.

    What it draws depends on the logits, (seed, index) and the number of tokens drawn before, on nothing else.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        index: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._constraint = constraint
        self.num_generated = 0
        self._held_back = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        """Tokens that cannot be taken before `min_tokens`."""
        self.rule = GREEDY
        """How a row's token is chosen once it is processed."""
        self.uniform = 0.0
        """The number in [0, 1) that the next token is drawn with."""
        self._random: Callable[[], float] | None = None
        if not params.greedy:
            self.rule = sampling_rule(
                temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p
            )
            entropy = None if params.seed is None else params.seed % 2**64
            bits = np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=(index,)))
            self._random = np.random.Generator(bits).random
            self.uniform = self._random()
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._in_step: list[SampledToken] = []
        self._drawn: deque[SampledToken] = deque()
        """Tokens of a step that was undone: the sampler has gone past them, the request has not."""
        self._penalties: Penalties | None = None
        if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
            self._penalties = Penalties(
                prompt_token_ids,
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
        self._logprobs: _RawLogprobs | None = None
        self._plain = params.logprobs is None and not bias and self._penalties is None and constraint is None
        self.processes = not self._plain or params.min_tokens > 0
        """Whether `process` has anything to do with the next row."""

    @property
    def replays(self) -> bool:
        """Whether the next token is known: the request was there before."""
        return bool(self._drawn)

    def process(self, logits: Floats) -> None:
        """All that can change which token is the most likely, in place; raises RequestError if no token can be taken."""
        if self._drawn:
            return
        with np.errstate(over="ignore"):
            if self.params.logprobs is not None:
                # Of what comes below, only min_tokens leaves the logits of tokens that can be taken as they were.
                changes = len(self._bias_ids) > 0 or self._penalties is not None or self._constraint is not None
                self._logprobs = _RawLogprobs(logits.copy() if changes else logits, self.params.logprobs)
            if self.num_generated < self.params.min_tokens:
                logits[self._held_back] = -np.inf
            if len(self._bias_ids):
                logits[self._bias_ids] += self._bias
            if self._penalties is not None:
                self._penalties.apply(logits)
            if self._constraint is not None:
                self._constraint.mask(logits)

    def take(self, token_id: int) -> SampledToken:
        """Go on by the token that `rule` and `uniform` chose from the processed row; raises RequestError if it leads nowhere."""
        token = self._drawn.popleft() if self._drawn else self._accept(token_id)
        self._in_step.append(token)
        return token

    def commit(self) -> None:
        """The tokens taken since the last commit or rollback are the request's."""
        self._in_step.clear()

    def rollback(self) -> None:
        """They are not: take them again."""
        self._drawn.extendleft(reversed(self._in_step))
        self._in_step.clear()

    def _accept(self, token_id: int) -> SampledToken:
        self.num_generated += 1
        if self._random is not None:
            self.uniform = self._random()
        if self._plain:
            self.processes = self.num_generated < self.params.min_tokens
            return _without_logprobs(token_id)
        if self._penalties is not None:
            self._penalties.record(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)
        if self._logprobs is None:
            return _without_logprobs(token_id)
        return SampledToken(token_id, self._logprobs.of(token_id), self._logprobs.top)


def _no_token(peak: np.float32) -> RequestError:
    """Why a row whose largest logit is `peak` cannot be sampled."""
    if peak == -np.inf:
        return RequestError(
            "no token is left to sample: every logit is -inf after logit_bias, min_tokens and structured_outputs; loosen them"
        )
    return RequestError(
        f"the model gave {peak} as a logit, so no token can be sampled; use an engine with a wider dtype"
    )


class _RawLogprobs:
    """Log-probabilities of a row of logits [vocab] as the model gave it, and the `count` highest; `logits` stay the caller's."""

    def __init__(self, logits: Floats, count: int) -> None:
        self._log_sum, top = describe_row(logits, count)
        if math.isnan(self._log_sum):
            raise _no_token(logits.max())
        self._logits = logits
        self.top = {token_id: self.of(token_id) for token_id in top}

    def of(self, token_id: int) -> float:
        """Log-probability of a token, nats."""
        return max(float(self._logits[token_id]) - self._log_sum, LOWEST_LOGPROB)


def token_logprobs(logits: Floats, token_id: int, count: int) -> TokenLogprobs:
    """Log-probability of a token in a row of logits [vocab], and the `count` highest; raises RequestError if it is not finite."""
    raw = _RawLogprobs(logits, count)
    return TokenLogprobs(token_id, raw.of(token_id), raw.top)


def sample(logits: Floats, samplers: Sequence[SequenceSampler]) -> list[SampledToken | RequestError]:
    """Take one token per sequence from `logits` float32 [R, vocab], row i for `samplers[i]`; `logits` may be overwritten.

    A row from which no token can be taken (not finite, or everything masked) gives its RequestError in that place and leaves
    the others alone; its sampler's state is unchanged.
    """
    assert len(logits) == len(samplers)
    failed: dict[int, RequestError] = {}
    for index, sampler in enumerate(samplers):
        if sampler.processes:
            try:
                sampler.process(logits[index])
            except RequestError as error:
                failed[index] = error
    tokens = sample_rows(logits, [sampler.rule for sampler in samplers], [sampler.uniform for sampler in samplers])
    results: list[SampledToken | RequestError] = []
    for index, (sampler, token_id) in enumerate(zip(samplers, tokens, strict=True)):
        if token_id < 0 and not sampler.replays:
            failed.setdefault(index, _no_token(logits[index].max()))
        try:
            results.append(failed[index] if index in failed else sampler.take(token_id))
        except RequestError as error:
            results.append(error)
    return results


def sample_checking_drafts(
    logits: Floats, samplers: Sequence[SequenceSampler], drafts: Sequence[Sequence[int]]
) -> list[list[SampledToken] | RequestError]:
    """`sample` where sequence i owns the next 1 + len(drafts[i]) rows: after its last token and after each of its drafts.

    A row is drawn from only if every draft before it was drawn, so the tokens are those that would be drawn without drafts, one
    at least. Where a later row fails, the tokens before it stand: the next step meets that row again.
    """
    if not any(drafts):
        return [one if isinstance(one, RequestError) else [one] for one in sample(logits, samplers)]
    first = np.cumsum([0, *(1 + len(guesses) for guesses in drafts)])
    assert len(logits) == first[-1]
    results: list[list[SampledToken] | RequestError] = [[] for _ in samplers]
    active, depth = list(range(len(samplers))), 0
    while active:
        rows = logits if len(active) == len(logits) else logits[first[active] + depth]
        agreeing = []
        for index, one in zip(active, sample(rows, [samplers[index] for index in active]), strict=True):
            so_far = results[index]
            assert isinstance(so_far, list)
            if isinstance(one, RequestError):
                results[index] = so_far or one
                continue
            so_far.append(one)
            if depth < len(drafts[index]) and drafts[index][depth] == one.token_id:
                agreeing.append(index)
        active, depth = agreeing, depth + 1
    return results
