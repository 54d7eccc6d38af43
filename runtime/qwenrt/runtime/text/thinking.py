"""Thinking blocks, `<think>...</think>`: what the end of a prompt says about the answer's beginning."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

TURN = "<|im_start|>"
OPEN = "<think>"
CLOSE = "</think>"


class Thinking(enum.Enum):
    """Where an answer begins."""

    NONE = "none"
    """After thinking, or the model or the prompt knows none: the answer is the answer."""
    POSSIBLE = "possible"
    """A turn begins: a thinking block may come first."""
    OPEN = "open"
    """Inside a thinking block that the prompt opened."""


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The token ids that a tokenizer has for thinking, and for the beginning of a turn."""

    turn: int
    open: int
    close: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThinkingTokens | None:
        """Those of a tokenizer; None if it lacks one of them."""
        turn, opening, closing = (tokenizer.token_id(text) for text in (TURN, OPEN, CLOSE))
        if turn is None or opening is None or closing is None:
            return None
        return cls(turn, opening, closing)

    def after(self, prompt_token_ids: Sequence[int]) -> Thinking:
        """Where the answer to a prompt begins, by the last turn that the prompt begins."""
        for token in reversed(prompt_token_ids):
            if token == self.close:
                return Thinking.NONE
            if token == self.open:
                return Thinking.OPEN
            if token == self.turn:
                return Thinking.POSSIBLE
        return Thinking.NONE


def thinking_after(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> Thinking:
    """Where the answer to a prompt begins; NONE for a tokenizer that has no tokens for thinking."""
    tokens = ThinkingTokens.of(tokenizer)
    return Thinking.NONE if tokens is None else tokens.after(prompt_token_ids)
