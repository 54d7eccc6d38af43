"""A worker of a batch job: an engine in an actor of its own.

Actors of Ray's core rather than of Ray Data: Data's unit of work is a block, so that a lost actor would cost every row of its
block, done or not. Here the job itself knows which rows a worker has, and those alone are given to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ..async_llm import UnavailableError
from ..batch import Answer, EngineWorker, WorkerLostError
from ..llm import LLM

_MAX_CONCURRENCY = 100_000


class _EngineActor:
    """What runs in the actor's process."""

    async def load(self, engine: str, arguments: dict[str, Any], model: str) -> int:
        """Load the engine; returns how many rows it should have at a time."""
        llm = await asyncio.to_thread(LLM, engine, **arguments)
        self._worker = EngineWorker(llm, model)
        return self._worker.capacity

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the response."""
        answer = await self._worker.answer(url, body)
        return answer.status, answer.body


class RayWorker:
    """An engine somewhere in the cluster.

    engine: path of the engine folder there. arguments: those of LLM; `threads` of them are the CPUs that it occupies. model: what
    rows may call it. gpus: how many it occupies.
    """

    def __init__(self, engine: str, arguments: Mapping[str, Any], model: str, *, gpus: int = 0) -> None:
        self.capacity = 1
        self._load = (engine, dict(arguments), model)
        self._class = ray.remote(_EngineActor).options(
            num_cpus=arguments["threads"], num_gpus=gpus, max_restarts=0, max_concurrency=_MAX_CONCURRENCY
        )
        self._actor: Any = None

    async def start(self) -> None:
        """Start an actor and load the engine in it; raises what the engine does, and WorkerLostError if the actor is lost."""
        self._kill()
        self._actor = self._class.remote()
        try:
            self.capacity = await self._actor.load.remote(*self._load)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise WorkerLostError(f"a worker was lost while it loaded the engine: {_first_line(error)}") from None

    async def answer(self, url: str, body: bytes) -> Answer:
        """Answer a request; raises WorkerLostError if the actor, its node or its engine is lost."""
        try:
            status, answer = await self._actor.answer.remote(url, body)
        except RayTaskError as error:
            if isinstance(error.cause, UnavailableError):
                raise WorkerLostError(str(error.cause)) from None
            raise error.cause from None
        except RayError as error:
            raise WorkerLostError(_first_line(error)) from None
        return Answer(status, answer)

    async def close(self) -> None:
        """End the actor."""
        self._kill()

    def _kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
