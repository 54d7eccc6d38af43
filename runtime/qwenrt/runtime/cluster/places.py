"""Where prefixes are at home while replicas come and go."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..routing import by_prefix
from .ticket import ReplicaLoad

Replica = TypeVar("Replica", bound=Hashable)

_NEVER = 1 << 62
"""More tokens than any replica can have outstanding."""
_VACANCY_SECONDS = 120.0
"""How long the place of a lost replica waits for one that takes it."""


@dataclass
class Place(Generic[Replica]):
    """Where a replica is at home; keys belong to places, so that one that follows a lost replica gets the keys of that alone."""

    replica: Replica
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    vacant_since: float | None = None
    """On `time.monotonic`, when its replica was lost."""


class Places(Generic[Replica]):
    """The replicas in an order that changes as little as it can."""

    def __init__(self) -> None:
        self.all: list[Place[Replica]] = []

    def update(self, replicas: set[Replica], now: float) -> None:
        """Take note of which replicas there are."""
        known = {place.replica for place in self.all}
        new = sorted((replica for replica in replicas if replica not in known), key=str)
        for index, place in enumerate(self.all):
            if place.replica in replicas:
                place.vacant_since = None
            elif new:
                self.all[index] = Place(new.pop(0))
            elif place.vacant_since is None:
                place.vacant_since = now
        self.all.extend(map(Place, new))
        for index in reversed(range(len(self.all))):
            since = self.all[index].vacant_since
            if since is not None and now - since > _VACANCY_SECONDS:
                last = self.all.pop()
                if index < len(self.all):
                    self.all[index] = last

    def choose(self, key: bytes | None, max_imbalance: int) -> Place[Replica]:
        """The place for a request; one at least must not be vacant."""
        outstanding = [place.load.tokens if place.vacant_since is None else _NEVER for place in self.all]
        return self.all[by_prefix(key, outstanding, max_imbalance)]

    def load_of(self, replica: Replica) -> ReplicaLoad | None:
        """What a replica has to do; None if there is no such replica any more."""
        return next((place.load for place in self.all if place.replica == replica), None)
