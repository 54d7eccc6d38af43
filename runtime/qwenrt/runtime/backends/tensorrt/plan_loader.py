"""From an engine folder to a deserialised engine: the right plan for this machine, or one message with found and needed."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenrt.plugins import ConfigError
from qwenrt.plugins.schema import PAGED_ATTENTION, PLAN_VERSION
from qwenrt.plugins.tensorrt_module import TITLES

from ...engine_dir import EngineDir, EngineManifest
from ...plan import Plan, Profile
from .device import Device
from .trt_objects import make_log

DECODE, PREFILL = 0, 1
"""The optimisation profile for steps of one token a sequence, and the one for all others."""
INDEX_INPUTS = ("input_ids", "positions", "block_tables", "seq_lens", "query_start", "logits_indices")
_TRT_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "fp8": "FP8"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadedPlan:
    """A plan in TensorRT's hands; what stands here must live as long as its contexts."""

    plan: Plan
    trt: Any
    log: Any
    runtime: Any
    engine: Any


def load_plan(folder: EngineDir, trt: Any, device: Device, plugin_library: Path) -> LoadedPlan:
    """Deserialise the plan of `folder` that is for this TensorRT and this GPU.

    plugin_library: libqwenrt_tensorrt.so. Raises ConfigError, before anything is deserialised where the manifest tells: no plan,
    one for other hardware, another TensorRT or another plugin, a plugin library that does not load, a plan that TensorRT refuses,
    one that is not what the manifest says.
    """
    plan = choose_plan(folder, trt, device)
    log = make_log(trt)
    runtime = trt.Runtime(log)
    _load_plugin(trt, plugin_library, log)
    path = folder.file(plan.file)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise ConfigError(f"{_library(trt)} cannot load {path}: {log.text()}; {_remedy(folder)}")
    if plan.stripped:
        _refit(trt, engine, log, folder)
    if engine.name != folder.manifest.network_name():
        raise ConfigError(f"plan {path} was built from another graph or other weights; {_remedy(folder)}")
    _check_tensors(engine, folder.manifest, path)
    _check_profiles(engine, plan, path)
    return LoadedPlan(plan, trt, log, runtime, engine)


def choose_plan(folder: EngineDir, trt: Any, device: Device) -> Plan:
    """The plan that the manifest says is for this machine; raises ConfigError telling what is needed and what was found."""
    plans = folder.manifest.plans
    if not plans:
        raise ConfigError(f"engine folder {folder.path} has no plan; {_remedy(folder)}")
    for plan in plans:
        if (
            plan.compute_capability == device.compute_capability
            and _release(plan.tensorrt_version) == _release(trt.__version__)
            and plan.plan_version == PLAN_VERSION
        ):
            return plan
    found = ", ".join(
        f"{plan.file} (compute capability {plan.compute_capability}, version {plan.tensorrt_version}, plugin {plan.plan_version})"
        for plan in plans
    )
    raise ConfigError(
        f"no plan of {folder.path} runs here: needed is one for compute capability {device.compute_capability} ({device.name}), "
        f"{_library(trt)} and plugin {PLAN_VERSION}; found: {found}; {_remedy(folder)}"
    )


def tensor_shapes(manifest: EngineManifest) -> dict[str, Shape]:
    """Shape of every input and output of an engine, -1 where it varies from step to step or with the size of the pool."""
    spec = manifest.model
    cache = (-1, 2, spec.num_kv_heads, manifest.block_size, spec.head_dim)
    shapes: dict[str, Shape] = {name: (-1, -1) if name == "block_tables" else (-1,) for name in INDEX_INPUTS}
    shapes["logits"] = (-1, manifest.num_logits)
    for layer in range(spec.num_layers):
        shapes[f"kv_cache.{layer}"] = shapes[f"kv_cache_out.{layer}"] = cache
    return shapes


def profile_sizes(profile: Profile) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Smallest, usual and largest shape of each index input under a profile."""
    t, s, r, blocks = profile.num_tokens, profile.num_seqs, profile.num_logits, profile.max_blocks
    ranges = {"input_ids": t, "positions": t, "seq_lens": s, "logits_indices": r}
    sizes = {name: ((one.min,), (one.opt,), (one.max,)) for name, one in ranges.items()}
    tables = (s.min, blocks.min), (s.opt, blocks.opt), (s.max, blocks.max)
    return {**sizes, "query_start": ((s.min + 1,), (s.opt + 1,), (s.max + 1,)), "block_tables": tables}


def _load_plugin(trt: Any, library: Path, log: Any) -> None:
    """Make the PagedAttention plugin known to TensorRT, unless this process has done so before."""
    registry = trt.get_plugin_registry()
    name, version = PAGED_ATTENTION.name, str(PAGED_ATTENTION.version)
    if registry.get_creator(name, version, "") is not None:
        return
    try:
        registry.load_library(str(library))
    except Exception as error:  # pybind11 raises what it likes here.
        raise ConfigError(f"{_library(trt)} cannot load the plugin library {library}: {error}; {log.text()}") from None
    if registry.get_creator(name, version, "") is None:
        known = ", ".join(sorted(f"{one.name}/{one.plugin_version}" for one in registry.all_creators)) or "none"
        raise ConfigError(
            f"{_library(trt)} took no plugin {name} version {version} from {library}: {log.text()}; registered are: {known}"
        )


def _refit(trt: Any, engine: Any, log: Any, folder: EngineDir) -> None:
    """Give a plan without weights those of the folder, through TensorRT's own reader of model.onnx and its external data."""
    refitter = trt.Refitter(engine, log)
    parser = trt.OnnxParserRefitter(refitter, log)
    graph = folder.file("model.onnx")
    if not (parser.refit_from_file(str(graph)) and refitter.refit_cuda_engine()):
        raise ConfigError(
            f"{_library(trt)} cannot refit the plan with the weights of {graph}: {log.text()}; {_remedy(folder)}"
        )


def _check_tensors(engine: Any, manifest: EngineManifest, path: Path) -> None:
    expected = {}
    for name, shape in tensor_shapes(manifest).items():
        dtype = (
            _TRT_DTYPES[manifest.kv_dtype]
            if name.startswith("kv_cache")
            else "INT32"
            if name in INDEX_INPUTS
            else "FLOAT"
        )
        mode = "OUTPUT" if name == "logits" or name.startswith("kv_cache_out") else "INPUT"
        expected[name] = f"{mode} {dtype} {list(shape)}"
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    found = {
        name: f"{engine.get_tensor_mode(name).name} {engine.get_tensor_dtype(name).name} {list(engine.get_tensor_shape(name))}"
        for name in names
    }
    _compare(expected, found, path)


def _check_profiles(engine: Any, plan: Plan, path: Path) -> None:
    expected, found = {}, {}
    for index, profile in enumerate(plan.profiles):
        for name, sizes in profile_sizes(profile).items():
            expected[f"{name} in profile {index}"] = str([list(shape) for shape in sizes])
    for index in range(engine.num_optimization_profiles):
        for name in INDEX_INPUTS:
            sizes = engine.get_tensor_profile_shape(name, index)
            found[f"{name} in profile {index}"] = str([list(shape) for shape in sizes])
    _compare(expected, found, path)


def _compare(expected: Mapping[str, str], found: Mapping[str, str], path: Path) -> None:
    for name in [*expected, *(name for name in found if name not in expected)]:
        if expected.get(name) != found.get(name):
            raise ConfigError(
                f"plan {path} is not what engine.json says: {name} is {found.get(name, 'missing')}, must be "
                f"{expected.get(name, 'missing')}; export the engine again"
            )


def _library(trt: Any) -> str:
    return f"{TITLES['tensorrt-rtx' if trt.__name__ == 'tensorrt_rtx' else 'tensorrt']} {trt.__version__}"


def _release(version: str) -> list[str]:
    """What a plan must have in common with the library that reads it: major, minor and patch."""
    return version.split(".")[:3]


def _remedy(folder: EngineDir) -> str:
    return f"build one on this machine with: qwenrt build {folder.path}"
