"""Ray Serve's choice of a replica for a request, made by `routing`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..routing import by_prefix
from .ticket import ReplicaLoad, Ticket

_NEVER = 1 << 62
"""More tokens than any replica can have outstanding."""
_VACANCY_SECONDS = 120.0
"""How long the place of a lost replica waits for one that takes it."""


@dataclass
class Place:
    """Where a replica is at home; keys belong to places, so that one that follows a lost replica gets the keys of that alone."""

    replica: ReplicaID
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    vacant_since: float | None = None
    """On `time.monotonic`, when its replica was lost."""


class Places:
    """The replicas in an order that changes as little as it can."""

    def __init__(self) -> None:
        self.all: list[Place] = []

    def update(self, replicas: set[ReplicaID], now: float) -> None:
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

    def choose(self, key: bytes | None, max_imbalance: int) -> Place:
        """The place for a request; one at least must not be vacant."""
        outstanding = [place.load.tokens if place.vacant_since is None else _NEVER for place in self.all]
        return self.all[by_prefix(key, outstanding, max_imbalance)]

    def load_of(self, replica: ReplicaID) -> ReplicaLoad | None:
        """What a replica has to do; None if there is no such replica any more."""
        return next((place.load for place in self.all if place.replica == replica), None)


class PrefixRouter(RequestRouter):
    """Sends a request to its prefix's home, or where there is least to do; calls have a `ticket`, a Ticket, or go anywhere."""

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, *, max_imbalance: int) -> None:  # type: ignore[override]
        """Ray Serve calls it once. max_imbalance: tokens, as `routing.by_prefix` has it."""
        self._max_imbalance = max_imbalance
        self._places = Places()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for the request, and then all, for the case that it does not respond."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._places.update(set(replicas), time.monotonic())
        ticket = _ticket(pending_request)
        place = self._places.choose(None if ticket is None else ticket.key, self._max_imbalance)
        if ticket is not None:
            ticket.charge(place.load)
        return [[replicas[place.replica]], candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ray Serve calls it when a replica has taken the request."""
        ticket, load = _ticket(pending_request), self._places.load_of(replica_id)
        if ticket is not None and load is not None:
            ticket.charge(load)


def _ticket(request: PendingRequest | None) -> Ticket | None:
    return None if request is None else request.kwargs.get("ticket")
