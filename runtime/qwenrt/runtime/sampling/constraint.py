"""What may come next in an answer that has a form or a bounded thinking block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from ..text.thinking import CLOSE, Thinking, ThinkingTokens
from ..text.tokenizer import Tokenizer
from .grammar import Matcher
from .processors import Floats


class Constraint:
    """Masks the logits of one answer: `mask` before each token is chosen, `accept` after.

    A thinking block is free until it has `thinking_budget` tokens and is then closed. The grammar begins after it. Where the
    prompt leaves open whether the model thinks, `<think>` is allowed beside what the grammar begins with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        *,
        thinking_budget: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = ThinkingTokens.of(tokenizer)
        self._thinking = Thinking.NONE if self._tokens is None else self._tokens.after(prompt_token_ids)
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._budget = thinking_budget
        self._matcher = matcher
        self._num_thought = 0
        self._forced: deque[int] = deque()
        if self._thinking is Thinking.OPEN:
            self._close_if_spent()

    def mask(self, logits: Floats) -> None:
        """Set the logits [vocab] of all tokens that may not come next to minus infinity, in place."""
        if self._forced:
            kept = logits[self._forced[0]]
            logits.fill(-np.inf)
            # What the model holds for impossible is forced all the same.
            logits[self._forced[0]] = kept if np.isfinite(kept) else 0.0
        elif self._matcher is None:
            return
        elif self._thinking is Thinking.OPEN:
            logits[self._eos] = -np.inf
        else:
            allowed = self._matcher.allowed()
            if self._thinking is Thinking.POSSIBLE:
                assert self._tokens is not None
                allowed[self._tokens.open] = True
            logits[~allowed] = -np.inf

    def accept(self, token_id: int) -> None:
        """Go on by the token that was chosen; raises RequestError if the grammar cannot be followed further."""
        tokens = self._tokens
        if self._forced:
            self._forced.popleft()
        elif self._thinking is Thinking.OPEN:
            self._num_thought += 1
            if tokens is not None and token_id == tokens.close:
                self._thinking = Thinking.NONE
                if self._matcher is not None:
                    # Chat models go on with an empty line, which is no part of the answer.
                    self._forced.extend(self._tokenizer.encode("\n\n", add_special_tokens=False))
            else:
                self._close_if_spent()
        elif self._thinking is Thinking.POSSIBLE and tokens is not None and token_id == tokens.open:
            self._thinking = Thinking.OPEN
            self._close_if_spent()
        else:
            self._thinking = Thinking.NONE
            if self._matcher is not None and token_id not in self._eos:
                self._matcher.accept(token_id)

    def _close_if_spent(self) -> None:
        if self._budget is not None and self._num_thought >= self._budget:
            self._thinking = Thinking.NONE
            self._forced.extend(self._tokenizer.encode(f"\n{CLOSE}\n\n", add_special_tokens=False))
