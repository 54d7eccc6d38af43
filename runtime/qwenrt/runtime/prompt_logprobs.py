"""Log-probabilities of a prompt's own tokens, from rows of logits that a step gives for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import RequestError

from .outputs import TokenLogprobs
from .request import Chunk, Request
from .sampling.sampler import token_logprobs

Floats = npt.NDArray[np.float32]
Scored = dict[Request, list[TokenLogprobs] | RequestError]
"""By request, its prompt tokens that follow those of a chunk, or why they have no log-probability."""


def score_prompts(logits: Floats, chunks: Sequence[Chunk]) -> tuple[Floats, Scored]:
    """Take the rows of prompts out of a step's `logits` [R, vocab]: the rows to sample from, and what the others say."""
    if all(chunk.request.prompt_logprobs is None for chunk in chunks):
        return logits, {}
    to_sample, scored, row = np.ones(len(logits), bool), Scored(), 0
    for chunk in chunks:
        request, count = chunk.request, chunk.request.prompt_logprobs
        if count is not None:
            # The prompt's last token is followed by none of its own.
            following = request.token_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
            rows = slice(row, row + len(following))
            scored[request] = _scores(logits[rows], following, count)
            to_sample[rows] = False
        row += chunk.num_logits
    return logits[to_sample], scored


def _scores(rows: Floats, token_ids: Sequence[int], count: int) -> list[TokenLogprobs] | RequestError:
    try:
        return [token_logprobs(row, token, count) for row, token in zip(rows, token_ids, strict=True)]
    except RequestError as error:
        return error
