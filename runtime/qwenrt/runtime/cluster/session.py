"""A connection to Ray, and how its CPUs are shared out."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qwenrt.plugins import ConfigError

from ..engine_dir import EngineManifest

LOCAL = "local"
"""The address that means: start Ray on this machine."""

_OBJECT_STORE_BYTES = 256 << 20
_START_TRIES = 3


@contextmanager
def ray_session(address: str) -> Iterator[None]:
    """Be connected to the Ray cluster at `address`; if that is "local", to one on this machine, which ends with the block.

    A local one serves this process alone, and listens on the loopback device, but for the replicas of Ray Serve. Ray reports its
    usage to nobody. Raises ConfigError if no Ray is there, or it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray Serve reads it when it is imported: requests are routed by the loop that forwards them, not by a thread beside it.
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "0"
    if address == LOCAL:
        # Ray takes a machine without clusters for one whose only address is 127.0.0.1. It reads this when it is imported.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Engines are what this machine is for: Ray would let all else on it go first.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        # A piece of a replica's stream costs 0.4 instead of 1.2 ms without Ray's objects and a thread between. Among several
        # machines they are left in: Ray notices when one is gone.
        os.environ["RAY_SERVE_USE_GRPC_BY_DEFAULT"] = "1"
        os.environ["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] = "0"
        # Replicas of Ray Serve listen on every device, for calls that can run anything: let in those alone that know a secret.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}; install it with: pip install 'qwenrt[ray]'") from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address == LOCAL:
            _start_ray()
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises this very class when its processes do not start in time
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if address == LOCAL:
            raise ConfigError(f"Ray did not start on this machine ({reason}); is it too busy? Try again") from None
        raise ConfigError(f"no Ray cluster answers at {address} ({reason}); give its address, or local") from None
    try:
        yield
    finally:
        ray.shutdown()


def _start_ray() -> None:
    """Start Ray on this machine. It gives its processes half a minute, which a busy machine may not make the first time."""
    import ray

    for tries_left in range(_START_TRIES - 1, -1, -1):
        try:
            ray.init(
                address=LOCAL,
                num_cpus=len(os.sched_getaffinity(0)),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception:
            ray.shutdown()
            if not tries_left:
                raise


def cluster_cpus() -> list[float]:
    """The CPUs that each node of the cluster has for Ray."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]


def cluster_gpus() -> float:
    """The GPUs that the cluster has for Ray."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def threads_for(engines: int, cpus: Sequence[float]) -> int:
    """The most compute threads that each of so many engines can have on nodes with these CPUs without sharing one.

    Raises ConfigError if there are more engines than CPUs.
    """
    for threads in range(int(max(cpus, default=0)), 0, -1):
        if sum(int(node // threads) for node in cpus) >= engines:
            return threads
    raise ConfigError(f"{engines} engines need a CPU each, and the Ray cluster has {int(sum(cpus))}; run fewer")


def gpus_for(manifest: EngineManifest, arguments: Mapping[str, Any]) -> int:
    """How many GPUs an engine occupies that is loaded with these arguments of LLM."""
    device, backend = arguments.get("device"), arguments.get("backend")
    if device is not None:
        return int(device.startswith("cuda"))
    return int(backend == "tensorrt" or (backend is None and manifest.target != "onnxruntime"))
