"""Grammars compiled for a vocabulary, and the masks over it that keep an answer to its grammar (by llguidance)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qwenrt.plugins import RequestError

if TYPE_CHECKING:
    import llguidance

    from ..text.tokenizer import Tokenizer

Mask = npt.NDArray[np.bool_]

_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_grammar_size": 30_000}
"""Bounds of llguidance's work: at the most about 1 s for a grammar and 0.1 s for a token, after which it gives up."""
_MAX_CACHED = 32


class Matcher:
    """How far one answer is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Mask:
        """bool [vocab]: which tokens may come next; raises RequestError if that is too hard to tell."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.zeros(self._vocab_size, np.bool_)
        known = min(len(bits) * 8, self._vocab_size)
        allowed[:known] = np.unpackbits(bits, count=known, bitorder="little")
        return allowed

    def accept(self, token_id: int) -> None:
        """Go on by a token, which `allowed` has."""
        self._matcher.consume_token(token_id)
        self._check()

    def copy(self) -> Matcher:
        """Another answer that is as far."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for a tokenizer, in bounded time and memory, and keeps the last ones. Safe for several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._cache: OrderedDict[str, Matcher] = OrderedDict()

    def compile(self, source: str) -> Matcher:
        """The start of a grammar in llguidance's Lark syntax; raises RequestError if it is none or too large."""
        with self._lock:
            start = self._cache.get(source)
            if start is not None:
                self._cache.move_to_end(source)
                return start.copy()
            start = self._compile(source)
            self._cache[source] = start
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
            return start.copy()

    def _compile(self, source: str) -> Matcher:
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = self._load()
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        compiled = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_first_line(compiled.get_error())}")
        start = Matcher(compiled, self._vocab_size)
        # The first mask takes the longest, and some grammars turn out too large only with it.
        start.allowed()
        return start

    def _load(self) -> llguidance.LLTokenizer:
        import llguidance

        wrapper: Any = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_token_ids))
        return llguidance.LLTokenizer(wrapper, eos_token=self._eos_token_ids)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _first_line(message: str) -> str:
    """What of a message of the library tells a user something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:4])[:300]
