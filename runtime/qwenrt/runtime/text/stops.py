"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

import functools
from collections import deque


class StopMatcher:
    """All stop strings of a request as one automaton (Aho and Corasick, 1975): a character costs the same for 1 stop or 1,000."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._fallback = [0]
        self.depth = [0]
        """Per state, how many characters at the end of the text may still become a stop string."""
        self.found = [0]
        """Per state, the length of the longest stop string that the text ends with; 0 if none."""
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            child = self._next.get((state, char))
            if child is None:
                child = len(self.depth)
                self._next[state, char] = child
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
            state = child
        self.found[state] = len(stop)

    def _link(self) -> None:
        children: list[list[tuple[str, int]]] = [[] for _ in self.depth]
        for (state, char), child in self._next.items():
            children[state].append((char, child))
        queue = deque(child for _, child in children[0])
        while queue:
            state = queue.popleft()
            for char, child in children[state]:
                self._fallback[child] = self.step(self._fallback[state], char)
                self.found[child] = self.found[child] or self.found[self._fallback[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next.get((state, char))
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]


@functools.lru_cache(maxsize=32)
def stop_matcher(stops: tuple[str, ...]) -> StopMatcher:
    """The matcher for these stop strings, shared by the answers of a request."""
    return StopMatcher(stops)
