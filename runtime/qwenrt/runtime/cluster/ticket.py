"""What routing has to know of a request, and what it keeps of a replica."""

from __future__ import annotations

from types import TracebackType


class ReplicaLoad:
    """How much a replica has to do."""

    def __init__(self) -> None:
        self.tokens = 0
        """Outstanding: of the prompts and answers that it was given and has not ended."""


class Ticket:
    """A request's claim on a replica: a context that gives it back, whatever becomes of the request.

    key: as `routing.prefix_key` gives it. tokens: of the prompt and of the answer, as far as can be told beforehand.
    """

    def __init__(self, key: bytes | None, tokens: int) -> None:
        self.key = key
        self.tokens = tokens
        self._load: ReplicaLoad | None = None
        self._over = False

    def charge(self, load: ReplicaLoad) -> None:
        """Count the request as this replica's, and as no other's."""
        self._refund()
        if not self._over:
            load.tokens += self.tokens
            self._load = load

    def _refund(self) -> None:
        if self._load is not None:
            self._load.tokens -= self.tokens
            self._load = None

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._refund()

    def __reduce__(self) -> tuple[type[Ticket], tuple[bytes | None, int]]:
        # A replica gets a copy that counts nowhere.
        return Ticket, (self.key, self.tokens)
