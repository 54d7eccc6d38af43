"""PagedAttention refuses what breaks its rules: it says which input, where and which value, and has written nothing by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .ops import Array, Call, Sizes, by_c, by_onnxruntime, by_onnxruntime_in_place, by_torch, make_call, run_in_place

SIZES = Sizes(new=(3, 0, 2), old=(6, 0, 1), padding=1, spare_blocks=3)  # 3 + 0 + 1 blocks of 4 tokens, and 3


def changed(name: str, index: Any, value: int) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        tensor = call[name].copy()
        tensor[index] = value
        return call.but(**{name: tensor})

    return change


def reshaped(name: str, *shape: int) -> Callable[[Call], Call]:
    return lambda call: call.but(**{name: np.zeros(shape, call[name].dtype)})


VALUES = {
    "query_start does not start at 0": (changed("query_start", 0, 1), r"query_start\[0\] is 1"),
    "query_start falls": (changed("query_start", 2, 2), r"query_start\[2\] is 2, less than query_start\[1\] = 3"),
    "query_start negative": (changed("query_start", 1, -1), r"query_start\[1\] is -1"),
    "query_start past the rows": (changed("query_start", 3, 7), r"query_start\[3\] is 7, but qkv has 6 rows"),
    "length below count": (changed("seq_lens", 0, 2), r"seq_lens\[0\] is 2, less than the 3 rows"),
    "length negative": (changed("seq_lens", 2, -(2**31)), r"seq_lens\[2\] is -2147483648"),
    "length past the table": (
        changed("seq_lens", 0, 21),
        r"seq_lens\[0\] is 21, but block_tables has 5 columns of 4 tokens",
    ),
    "length past rope": (changed("seq_lens", 0, 13), r"seq_lens\[0\] is 13, but rope has 12 rows"),
    "position wrong": (changed("positions", 1, 8), r"positions\[1\] is 8, expected 7"),
    "position negative": (changed("positions", 3, -1), r"positions\[3\] is -1, expected 1"),
    "position huge": (changed("positions", 0, 2**31 - 1), r"positions\[0\] is 2147483647"),
    "block missing": (changed("block_tables", (0, 1), -1), r"block_tables\[0, 1\] is -1, but kv_cache has 7 blocks"),
    "block past the pool": (
        changed("block_tables", (2, 0), 7),
        r"block_tables\[2, 0\] is 7, but kv_cache has 7 blocks",
    ),
    "block huge": (changed("block_tables", (0, 2), 2**31 - 1), r"block_tables\[0, 2\] is 2147483647"),
}
SHAPES = {
    "qkv width": (reshaped("qkv", 6, 255), r"qkv has shape \[6, 255\], (expected|must be) \[6, 256\]"),
    "rope width": (reshaped("rope", 9, 30), r"rope has shape \[9, 30\]"),
    "positions": (reshaped("positions", 5), r"positions has shape \[5\], (expected|must be) \[6\]"),
    "kv_cache block": (reshaped("kv_cache", 7, 2, 2, 5, 32), r"kv_cache has shape \[7, 2, 2, 5, 32\]"),
    "kv_cache heads": (reshaped("kv_cache", 7, 2, 1, 4, 32), r"kv_cache has shape"),
    "block_tables rows": (reshaped("block_tables", 2, 5), r"block_tables has shape \[2, 5\]"),
    "query_start": (reshaped("query_start", 3), r"query_start has shape \[3\], (expected|must be) \[4\]"),
}
ORT_SHAPES = SHAPES | {
    "q_norm": (reshaped("q_norm", 31), r"q_norm has shape \[31\], expected \[32\]"),
    "k_norm": (reshaped("k_norm", 64), r"k_norm has shape \[64\]"),
    "qkv rank": (reshaped("qkv", 6), r"qkv has shape \[6\], expected 2 dimensions"),
    "kv_cache rank": (reshaped("kv_cache", 7, 2, 2, 4 * 32), r"kv_cache has shape .* expected 5 dimensions"),
    "seq_lens rank": (reshaped("seq_lens", 3, 1), r"seq_lens has shape .* expected 1 dimension"),
    "query_start rank": (reshaped("query_start", 4, 1), r"query_start has shape"),
    "no blocks": (reshaped("kv_cache", 0, 2, 2, 4, 32), r"but kv_cache has 0 blocks"),
    "no table": (reshaped("block_tables", 3, 0), r"block_tables has 0 columns"),
    "no rope": (reshaped("rope", 0, 32), r"rope has 0 rows"),
    "no sequences": (
        lambda call: reshaped("seq_lens", 0)(reshaped("block_tables", 0, 2)(call)),
        r"query_start has shape \[4\]",
    ),
}
ATTRIBUTES = {
    "heads": ({"num_heads": 5}, "num_heads is 5, which is not a multiple of num_kv_heads = 2"),
    "no heads": ({"num_heads": 0}, "num_heads is 0; it must be between 1 and"),
    "negative KV heads": ({"num_kv_heads": -2}, "num_kv_heads is -2"),
    "huge head_dim": ({"head_dim": 2**62}, "head_dim is 4611686018427387904; it must be between"),
    "odd head_dim": ({"head_dim": 12}, "head_dim is 12; the CPU kernels need a multiple of 8"),
    "no block": ({"block_size": 0}, "block_size is 0"),
    "window": ({"sliding_window": 0}, "sliding_window is 0; it must be positive, or -1"),
    "window below -1": ({"sliding_window": -2}, "sliding_window is -2"),
    "scale": ({"scale": float("nan")}, "scale is nan, which is not finite"),
    "epsilon": ({"norm_eps": -1.0}, "norm_eps is -1"),
}


def _unchanged_after(call: Call, run: Callable[[Call, Array], object], message: str) -> None:
    cache = call["kv_cache"].copy()
    with pytest.raises(Exception, match=message):
        run(call, cache)
    np.testing.assert_array_equal(cache, call["kv_cache"])


@pytest.mark.parametrize("case", VALUES)
def test_a_wrong_value_is_named_and_nothing_is_written(case: str) -> None:
    change, message = VALUES[case]
    _unchanged_after(change(make_call(SIZES)), run_in_place, message)


def test_two_sequences_that_write_one_slot_are_named() -> None:
    call = make_call(Sizes(new=(3, 0, 2), old=(5, 0, 5), padding=1))
    tables = call["block_tables"].copy()
    tables[2, 1] = tables[0, 1]
    shared = call.but(block_tables=tables)
    _unchanged_after(shared, run_in_place, r"block_tables\[2, 1\] is \d+: sequences 0 and 2 both write slot 1 of it")


def test_a_sequence_that_writes_one_block_twice_is_named() -> None:
    call = make_call(Sizes(new=(9,)))
    tables = call["block_tables"].copy()
    tables[0, 1] = tables[0, 0]
    _unchanged_after(
        call.but(block_tables=tables), run_in_place, r"block_tables\[0, 1\] is \d+: sequences 0 and 0 both write slot 0"
    )


@pytest.mark.parametrize("case", VALUES | ORT_SHAPES)
@pytest.mark.parametrize("run", [by_onnxruntime, by_onnxruntime_in_place])
def test_onnxruntime_reports_it(run: Callable[[Call], object], case: str) -> None:
    change, message = (VALUES | ORT_SHAPES)[case]
    with pytest.raises(Exception, match=message):
        run(change(make_call(SIZES)))


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_wrong_attributes_are_named_when_the_session_is_made(case: str) -> None:
    attributes, message = ATTRIBUTES[case]
    with pytest.raises(Exception, match=message):
        by_onnxruntime(make_call(SIZES).with_attributes(**attributes))


@pytest.mark.parametrize("case", VALUES | SHAPES)
def test_torch_reports_it(case: str) -> None:
    change, message = (VALUES | SHAPES)[case]
    with pytest.raises(ValueError, match=message):
        by_torch(change(make_call(SIZES)))


@pytest.mark.parametrize("name", ["qkv", "rope", "kv_cache", "block_tables", "seq_lens"])
def test_onnxruntime_refuses_another_element_type(name: str) -> None:
    call = make_call(SIZES)
    other = np.int32 if call[name].dtype == np.float32 else np.float32
    with pytest.raises(Exception, match=r"(?i)type"):
        by_onnxruntime(call.but(**{name: np.zeros(call[name].shape, other)}))


def test_what_no_row_needs_is_not_looked_at() -> None:
    """Blocks that a window has left behind may be gone; padding may hold anything."""
    call = make_call(Sizes(new=(1,), old=(40,), sliding_window=6, padding=2))
    tables = call["block_tables"].copy()
    want, _ = by_c(call)
    tables[0, : 35 // 4] = -1
    np.testing.assert_array_equal(by_c(call.but(block_tables=tables))[0], want)
