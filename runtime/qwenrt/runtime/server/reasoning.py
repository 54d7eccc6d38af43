"""An answer's text split into thinking and answer while it comes."""

from __future__ import annotations

from ..text.thinking import CLOSE, OPEN, Thinking


class ReasoningParser:
    """Splits off a thinking block at the start of an answer; how the text is cut into pieces makes no difference.

    The line feeds that chat models put inside the tags and after the block belong to neither part.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._begun = False
        """Whether any of the part that is being read was given out."""
        self._after_block = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """More text; returns what is new of the thinking and of the answer."""
        self._held += text
        reasoning = ""
        if self._thinking is Thinking.POSSIBLE:
            if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
                return "", ""
            starts = self._held.startswith(OPEN)
            self._thinking = Thinking.OPEN if starts else Thinking.NONE
            self._held = self._held.removeprefix(OPEN)
        if self._thinking is Thinking.OPEN:
            reasoning = self._take_reasoning()
        return reasoning, self._take_answer() if self._thinking is Thinking.NONE else ""

    def finish(self) -> tuple[str, str]:
        """The text ends here; returns what was held back."""
        held, self._held = self._held, ""
        if self._thinking is Thinking.OPEN:
            return held.rstrip("\n"), ""
        return "", held

    def _take_reasoning(self) -> str:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._thinking, self._after_block, self._held = Thinking.NONE, True, after
            return before.rstrip("\n")
        end = len(before) - partial_suffix(before, CLOSE)
        end = len(before[:end].rstrip("\n"))
        self._held = before[end:]
        self._begun = self._begun or end > 0
        return before[:end]

    def _take_answer(self) -> str:
        if self._after_block:
            self._held = self._held.lstrip("\n")
            self._after_block = not self._held
        answer, self._held = self._held, ""
        return answer


def partial_suffix(text: str, tag: str) -> int:
    """How many characters at the end of `text`, which does not contain `tag`, may be the beginning of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
