"""A device that fails: the requests end with the reason, and the engine says that it must be loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenrt.runtime import LLM, DeviceError, SamplingParams
from qwenrt.runtime.engine import LLMEngine

from .conftest import Machine

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ILLEGAL = "cudaErrorIllegalAddress, an illegal memory access was encountered"
DEAD = "what the device held is lost: load the engine again"


def engine_with_requests(engine_dir: Path) -> LLMEngine:
    """Two requests that decode, and one that waits for a place."""
    engine = LLM(engine_dir, num_kv_blocks=16, max_num_seqs=2).engine
    for name in ("a", "b", "waiting"):
        engine.add_request(name, [1, 2, 3], PARAMS)
    engine.step()
    assert len(engine.scheduler.running) == 2
    return engine


@pytest.mark.parametrize("call", ["use", "upload", "launch", "download", "synchronize"])
def test_a_device_error_in_a_step_ends_every_request_with_its_message(
    machine: Machine, engine_dir: Path, call: str
) -> None:
    engine = engine_with_requests(engine_dir)
    machine.device.fail(call)
    message = f"{call} failed: {ILLEGAL}; {DEAD}"
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["a", "b", "waiting"]
    for output in outputs:
        assert output.finished
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", message)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 0]
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.pool.num_free == 16
    for again in (engine.step, lambda: engine.add_request("new", [1], PARAMS)):
        with pytest.raises(DeviceError, match=DEAD):
            again()
    assert engine.abort("a") is None


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("execute_async_v3", "TensorRT did not run the step: IExecutionContext: Error Code 3: API Usage Error"),
        ("set_input_shape", r"TensorRT refused input_ids of shape \[4\]: IExecutionContext: Error Code 3"),
    ],
)
def test_false_from_tensorrt_in_a_step_is_such_an_error(
    machine: Machine, engine_dir: Path, method: str, message: str
) -> None:
    llm = LLM(engine_dir, num_kv_blocks=16)
    machine.trt.refuse = method
    with pytest.raises(DeviceError, match=message):
        llm.generate([1, 2, 3, 4], PARAMS)
    machine.trt.refuse = None
    with pytest.raises(DeviceError, match=DEAD):
        llm.generate([1, 2, 3, 4], PARAMS)


def test_generate_raises_and_an_engine_that_is_loaded_again_answers(machine: Machine, engine_dir: Path) -> None:
    llm = LLM(engine_dir, num_kv_blocks=16)
    right = llm.generate([1, 2, 3], PARAMS)[0].outputs[0].token_ids
    machine.device.fail("synchronize")
    with pytest.raises(DeviceError, match=ILLEGAL):
        llm.generate([1, 2, 3], PARAMS)
    machine.device.failure = None
    assert LLM(engine_dir, num_kv_blocks=16).generate([1, 2, 3], PARAMS)[0].outputs[0].token_ids == right


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("create_execution_context", "TensorRT created no execution context: ICudaEngine: Error Code 3"),
        ("set_optimization_profile_async", "TensorRT refused profile 1: IExecutionContext"),
        ("set_tensor_address", "TensorRT refused the address of input_ids: "),
        ("set_input_shape", "TensorRT refused kv_cache.0 of shape"),
        ("execute_async_v3", "TensorRT did not run the step"),
    ],
)
def test_false_from_tensorrt_while_loading(machine: Machine, engine_dir: Path, method: str, message: str) -> None:
    machine.trt.refuse = method
    with pytest.raises(DeviceError, match=message):
        LLM(engine_dir, num_kv_blocks=16)
    device = machine.device
    assert not (device.memory or device.pinned or device.streams or device.graphs)


@pytest.mark.parametrize(
    "call", ["create_stream", "allocate", "allocate_pinned", "memory_info", "capture", "synchronize"]
)
def test_a_device_error_while_loading(machine: Machine, engine_dir: Path, call: str) -> None:
    machine.device.fail(call)
    with pytest.raises(DeviceError, match=ILLEGAL):
        LLM(engine_dir, num_kv_blocks=16)
