"""Paged batches: those that are made are valid, and what no runtime could make is refused by name (case Y01)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineDir
from qwenrt.tools.compare.batches import Batch, make_batches
from qwenrt.tools.compare.feeds import Array, Feed, Places, check_feed
from qwenrt.tools.compare.runners.executors import OnnxRuntimeExecutor
from qwenrt.tools.compare.runners.graph import GraphRunner


@pytest.fixture(scope="module")
def folder(engine: Path) -> EngineDir:
    return EngineDir.open(engine)


@pytest.fixture(scope="module")
def batches(folder: EngineDir) -> list[Batch]:
    with GraphRunner("onnxruntime", folder, OnnxRuntimeExecutor()) as runner:
        return list(make_batches(folder, runner.infer))


def test_batches_mix_prefill_and_decoding_around_the_edges_of_scattered_blocks(batches: list[Batch]) -> None:
    assert [batch.name for batch in batches] == ["prefill", "mixed", "decode"]
    counts = [np.diff(batch.feed["query_start"]).tolist() for batch in batches]
    assert counts == [[1, 7, 8, 9, 17], [1, 1, 1, 1, 10, 5], [1, 1, 1, 1, 1, 1]]
    assert batches[0].feed["seq_lens"].tolist() == [1, 7, 8, 9, 17]
    assert batches[2].feed["seq_lens"].tolist() == [3, 9, 10, 11, 28, 6]
    tables = batches[0].feed["block_tables"]
    used = tables[tables >= 0]
    assert len(set(used.tolist())) == len(used)
    assert (np.diff(used) != 1).any(), "blocks in order would not show a wrong table"


def test_pools_hold_what_the_step_before_left_and_large_numbers_elsewhere(batches: list[Batch]) -> None:
    for batch in batches[1:]:
        places = Places(batch.feed, 8)
        pool = batch.feed["kv_cache.2"]
        held = np.zeros(pool.shape[:1] + pool.shape[3:4], bool)
        held[places.blocks[~places.new], places.slots[~places.new]] = True
        assert np.abs(pool[held.nonzero()[0], :, :, held.nonzero()[1]]).max() < 20
        assert np.abs(pool[(~held).nonzero()[0], :, :, (~held).nonzero()[1]]).mean() > 40


def test_made_batches_are_the_same_every_time(folder: EngineDir, batches: list[Batch]) -> None:
    with GraphRunner("onnxruntime", folder, OnnxRuntimeExecutor()) as runner:
        for one, two in zip(batches, make_batches(folder, runner.infer), strict=True):
            assert all(np.array_equal(one.feed[name], two.feed[name]) for name in one.feed)


def with_value(name: str, place: Any, value: int) -> Callable[[Feed], None]:
    def change(feed: Feed) -> None:
        feed[name] = feed[name].copy()
        feed[name][place] = value

    return change


def without(name: str) -> Callable[[Feed], None]:
    return lambda feed: feed.__delitem__(name)


def random_indices(feed: Feed) -> None:
    """What polygraphy's own loader makes of index inputs: zeros and ones."""
    random = np.random.default_rng(0)
    for name in ("input_ids", "positions", "block_tables", "seq_lens", "query_start", "logits_indices"):
        feed[name] = random.integers(0, 2, feed[name].shape).astype(np.int32)


def same_block_twice(feed: Feed) -> None:
    tables = feed["block_tables"].copy()
    tables[1, 0] = tables[0, 0]
    feed["block_tables"] = tables


def as_type(name: str, dtype: Any) -> Callable[[Feed], None]:
    return lambda feed: feed.update({name: feed[name].astype(dtype)})


def renamed(feed: Feed) -> None:
    feed["kv_cache.9"] = feed.pop("kv_cache.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (random_indices, "not a valid paged batch: "),
        (with_value("input_ids", 3, 320), r"input_ids\[3\] is 320, must be 0 to 319"),
        (with_value("input_ids", 3, -1), r"input_ids\[3\] is -1"),
        (with_value("logits_indices", 0, 42), r"logits_indices\[0\] is 42, must be 0 to 41"),
        (with_value("positions", 2, 5), "positions of sequence 1 must be 0 to 6"),
        (with_value("block_tables", (1, 0), -1), r"block_tables\[1\] is \[-1\]"),
        (with_value("block_tables", (1, 0), 10_000), r"block_tables\[1\] is \[10000\]"),
        (with_value("seq_lens", 0, 0), r"seq_lens\[0\] is 0"),
        (with_value("seq_lens", 0, 1_000_000), r"seq_lens\[0\] is 1000000"),
        (with_value("query_start", 1, 30), "query_start is"),
        (same_block_twice, r"two tokens are written to block \d+, slot 0"),
        (as_type("positions", np.int64), "positions is int64 of rank 1, must be int32"),
        (as_type("kv_cache.1", np.float16), "kv_cache.1 is float16"),
        (without("seq_lens"), "seq_lens is missing"),
        (renamed, "kv_cache.1 is missing"),
        (
            lambda feed: feed.update({"kv_cache.0": feed["kv_cache.0"][:, :, :, :4]}),
            r"kv_cache.0 is float32 \[\d+, 2, 2, 4, 32\]",
        ),
        (lambda feed: feed.update({name: feed[name][:0] for name in ("input_ids", "positions")}), "input_ids is empty"),
    ],
)
def test_what_no_runtime_could_make_is_refused_by_name(
    folder: EngineDir, batches: list[Batch], change: Callable[[Feed], None], message: str
) -> None:
    feed = dict(batches[0].feed)
    check_feed(feed, folder.manifest)
    change(feed)
    with pytest.raises(ConfigError, match=message):
        check_feed(feed, folder.manifest)


def test_a_slot_that_one_sequence_writes_and_another_reads_is_refused(folder: EngineDir, batches: list[Batch]) -> None:
    feed = dict(batches[1].feed)
    tables: Array = feed["block_tables"].copy()
    # Sequence 1 has 7 old tokens and writes its eighth slot; sequence 2 has 8 old ones there.
    tables[1, 0] = tables[2, 0]
    feed["block_tables"] = tables
    with pytest.raises(ConfigError, match="is written by one sequence and read by another"):
        check_feed(feed, folder.manifest)
