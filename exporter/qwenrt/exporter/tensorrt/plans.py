"""Plans for an engine folder, built from its graph and its weights alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qwenrt.plugins import ConfigError, library
from qwenrt.plugins.schema import PLAN_VERSION
from qwenrt.plugins.tensorrt_module import (
    RTX_COMPUTE_CAPABILITIES,
    TITLES,
    check_installed,
    gpu_compute_capability,
    plan_file,
)
from qwenrt.runtime.engine_dir import EngineDir, EngineManifest
from qwenrt.runtime.plan import Plan, Profile

from ..engine_writer import add_plan, staging_folder
from .process import BuildResult, run_build
from .profiles import dimension_ranges, plan_profiles
from .worker import Request

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

Notice = Callable[[str], None]
"""Called with a line about what was made."""

_DEFAULT_CAPABILITIES = ("8.9", "12.0")
_FIRST_WITH_FLOAT8 = 8.9
_WARNINGS_TOLD = 3
_MAX_WARNING = 200


def build_plans(
    engine: str | os.PathLike[str],
    *,
    compute_capabilities: Sequence[str] = (),
    strip_weights: bool = False,
    progress: Progress = lambda stage, done, total: None,
    notice: Notice = lambda line: None,
) -> EngineDir:
    """Build plans from an engine folder alone, add them to it, and return it.

    compute_capabilities: for target tensorrt-rtx, what to build for (8.9 and 12.0 by default); tensorrt builds for the GPU in
    this machine. strip_weights: plans without weights, which the runtime takes from the weight file. A plan for the same GPU
    architecture and TensorRT release is replaced. Raises ConfigError saying what is wrong or missing; no plan is then half there.
    """
    folder = EngineDir.open(engine)
    if folder.manifest.target == "onnxruntime":
        raise ConfigError(
            f"engine folder {folder.path} is for onnxruntime, which needs no plan; export with --target tensorrt"
        )
    capabilities = plan_capabilities(folder.manifest.target, folder.manifest.weights, compute_capabilities)
    progress("checking the engine folder", 0, 1)
    folder.verify()
    progress("checking the engine folder", 1, 1)
    with staging_folder(Path(os.path.abspath(engine))) as staging:
        if (no_plan := add_plans(folder, staging, capabilities, strip_weights, progress, notice)) is not None:
            raise no_plan
    return EngineDir.open(engine)


def plan_capabilities(target: str, weights: str, given: Sequence[str]) -> tuple[str | None, ...]:
    """The compute capabilities to build plans for, None being that of the GPU in this machine; raises ConfigError for others."""
    if target != "tensorrt-rtx":
        if given:
            reason = "TensorRT builds for the GPU in this machine" if target == "tensorrt" else f"{target} has no plans"
            raise ConfigError(f"compute capability {', '.join(given)} was asked for; leave it out, {reason}")
        return (None,) if target == "tensorrt" else ()
    for capability in given:
        if capability not in RTX_COMPUTE_CAPABILITIES:
            allowed = ", ".join(RTX_COMPUTE_CAPABILITIES)
            raise ConfigError(f"compute capability is {capability!r}, must be one of {allowed}")
        if weights.startswith("fp8") and float(capability) < _FIRST_WITH_FLOAT8:
            raise ConfigError(
                f"a GPU of compute capability {capability} has no float8; take other weights than {weights}"
            )
    return tuple(dict.fromkeys(given)) or _DEFAULT_CAPABILITIES


def add_plans(
    engine: EngineDir,
    staging: Path,
    capabilities: Sequence[str | None],
    strip_weights: bool,
    progress: Progress,
    notice: Notice,
) -> ConfigError | None:
    """Add a plan for each compute capability, of each rank; returns why one could not be built, and builds no more after it.

    staging: where a plan lies until it is whole, on the folder's disk.
    """
    for capability, rank in itertools.product(capabilities, range(engine.manifest.tp)):
        started = time.monotonic()
        built = staging / ".plan.partial"
        try:
            plan, result = _build(engine, built, capability, rank, strip_weights, progress)
        except ConfigError as error:
            built.unlink(missing_ok=True)
            return error
        engine = add_plan(engine, plan, built)
        for line in _summary(engine, plan, result, time.monotonic() - started):
            notice(line)
    return None


def _build(
    engine: EngineDir, built: Path, capability: str | None, rank: int, strip_weights: bool, progress: Progress
) -> tuple[Plan, BuildResult]:
    """Build a plan of a rank's graph at the path `built`."""
    manifest = engine.manifest
    title = TITLES[manifest.target]
    plugin_library, capability = _prerequisites(manifest, capability, strip_weights)
    profiles = plan_profiles(manifest)
    request = Request(
        target=manifest.target,
        graph=str(engine.file(manifest.graph_name(rank))),
        weights=str(engine.file("model.safetensors")),
        plan=str(built),
        plugin_library=str(plugin_library),
        network_name=manifest.network_name(rank),
        compute_capability=capability,
        strip_weights=strip_weights,
        timing_caches=str(_timing_caches()),
        profiles=[_sizes(profile) for profile in profiles],
    )
    label = f"{title} for compute capability {capability}" + (f", rank {rank}" if manifest.tp > 1 else "")
    try:
        result = run_build(request, lambda stage, done, total: progress(f"{label}: {stage}", done, total))
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    plan = Plan(
        file=plan_file(manifest.target, capability, result.tensorrt_version, manifest.graph_name(rank)),
        rank=rank,
        compute_capability=capability,
        tensorrt_version=result.tensorrt_version,
        plan_version=PLAN_VERSION,
        stripped=strip_weights,
        activation_bytes=result.activation_bytes,
        profiles=profiles,
    )
    return plan, result


def _prerequisites(manifest: EngineManifest, capability: str | None, strip_weights: bool) -> tuple[Path, str]:
    """The plugin library and the compute capability to build for; raises ConfigError naming all that is missing here."""
    missing: list[str] = []
    with _listed(missing):
        check_installed(manifest.target)
    with _listed(missing):
        # TensorRT for RTX compiles for itself what it takes the weights out of.
        here = gpu_compute_capability() if capability is None or strip_weights else capability
    with _listed(missing):
        plugin_library = library.tensorrt_library()
    if missing:
        raise ConfigError("; ".join(missing))
    return plugin_library, capability or here


@contextlib.contextmanager
def _listed(missing: list[str]) -> Iterator[None]:
    """Put a ConfigError's message on a list instead of raising it."""
    try:
        yield
    except ConfigError as error:
        missing.append(str(error))


def _sizes(profile: Profile) -> dict[str, tuple[int, int, int]]:
    return {name: (size.min, size.opt, size.max) for name, size in dimension_ranges(profile).items()}


def _timing_caches() -> Path:
    """The folder of TensorRT's timing caches, which belong to a GPU and a TensorRT and not to an engine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwenrt" / "timing"


def _summary(engine: EngineDir, plan: Plan, result: BuildResult, seconds: float) -> list[str]:
    """The build's log in a few lines."""
    megabytes = engine.manifest.files[plan.file].size / 1e6
    lines = [
        f"{plan.file}: {megabytes:,.1f} MB, built in {seconds:.1f} s by {TITLES[engine.manifest.target]} "
        f"{plan.tensorrt_version}; a context has {plan.activation_bytes / 1e6:,.1f} MB of activations"
    ]
    lines += [f"  warning: {text[:_MAX_WARNING]}" for text in result.warnings[:_WARNINGS_TOLD]]
    if (more := len(result.warnings) - _WARNINGS_TOLD) > 0:
        lines.append(f"  and {more} more warnings")
    return lines
