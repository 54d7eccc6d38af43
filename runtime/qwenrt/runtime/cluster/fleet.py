"""The replicas of a server, run by Ray Serve: it starts them, replaces lost ones, scales and updates them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, ProxyLocation
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus, LoggingConfig

from qwenrt.plugins import ConfigError

from ..server.errors import ApiError
from ..server.inprocess import ResponseStart
from ..server.run import ServerOptions
from .merged_metrics import MergedMetrics
from .replica import ForwardedRequest, Replica
from .replica_router import PrefixRouter
from .ticket import Ticket

_DEPLOYMENT = "Replica"
_MAX_CONCURRENCY = 100_000
"""A replica bounds its requests itself, and says so in words."""
_MAX_IMBALANCE = 8192
"""Outstanding tokens that a prefix's home may have beyond the least busy replica."""
_POLL_SECONDS = 0.25
_METRICS_SECONDS = 10.0
_ROLL_TIMEOUT = 3600.0
"""Seconds that a replica gets for what it has accepted when another follows it."""


@dataclass(frozen=True, kw_only=True)
class FleetSize:
    """How many replicas there are, and what each occupies."""

    replicas: int
    max_replicas: int
    """If more than `replicas`: how many there may be when requests wait."""
    target_requests: int
    """Requests a replica, above which one more is started."""
    cpus: float
    gpus: int
    surge: bool
    """Whether an update starts a new replica before it ends an old one, which needs room; else it ends one first."""


class Fleet:
    """Replicas of one engine folder. To be used where an event loop runs, inside a `ray_session`.

    name: of the application in Ray Serve; one of that name is replaced. arguments: those of LLM. options: how each serves.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], options: ServerOptions, size: FleetSize) -> None:
        self._name = name
        self._arguments = dict(arguments)
        # Keys are checked before a request comes here; what Ray is told lies in its logs.
        self._options = replace(options, api_keys=(), cors_origins=())
        self._size = size
        self._created = int(time.time())
        self._handle: Any = None
        self._respond: Any = None
        self._aborting: set[asyncio.Task[Any]] = set()
        self._merged = MergedMetrics()

    async def deploy(self, engine: str) -> None:
        """Make all replicas such of the folder at this path, one after the other if there are some already.

        Raises ConfigError if one cannot start; those of before then go on.
        """
        handle = await asyncio.to_thread(self._start, engine)
        if self._handle is None:
            self._handle = handle
            self._respond = handle.options(method_name="respond", stream=True)
        while (status := await asyncio.to_thread(self._status)) is not ApplicationStatus.RUNNING:
            if status is ApplicationStatus.DEPLOY_FAILED:
                raise ConfigError(await asyncio.to_thread(self._failure))
            await asyncio.sleep(_POLL_SECONDS)

    async def respond(self, request: ForwardedRequest, ticket: Ticket) -> AsyncGenerator[ResponseStart | bytes]:
        """The start of a replica's response and then its body in pieces. Closing the generator is the client leaving.

        Raises ApiError if the replica is lost.
        """
        response = self._respond.remote(request, ticket=ticket)
        ended = False
        try:
            async for part in response:
                yield part
            ended = True
        except (RayActorError, grpc.RpcError):
            ended = True
            raise ApiError(
                503, "the replica that worked on this was lost; send it again", code="replica_lost", retry_after=1
            ) from None
        finally:
            if not ended:
                response.cancel()
                self._abort(request.id)

    def _abort(self, request_id: str) -> None:
        """Tell the replica that has a request, whichever it is, to end it: Ray now and then loses the cancelling of a stream."""
        answers = self._handle.broadcast("abort", request_id).results_async(return_exceptions=True)
        task = asyncio.ensure_future(answers)
        self._aborting.add(task)
        task.add_done_callback(self._aborted)

    def _aborted(self, task: asyncio.Task[Any]) -> None:
        self._aborting.remove(task)
        if not task.cancelled():
            task.exception()  # there may be no replica to tell it

    async def ready(self, timeout: float) -> bool:
        """Whether a replica says within so many seconds that it takes requests."""
        request = ForwardedRequest.of("GET", "/ready")
        try:
            async with asyncio.timeout(timeout):
                with Ticket(None, 0) as ticket:
                    async with aclosing(self.respond(request, ticket)) as parts:
                        start = await anext(parts)
                        return isinstance(start, ResponseStart) and start.status == 200
        except (TimeoutError, ApiError):
            return False

    async def metrics(self) -> bytes:
        """The figures of all replicas in Prometheus' text format; raises ApiError if one does not tell them in time."""
        try:
            answers = await self._handle.broadcast("metrics").results_async(
                timeout_s=_METRICS_SECONDS, return_exceptions=True
            )
        except DeploymentUnavailableError:
            answers = []
        except TimeoutError:
            raise ApiError(503, "a replica did not tell its figures in time", retry_after=5) from None
        return self._merged.text(dict(answer for answer in answers if not isinstance(answer, BaseException)))

    async def close(self) -> None:
        """End all replicas."""
        await asyncio.to_thread(serve.delete, self._name)

    def _start(self, engine: str) -> Any:
        size = self._size
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location=ProxyLocation.Disabled)
        number: dict[str, Any] = {"num_replicas": size.replicas}
        if size.max_replicas > size.replicas:
            scaling = AutoscalingConfig(
                min_replicas=size.replicas,
                max_replicas=size.max_replicas,
                target_ongoing_requests=size.target_requests,
            )
            number = {"autoscaling_config": scaling}
        deployment = serve.deployment(
            name=_DEPLOYMENT,
            max_ongoing_requests=_MAX_CONCURRENCY,
            ray_actor_options={"num_cpus": size.cpus, "num_gpus": size.gpus},
            request_router_config={
                "request_router_class": f"{PrefixRouter.__module__}.{PrefixRouter.__name__}",
                "request_router_kwargs": {"max_imbalance": _MAX_IMBALANCE},
            },
            graceful_shutdown_timeout_s=_ROLL_TIMEOUT,
            graceful_shutdown_wait_loop_s=0.2,
            max_surge_percent=max(1, 100 // size.max_replicas) if size.surge else 0,
            max_constructor_retry_count=2,
            **number,
        )(Replica)
        app = deployment.bind(engine, self._arguments, self._options, self._created)
        target = serve.RunTarget(
            app,
            self._name,
            route_prefix=None,
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        return serve.run_many([target], wait_for_applications_running=False)[0]

    def _status(self) -> ApplicationStatus:
        return serve.status().applications[self._name].status

    def _failure(self) -> str:
        """Why a replica did not start: what its engine said, or else what Ray says."""
        message = serve.status().applications[self._name].deployments[_DEPLOYMENT].message
        ours = re.findall(r"^(?:qwenrt\.[\w.]+\.\w+Error): (.+)$", message, re.MULTILINE)
        return str(ours[-1]) if ours else f"a replica did not start: {message}"
