"""Plans that do not load say in one message what was found and what is needed (CASES T01)."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qwenrt.exporter.tensorrt.profiles import plan_profiles
from qwenrt.plugins import ConfigError
from qwenrt.runtime import LLM, SamplingParams
from qwenrt.runtime.backends.tensorrt import backend
from qwenrt.runtime.engine_dir import EngineDir
from qwenrt.runtime.plan import Profile, Range

from .conftest import LIMITS, Machine, fake_build
from .fake_tensorrt import Runtime


def refused(folder: Path, **options: Any) -> str:
    """The one line with which the engine does not load."""
    with pytest.raises(ConfigError) as raised:
        LLM(folder, **options)
    (line,) = str(raised.value).splitlines()
    return line


def test_a_folder_without_a_plan(machine: Machine, folder: Path) -> None:
    assert (
        refused(folder) == f"engine folder {folder} has no plan; build one on this machine with: qwenrt build {folder}"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"compute_capability": "8.9"}, "compute capability 8.9, version 10.14.1.48, plugin 1"),
        ({"tensorrt_version": "10.13.3.9"}, "compute capability 9.0, version 10.13.3.9, plugin 1"),
        ({"tensorrt_version": "10.14.2.1"}, "compute capability 9.0, version 10.14.2.1, plugin 1"),
        ({"plan_version": 7}, "compute capability 9.0, version 10.14.1.48, plugin 7"),
    ],
)
def test_a_plan_for_another_machine_is_not_even_read(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], found: str
) -> None:
    fake_build(folder, **changes)
    monkeypatch.delattr(Runtime, "deserialize_cuda_engine")
    assert refused(folder) == (
        f"no plan of {folder} runs here: needed is one for compute capability 9.0 (Fake GPU), TensorRT 10.14.1.48 and "
        f"plugin 1; found: model.sm90-trt10.14.1.plan ({found}); build one on this machine with: qwenrt build {folder}"
    )


def test_of_several_plans_the_one_for_this_machine_is_taken(machine: Machine, folder: Path) -> None:
    fake_build(folder, file="a.plan", compute_capability="8.9")
    fake_build(folder, file="b.plan", tensorrt_version="9.0.0.1")
    assert "a.plan (compute capability 8.9" in refused(folder)
    assert "b.plan (compute capability 9.0, version 9.0.0.1" in refused(folder)
    fake_build(folder, file="c.plan", tensorrt_version="10.14.1.99")
    assert len(LLM(folder, num_kv_blocks=8).generate([1, 2])) == 1


def test_what_tensorrt_logs_is_told_when_it_returns_none(machine: Machine, folder: Path) -> None:
    plan = folder / fake_build(folder).file
    rewrite(folder, plan, plan.read_bytes()[:-100])
    message = refused(folder)
    assert message.startswith(f"TensorRT 10.14.1.48 cannot load {plan}: IRuntime::deserializeCudaEngine: Error Code 1")
    assert message.endswith(f"(magicTag mismatch); build one on this machine with: qwenrt build {folder}")


def rewrite(folder: Path, plan: Path, data: bytes) -> None:
    """Replace a plan with the manifest none the wiser."""
    plan.write_bytes(data)
    manifest = json.loads((folder / "engine.json").read_text())
    manifest["files"][plan.name] = {"size": len(data), "sha256": _sha256(data)}
    (folder / "engine.json").write_text(json.dumps(manifest))


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_truncated_plan_is_found_before_tensorrt_sees_it(machine: Machine, folder: Path) -> None:
    plan = folder / fake_build(folder).file
    size = plan.stat().st_size
    plan.write_bytes(plan.read_bytes()[:-1])
    assert refused(folder).startswith(f"engine file {plan} has {size - 1} bytes, the manifest says {size}")


def test_a_plan_of_other_weights_is_told_by_its_name(machine: Machine, folder: Path) -> None:
    plan = folder / fake_build(folder).file
    text = json.loads(plan.read_text())
    rewrite(folder, plan, json.dumps({**text, "network": "qwenrt-0123456789abcdef0123456789abcdef"}).encode())
    assert refused(folder) == (
        f"plan {plan} was built from another graph or other weights; build one on this machine with: qwenrt build {folder}"
    )


def test_a_plan_of_another_plugin_fails_with_the_plugins_own_words(machine: Machine, folder: Path) -> None:
    plan = folder / fake_build(folder).file
    text = json.loads(plan.read_text())
    rewrite(folder, plan, json.dumps({**text, "plan_version": 3}).encode())
    assert "the plan was built with plan_version 3, this plugin library reads plan_version 1" in refused(folder)


def test_a_plan_whose_profiles_are_not_the_manifests(machine: Machine, folder: Path) -> None:
    plan = folder / fake_build(folder).file
    text = json.loads(plan.read_text())
    text["profiles"][1]["num_tokens"]["max"] = 16
    rewrite(folder, plan, json.dumps(text).encode())
    assert refused(folder) == (
        f"plan {plan} is not what engine.json says: input_ids in profile 1 is [[1], [24], [16]], must be [[1], [24], [24]]; "
        "export the engine again"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_size": 32},
            r"kv_cache\.0 is INPUT HALF \[-1, 2, 1, 16, 64\], must be INPUT HALF \[-1, 2, 1, 32, 64\]",
        ),
        ({"kv_dtype": "bfloat16"}, r"kv_cache\.0 is INPUT HALF .* must be INPUT BF16"),
        ({"num_layers": 3}, r"kv_cache\.2 is missing, must be INPUT HALF"),
        ({"num_layers": 1}, r"kv_cache\.1 is INPUT HALF .*, must be missing"),
        ({"vocab_size": 400}, r"logits is OUTPUT FLOAT \[-1, 320\], must be OUTPUT FLOAT \[-1, 400\]"),
    ],
)
def test_a_plan_whose_tensors_are_not_the_manifests(
    machine: Machine, folder: Path, change: dict[str, Any], message: str
) -> None:
    fake_build(folder)
    manifest = json.loads((folder / "engine.json").read_text())
    for name, value in change.items():
        (manifest["model"] if name in manifest["model"] else manifest)[name] = value
    (folder / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=message):
        LLM(folder, num_kv_blocks=4)


def test_limits_beyond_a_profile_are_refused_by_the_option_to_lower(machine: Machine, folder: Path) -> None:
    decode, prefill = plan_profiles(EngineDir.open(folder).manifest)
    small = dataclasses.replace(decode, num_seqs=Range(min=1, opt=2, max=4), num_logits=Range(min=1, opt=2, max=4))
    small = dataclasses.replace(small, num_tokens=Range(min=1, opt=2, max=4))
    fake_build(folder, profiles=(small, prefill))
    assert refused(folder).startswith(
        "profile decode of plan model.sm90-trt10.14.1.plan takes a num_tokens of at most 4"
    )
    assert LLM(folder, max_num_seqs=4, num_kv_blocks=4).engine.limits.max_num_seqs == 4


def test_the_pool_stays_within_what_the_plan_takes(machine: Machine, folder: Path) -> None:
    def few_blocks(profile: Profile) -> Profile:
        return dataclasses.replace(profile, num_blocks=Range(min=1, opt=2, max=5))

    fake_build(folder, profiles=tuple(map(few_blocks, plan_profiles(EngineDir.open(folder).manifest))))
    assert LLM(folder).engine.backend.num_kv_blocks == 5
    assert refused(folder, num_kv_blocks=6) == ("num_kv_blocks is 6, plan model.sm90-trt10.14.1.plan takes at most 5")


def test_a_missing_plugin_library(machine: Machine, engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "tensorrt_library", lambda: Path("/nowhere/libqwenrt_tensorrt.so"))
    assert refused(engine_dir) == (
        "TensorRT 10.14.1.48 cannot load the plugin library /nowhere/libqwenrt_tensorrt.so: cannot open "
        "/nowhere/libqwenrt_tensorrt.so; it logged nothing"
    )


def test_a_plugin_library_without_the_plugin(machine: Machine, engine_dir: Path) -> None:
    machine.trt.registry.broken = True
    message = refused(engine_dir)
    assert "TensorRT 10.14.1.48 took no plugin PagedAttention version 1 from" in message
    assert message.endswith("registered are: NMS/2")


def test_the_plugin_library_is_loaded_once_in_a_process(machine: Machine, engine_dir: Path) -> None:
    for _ in range(2):
        LLM(engine_dir, num_kv_blocks=4)
    assert len(machine.trt.registry.loaded) == 1


def test_a_plan_without_weights_gets_the_folders(machine: Machine, folder: Path, engine_dir: Path) -> None:
    fake_build(folder, stripped=True)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    outputs = [LLM(path, num_kv_blocks=8).generate([5, 6, 7], params)[0].outputs[0] for path in (folder, engine_dir)]
    assert outputs[0] == outputs[1]


def test_a_plan_without_weights_that_cannot_be_refitted(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_build(folder, stripped=True)
    monkeypatch.setattr("tests.runtime.tensorrt.fake_tensorrt.Refitter.refit_cuda_engine", lambda self: False)
    assert f"cannot refit the plan with the weights of {folder / 'model.onnx'}: it logged nothing" in refused(folder)


def test_tensorrt_that_is_not_installed(machine: Machine, engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert refused(engine_dir) == "TensorRT is missing (pip install tensorrt)"


def test_cuda_bindings_that_are_not_installed(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "qwenrt.runtime.backends.tensorrt.cuda", raising=False)
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError("No module named 'cuda'", name="cuda")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs cuda-bindings .*pip install 'qwenrt\[tensorrt\]'"):
        importlib.import_module("qwenrt.runtime.backends.tensorrt.cuda")


def test_an_engine_for_the_cpu_on_this_backend(cpu: LLM, tiny_engine: Path) -> None:
    assert "was exported for onnxruntime" in refused(tiny_engine, backend="tensorrt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "onnxruntime"},
            "backend onnxruntime computes in float32, .* is an engine in float16 for tensorrt",
        ),
        ({"backend": "torch"}, "is an engine in float16, backend torch on the CPU computes in float32"),
        ({"device": "cpu"}, "device is 'cpu', backend tensorrt runs on: cuda"),
        ({"device": "cuda:x"}, "device is 'cuda:x', must be cpu, cuda or cuda:N"),
        ({"device": "gpu"}, "device is 'gpu', must be"),
        ({"gpu_memory_fraction": 1.5}, "gpu_memory_fraction is 1.5, must be above 0 and at most 1"),
        ({"gpu_memory_fraction": 0.5, "kv_memory": 5}, "kv_memory and gpu_memory_fraction are both given"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    machine: Machine, engine_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(engine_dir, **options)


def test_the_limits_are_those_of_the_export(machine: Machine, engine_dir: Path) -> None:
    assert dataclasses.asdict(LLM(engine_dir, num_kv_blocks=4).engine.limits) == LIMITS
