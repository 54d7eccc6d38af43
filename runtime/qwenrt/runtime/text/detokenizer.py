"""Tokens to text while they come: never half a character, never text that a stop string is about to take back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from ..sampling.params import SamplingParams
from .stops import StopMatcher, stop_matcher
from .tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of a growing token sequence; all pieces joined are what `Tokenizer.decode` gives for the whole.

    One difference: Llama 2's tokenizer leaves out the space that a text begins with, and what is generated begins no text.

    Holds back at most the three bytes of a character that is not complete; bytes that can be no character come out at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        spelled = [self._tokenizer.token_bytes(token) for token in token_ids if token not in self._skipped]
        return self._decoder.decode(b"".join(spelled))

    def finish(self) -> str:
        """The last text: U+FFFD if a character was left incomplete. Nothing may be pushed after."""
        return self._decoder.decode(b"", final=True)


class OutputText:
    """The text of one answer, which ends at the first stop string to be completed (of two completed at once, the longer).

    Where the text is cut does not depend on how it is split into tokens, except that a stop string completed by one of the first
    `min_tokens` tokens does not count. Where no stop string is looked for, tokens become text when it is asked for.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        stops = tuple(params.stop)
        self._matcher: StopMatcher | None = stop_matcher(stops) if stops else None
        self._state = 0
        self._keeps_stop = params.include_stop_str_in_output
        self._unchecked = params.min_tokens
        self._tokens: list[int] = []
        """Those that are no text yet."""
        self._text = ""
        self._new: list[str] = []
        self._untaken: list[str] = []
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completes, after which nothing may be pushed."""
        assert not self._ended, "a token after the end of the text"
        if self._matcher is None:
            self._tokens.append(token_id)
            return None
        self._unchecked -= 1
        return self._add(self._detokenizer.push((token_id,)), self._matcher)

    def finish(self) -> None:
        """Release what was held back: the text goes no further."""
        if self._ended:
            return
        self._decode()
        self._show(self._held + self._detokenizer.finish())
        self._ended = True

    @property
    def text(self) -> str:
        """The text so far that no stop string can take back."""
        self._decode()
        if self._new:
            self._text += "".join(self._new)
            self._new.clear()
        return self._text

    def take_delta(self) -> str:
        """What `text` has more than at the last call."""
        self._decode()
        delta = "".join(self._untaken)
        self._untaken.clear()
        return delta

    def _decode(self) -> None:
        if self._tokens:
            self._show(self._detokenizer.push(self._tokens))
            self._tokens.clear()

    def _add(self, new: str, matcher: StopMatcher) -> str | None:
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            self._state = matcher.step(self._state, text[end - 1])
            length = matcher.found[self._state]
            if length and self._unchecked < 0:
                self._show(text[: end if self._keeps_stop else end - length])
                self._held = ""
                self._ended = True
                return text[end - length : end]
        sure = len(text) - matcher.depth[self._state]
        self._show(text[:sure])
        self._held = text[sure:]
        return None

    def _show(self, text: str) -> None:
        if text:
            self._new.append(text)
            self._untaken.append(text)
