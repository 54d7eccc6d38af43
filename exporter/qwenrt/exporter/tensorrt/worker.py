"""Builds one plan in a process of its own: what ends TensorRT ends this process, and its caller can say so.

    python -m qwenrt.exporter.tensorrt.worker < request

The request is a JSON object on one line, the fields of `Request`. On stdout come JSON objects, one a line: {"phase": name,
"done": n, "total": n}, {"log": line, "error": bool}, and at the end {"built": {...}} or {"failed": reason}.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from qwenrt.plugins import ConfigError
from qwenrt.plugins.tensorrt_module import import_tensorrt, plan_file, set_compute_capability

from ..safetensors_file import SafetensorsFile

_FORGET_SECONDS = 0.1
_TELL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")

Send = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to build from which files.

    compute_capability: for target tensorrt, that of the GPU in this machine. timing_caches: a folder. profiles: of each, the
    sizes (min, opt, max) by the names of dimensions.
    """

    target: str
    graph: str
    weights: str
    plan: str
    plugin_library: str
    network_name: str
    compute_capability: str
    strip_weights: bool
    timing_caches: str
    profiles: list[dict[str, tuple[int, int, int]]]


def main() -> int:
    """Serve the request on stdin; returns the exit status."""
    _die_with_parent()
    send = _sender(_take_stdout())
    try:
        send(built=_build(Request(**json.loads(sys.stdin.readline())), send))
    except (ConfigError, OSError) as error:
        send(failed=str(error))
        return 1
    return 0


def _build(request: Request, send: Send) -> dict[str, Any]:
    trt = import_tensorrt(request.target)
    log = _make_log(trt, send)
    builder = trt.Builder(log)
    registry = trt.get_plugin_registry()
    plugin = registry.load_library(request.plugin_library)
    if plugin is None:
        raise ConfigError(f"the plugin library {request.plugin_library} does not load")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.name = request.network_name
    weights = SafetensorsFile(Path(request.weights))
    copies = _parse(trt, network, log, Path(request.graph), weights)
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    set_compute_capability(trt, config, request.compute_capability)
    if request.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.progress_monitor = _make_monitor(trt, send)
    for sizes in request.profiles:
        if config.add_optimization_profile(_profile(builder, network, sizes)) < 0:
            raise ConfigError(f"TensorRT does not take the profile {sizes}: {log.first_error}")
    cache = None
    if request.target == "tensorrt":
        name = plan_file(request.target, request.compute_capability, trt.__version__)
        cache = TimingCache(config, Path(request.timing_caches) / name)
    with _forgetting(weights):
        _build_to_file(trt, builder, network, config, log, Path(request.plan))
    del copies
    if cache is not None:
        cache.keep()
    return {"tensorrt_version": trt.__version__, "activation_bytes": log.activation_bytes}


def _parse(trt: Any, network: Any, log: Any, graph: Path, weights: SafetensorsFile) -> list[Any]:
    """Read the graph into the network; its weights stay where the file is mapped.

    Returns what must live until the plan is built: copies of weights that begin where another one does, as a tied head's rows of
    rank 0 do, for TensorRT takes equal addresses for equal weights.
    """
    import onnx

    parser = trt.OnnxParser(network, log)
    model = graph.read_bytes()
    seen: set[int] = set()
    copies = []
    read = parser.load_model_proto(model, str(graph))
    for tensor in onnx.load_model_from_string(model).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        data = weights.raw(int(place["offset"]), int(place["length"]))
        if data.ctypes.data in seen:
            data = data.copy()
            copies.append(data)
        seen.add(data.ctypes.data)
        read = read and parser.load_initializer(tensor.name, data.ctypes.data, data.nbytes)
    if not (read and parser.parse_model_proto()):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise ConfigError(
            f"the ONNX parser does not take {graph}: {log.first_error or '; '.join(errors) or 'it does not say why'}"
        )
    return copies


def _profile(builder: Any, network: Any, sizes: dict[str, tuple[int, int, int]]) -> Any:
    """An optimisation profile from the ranges of named dimensions."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        value = network.get_input(index)
        ranges = [
            sizes[value.get_dimension_name(axis)] if size < 0 else (size, size, size)
            for axis, size in enumerate(value.shape)
        ]
        profile.set_shape(value.name, *zip(*ranges, strict=True))
    return profile


def _build_to_file(trt: Any, builder: Any, network: Any, config: Any, log: Any, path: Path) -> None:
    """Build the plan; it is never whole in memory where the library can write it in parts."""
    with path.open("xb") as file:
        if hasattr(builder, "build_serialized_network_to_stream"):
            writer = _make_writer(trt, file)
            built = builder.build_serialized_network_to_stream(network, config, writer)
            if writer.error is not None:
                raise writer.error
        else:
            plan = builder.build_serialized_network(network, config)
            built = plan is not None
            if built:
                file.write(memoryview(plan))
    if not built:
        raise ConfigError(log.first_error or "it does not say why")


class TimingCache:
    """How fast kernels were in earlier builds of this TensorRT on this GPU: what was timed once is not timed again."""

    def __init__(self, config: Any, path: Path) -> None:
        self._config = config
        self._path = path
        for data in (path.read_bytes() if path.is_file() else b"", b""):
            # One that is damaged is not taken.
            cache = config.create_timing_cache(data)
            if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
                break

    def keep(self) -> None:
        """Write what is known now, in one step; a folder that cannot be written only means to time again."""
        partial = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(memoryview(self._config.get_timing_cache().serialize()))
            partial.replace(self._path)


@contextlib.contextmanager
def _forgetting(weights: SafetensorsFile) -> Iterator[None]:
    """Let the kernel take back the mapped pages that the builder has read: they come from the file again if they are wanted."""
    done = threading.Event()

    def forget() -> None:
        while not done.wait(_FORGET_SECONDS):
            for name in weights.tensors:
                weights.forget(name)

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _make_log(trt: Any, send: Send) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Sends warnings and errors, and keeps what else is wanted of the lines."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.first_error = ""
            self.activation_bytes = 0

        def log(self, severity: Any, message: str) -> None:
            line = " ".join(message.split())
            if severity <= trt.ILogger.WARNING:
                error = severity < trt.ILogger.WARNING
                send(log=line, error=error)
                if error:
                    self.first_error = self.first_error or line
            elif found := _ACTIVATIONS.search(line):
                # One line a profile; a context has memory for the largest.
                self.activation_bytes = max(self.activation_bytes, int(found[1]))

    return Log()


def _make_monitor(trt: Any, send: Send) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Sends how far the phase is that is going on, not too often."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self._told = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self._tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(phase_name, step + 1)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

        def _tell(self, phase: str, done: int) -> None:
            total, now = self._steps.get(phase, 0), time.monotonic()
            if total > 1 and now >= self._told + _TELL_SECONDS:
                self._told = now
                send(phase=phase, done=min(done, total), total=total)

    return Monitor()


def _make_writer(trt: Any, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Writes the plan's parts to the file."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _take_stdout() -> TextIO:
    """What was stdout, for messages; whatever a library prints goes to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return messages


def _sender(messages: TextIO) -> Send:
    lock = threading.Lock()  # TensorRT logs from several threads.

    def send(**fields: Any) -> None:
        with lock:
            messages.write(json.dumps(fields) + "\n")

    return send


def _die_with_parent() -> None:
    """A build that nobody waits for ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
