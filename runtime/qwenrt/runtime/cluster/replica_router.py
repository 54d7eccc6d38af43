"""Ray Serve's choice of a replica for a request, made by `routing`."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .places import Places
from .ticket import Ticket


class PrefixRouter(RequestRouter):
    """Sends a request to its prefix's home, or where there is least to do; calls have a `ticket`, a Ticket, or go anywhere."""

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, *, max_imbalance: int) -> None:  # type: ignore[override]
        """Ray Serve calls it once. max_imbalance: tokens, as `routing.by_prefix` has it."""
        self._max_imbalance = max_imbalance
        self._places: Places[ReplicaID] = Places()

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
