"""What the TensorRT backend asks of TensorRT and of the device: bindings, padding, graphs, memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import ConfigError, DeviceError
from qwenrt.runtime import LLM
from qwenrt.runtime.backends import load_backend
from qwenrt.runtime.backends.tensorrt import TensorRtBackend
from qwenrt.runtime.backends.tensorrt.decode_graphs import padded_sizes
from qwenrt.runtime.engine_dir import EngineDir, Limits
from qwenrt.runtime.kv_budget import KvBudget
from qwenrt.runtime.model_runner import StepInputs

from .conftest import BLOCK_SIZE, LIMITS, Machine

NUM_BLOCKS = 30
NUM_LAYERS = 2
BLOCK_BYTES = 2 * 1 * BLOCK_SIZE * 64 * 2
"""Of one layer."""


def load(engine_dir: Path, budget: KvBudget | None = None, **limits: int) -> TensorRtBackend:
    backend = load_backend(
        None,
        EngineDir.open(engine_dir),
        device=None,
        limits=Limits(**{**LIMITS, **limits}),
        budget=budget or KvBudget(num_kv_blocks=NUM_BLOCKS),
        threads=1,
    )
    assert isinstance(backend, TensorRtBackend)
    return backend


def step(*sequences: tuple[int, int], rows: list[int] | None = None, seed: int = 0) -> StepInputs:
    """A step of sequences of (new, old) tokens, in blocks 3, 4, 5 and so on; the logits of `rows`, by default of each's last."""
    new, old = np.array(sequences, np.int32).reshape(-1, 2).T
    lengths = new + old
    needed = [-(-int(length) // BLOCK_SIZE) for length in lengths]
    tables, block = np.full((len(sequences), max(needed, default=1)), -1, np.int32), 3
    for table, count in zip(tables, needed, strict=True):
        table[:count] = range(block, block + count)
        block += count
    ends = np.cumsum(new)
    return StepInputs(
        input_ids=np.random.default_rng(seed).integers(0, 256, int(new.sum())).astype(np.int32),
        positions=np.concatenate(
            [np.arange(start, stop) for start, stop in zip(old, lengths, strict=True)] or [[]]
        ).astype(np.int32),
        block_tables=tables,
        seq_lens=lengths.astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        logits_indices=np.array(ends - 1 if rows is None else rows, np.int32),
    )


def pools(backend: TensorRtBackend) -> npt.NDArray[Any]:
    """The bytes of all layers' pools, [layer, block, ...]."""
    blocks = np.arange(backend.num_kv_blocks, dtype=np.int32)
    return np.stack([backend.read_kv_blocks(layer, blocks).view(np.uint8) for layer in range(NUM_LAYERS)])


def slots_written(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> set[tuple[int, int]]:
    """(block, slot) of each token of which a byte of K or V changed in any layer."""
    changed = (before != after).any(axis=(0, 2, 3, 5))
    return {(int(block), int(slot)) for block, slot in np.argwhere(changed)}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (10, [1, 2, 4, 8, 10]),
        (33, [1, 2, 4, 8, 16, 24, 32, 33]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_padded_sizes(most: int, sizes: list[int]) -> None:
    assert padded_sizes(most) == sizes


def test_each_context_is_bound_once_and_sees_one_cache_address_as_input_and_output(
    machine: Machine, engine_dir: Path
) -> None:
    backend = load(engine_dir)
    contexts = machine.trt.contexts
    names = 6 + 2 * NUM_LAYERS + 1
    assert len(contexts) == 1 + len(padded_sizes(LIMITS["max_num_seqs"]))
    assert [context.bindings for context in contexts] == [names] * len(contexts)
    for context in contexts:
        assert context.addresses == contexts[0].addresses
        for layer in range(NUM_LAYERS):
            assert context.addresses[f"kv_cache.{layer}"] == context.addresses[f"kv_cache_out.{layer}"]
            assert context.shapes[f"kv_cache.{layer}"] == (NUM_BLOCKS, 2, 1, BLOCK_SIZE, 64)
    for inputs in (step((9, 0), (2, 5)), step((1, 4), (1, 20)), step((3, 3))):
        backend.execute(inputs)
    assert [context.bindings for context in contexts] == [names] * len(contexts)


def test_contexts_are_on_their_profiles_and_share_the_activation_memory(machine: Machine, engine_dir: Path) -> None:
    load(engine_dir)
    contexts = machine.trt.contexts
    assert [context.profile for context in contexts] == [1] + [0] * (len(contexts) - 1)
    assert {context.memory for context in contexts} == {contexts[0].memory}
    assert sum(size == machine.trt.activation_bytes for call, size in machine.device.calls if call == "allocate") == 1


def test_loading_captures_every_padded_size_and_writes_nothing_to_the_pool(machine: Machine, engine_dir: Path) -> None:
    backend = load(engine_dir)
    assert machine.device.counts("capture") == len(padded_sizes(LIMITS["max_num_seqs"]))
    assert machine.device.counts("launch") == 0
    assert (pools(backend) == 0xFF).all()
    captured = [context for context in machine.trt.contexts if context.profile == 0]
    for size, context in zip(padded_sizes(LIMITS["max_num_seqs"]), captured, strict=True):
        assert context.shapes["block_tables"] == (size, LIMITS["max_model_len"] // BLOCK_SIZE)
        assert context.shapes["input_ids"] == context.shapes["logits_indices"] == (size,)
        assert context.shapes["query_start"] == (size + 1,)


@pytest.mark.parametrize(("count", "padded"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (10, 4)])
def test_a_decode_step_launches_the_graph_of_the_next_padded_size(
    machine: Machine, engine_dir: Path, count: int, padded: int
) -> None:
    backend, device = load(engine_dir), machine.device
    graphs = list(device.graphs)
    device.calls.clear()
    backend.execute(step(*[(1, 5)] * count))
    assert [call for call, _ in device.calls] == ["use", "upload", "launch", "download", "synchronize"]
    assert device.calls[2] == ("launch", graphs[padded])


def test_another_step_enqueues_with_its_own_shapes_and_no_graph(machine: Machine, engine_dir: Path) -> None:
    backend, device = load(engine_dir), machine.device
    device.calls.clear()
    backend.execute(step((9, 0), (1, 20)))
    assert [call for call, _ in device.calls] == ["use", "upload", "download", "synchronize"]
    shapes = machine.trt.contexts[0].shapes
    assert (shapes["input_ids"], shapes["block_tables"], shapes["logits_indices"]) == ((10,), (2, 2), (2,))


@pytest.mark.parametrize("inputs", [step((5, 0), (9, 3), rows=[13]), step(*[(1, 5)] * 6, rows=[1, 4, 5])])
def test_only_the_wanted_rows_of_logits_are_copied(machine: Machine, engine_dir: Path, inputs: StepInputs) -> None:
    backend, device = load(engine_dir), machine.device
    device.calls.clear()
    logits = backend.execute(inputs)
    assert logits.shape == (len(inputs.logits_indices), 320)
    assert [size for call, size in device.calls if call == "download"] == [logits.nbytes]


@pytest.mark.parametrize("inputs", [step((5, 0), rows=[]), step((1, 5), (1, 6), (1, 7), rows=[])])
def test_a_step_that_samples_nothing(machine: Machine, engine_dir: Path, inputs: StepInputs) -> None:
    assert load(engine_dir).execute(inputs).shape == (0, 320)


@pytest.mark.parametrize(
    "sequences", [[(1, 5)] * 3, [(1, 15), (1, 16), (1, 31), (1, 0), (1, 1)], [(7, 0), (3, 14)], [(2, 0)], [(1, 2)] * 9]
)
def test_a_step_writes_the_slots_of_its_tokens_and_no_others(
    machine: Machine, engine_dir: Path, sequences: list[tuple[int, int]]
) -> None:
    backend = load(engine_dir)
    # What earlier and larger steps left in the buffers must not matter.
    backend.execute(step((24, 0)))
    backend.execute(step(*[(1, 40)] * 9, seed=1))
    for layer in range(NUM_LAYERS):
        backend.write_kv_blocks(layer, np.arange(NUM_BLOCKS), np.zeros((NUM_BLOCKS, 2, 1, BLOCK_SIZE, 64), np.float16))
    before, inputs = pools(backend), step(*sequences, seed=2)
    backend.execute(inputs)
    expected = {
        (int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE)
        for table, (new, old) in zip(inputs.block_tables, sequences, strict=True)
        for position in range(old, old + new)
    }
    assert slots_written(before, pools(backend)) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (step((25, 0)), "num_tokens 25, this engine takes 1 to 24"),
        (step(), "num_tokens 0"),
        (step(*[(1, 0)] * 11), "num_seqs 11, this engine takes 1 to 10"),
        (step((1, 96)), "max_blocks 7, this engine takes 1 to 6"),
    ],
)
def test_a_step_beyond_the_limits_is_refused_before_anything_is_queued(
    machine: Machine, engine_dir: Path, inputs: StepInputs, message: str
) -> None:
    backend = load(engine_dir)
    machine.device.calls.clear()
    with pytest.raises(ConfigError, match=message):
        backend.execute(inputs)
    assert machine.device.calls == []
    assert backend.execute(step((3, 0))).shape == (1, 320)


def test_blocks_are_read_as_they_were_written(machine: Machine, engine_dir: Path) -> None:
    backend = load(engine_dir)
    blocks = np.array([7, 0, 29], np.int32)
    values = np.random.default_rng(0).standard_normal((3, 2, 1, BLOCK_SIZE, 64)).astype(np.float16)
    backend.write_kv_blocks(1, blocks, values)
    np.testing.assert_array_equal(backend.read_kv_blocks(1, blocks), values)
    untouched = np.setdiff1d(np.arange(30), blocks)
    assert (backend.read_kv_blocks(1, untouched.astype(np.int32)).view(np.uint8) == 0xFF).all()
    assert (pools(backend)[0] == 0xFF).all()


def test_a_context_that_cannot_be_captured_is_run_instead(
    machine: Machine, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = load(engine_dir).execute(step((1, 0), (1, 0), (1, 0))).copy()
    from .fake_tensorrt import ExecutionContext

    monkeypatch.setattr(ExecutionContext, "is_stream_capturable", lambda self, stream: False, raising=False)
    machine.device.calls.clear()
    backend = load(engine_dir)
    np.testing.assert_array_equal(backend.execute(step((1, 0), (1, 0), (1, 0))), captured)
    assert machine.device.counts("capture") == machine.device.counts("launch") == 0


# Memory.


def used(machine: Machine) -> int:
    """Bytes of the device that are allocated."""
    return sum(block.nbytes for block in machine.device.memory.values())


def test_by_default_the_pool_holds_every_sequence_at_full_length(machine: Machine, engine_dir: Path) -> None:
    assert load(engine_dir, KvBudget()).num_kv_blocks == 10 * 96 // BLOCK_SIZE


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_the_pool_takes_what_the_fraction_leaves_beside_all_else(
    machine: Machine, engine_dir: Path, fraction: float | None
) -> None:
    load(engine_dir, KvBudget(num_kv_blocks=1))
    everything_else = sum(size for call, size in machine.device.calls if call == "allocate") - NUM_LAYERS * BLOCK_BYTES
    for blocks in (1, 17):
        machine.device.total = int((everything_else + blocks * NUM_LAYERS * BLOCK_BYTES + 50) / (fraction or 0.9)) + 1
        backend = load(engine_dir, KvBudget(gpu_memory_fraction=fraction))
        assert backend.num_kv_blocks == blocks
        assert used(machine) <= (fraction or 0.9) * machine.device.total
        del backend
        gc.collect()


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"num_kv_blocks": 10**6}, r"1000000 KV blocks takes 8192000000 bytes, the GPU has \d+ free"),
        ({"kv_memory": 10**10}, r"takes \d+ bytes, the GPU has \d+ free; lower num_kv_blocks or kv_memory"),
        ({"kv_memory": 100}, "kv_memory is 100 bytes, one KV block of this engine takes 8192"),
        (
            {"gpu_memory_fraction": 0.01},
            "a gpu_memory_fraction of 0.01 leaves, 0 bytes, holds no KV block of 8192 bytes",
        ),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_and_nothing_stays_allocated(
    machine: Machine, engine_dir: Path, budget: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(engine_dir, KvBudget(**budget))
    device = machine.device
    assert not (device.memory or device.pinned or device.streams or device.graphs)
    assert load(engine_dir).num_kv_blocks == NUM_BLOCKS


def test_everything_is_given_back_with_the_backend(machine: Machine, engine_dir: Path) -> None:
    llm = LLM(engine_dir, num_kv_blocks=8)
    llm.generate([[1, 2, 3], [4]])
    del llm
    gc.collect()
    device = machine.device
    assert not (device.memory or device.pinned or device.streams or device.graphs)


def test_out_of_memory_while_loading_gives_back_what_was_there(machine: Machine, engine_dir: Path) -> None:
    machine.device.total = machine.trt.activation_bytes
    with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
        load(engine_dir)
    device = machine.device
    assert not (device.memory or device.pinned or device.streams or device.graphs)
