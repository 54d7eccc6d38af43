"""PagedAttention: every implementation against a dense float64 attention written here, and what a row's bits may depend on."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenrt.plugins import reference

from .ops import (
    Array,
    Call,
    Implementation,
    Sizes,
    by_c,
    by_onnxruntime,
    by_onnxruntime_in_place,
    by_reference,
    by_torch,
    isas,
    make_call,
    run_in_place,
    using_isa,
)

IMPLEMENTATIONS = [by_reference, by_c, by_onnxruntime, by_onnxruntime_in_place, by_torch]
COMPILED = [by_c, by_onnxruntime, by_onnxruntime_in_place, by_torch]


def kv_rows(x: Array, kv_type: np.dtype[Any]) -> Array:
    """K or V [..., D] as the pool has it: int8 is followed by the float32 that its values are multiples of."""
    if kv_type != np.int8:
        return x.astype(kv_type)
    scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(np.divide(x, scale, out=np.zeros(x.shape), where=scale > 0))
    return np.concatenate([values.astype(np.int8), scale.view(np.int8)], -1)


def kv_values(rows: Array) -> Array:
    if rows.dtype != np.int8:
        return rows.astype(np.float64)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4] * scale.astype(np.float64)


def dense(call: Call, written: Array | None = None) -> tuple[Array, Array]:
    """The same in float64 with whole score matrices, a mask and no blocks; the new K and V rounded as the pool rounds them.

    written: a pool that has the new K and V, as rounded by another.
    """
    a = call.attributes
    heads, kv_heads, dim, block = a["num_heads"], a["num_kv_heads"], a["head_dim"], a["block_size"]
    cache = (call["kv_cache"] if written is None else written).copy()
    attn = np.zeros((len(call["qkv"]), heads * dim))
    for s, length in enumerate(call["seq_lens"]):
        start, end = call["query_start"][s : s + 2]
        if start == end:
            continue
        new = call["qkv"][start:end].astype(np.float64).reshape(end - start, heads + 2 * kv_heads, dim)
        parts = np.split(new, [heads, heads + kv_heads], axis=1)
        for part, norm in ((0, "q_norm"), (1, "k_norm")):
            x = parts[part]
            if call[norm].size:
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + a["norm_eps"]) * call[norm]
            angle = call["rope"][length - (end - start) : length].astype(np.float64)[:, None]
            as_complex = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
            turned = as_complex * (angle[..., : dim // 2] + 1j * angle[..., dim // 2 :])
            parts[part] = np.concatenate([turned.real, turned.imag], -1)
        slots = [(call["block_tables"][s, p // block], p % block) for p in range(length)]
        for i, (b, slot) in enumerate(slots[length - (end - start) :] if written is None else ()):
            cache[b, 0, :, slot] = kv_rows(parts[1][i], cache.dtype)
            cache[b, 1, :, slot] = kv_rows(parts[2][i], cache.dtype)
        visible = np.tri(end - start, length, length - (end - start), bool)
        if a["sliding_window"] > 0:
            visible &= ~np.tri(end - start, length, length - (end - start) - a["sliding_window"], bool)
        k, v = (kv_values(np.array([cache[b, j, :, slot] for b, slot in slots])) for j in (0, 1))
        # What no row sees may be NaN.
        k[~visible.any(0)] = v[~visible.any(0)] = 0
        for head in range(heads):
            scores = np.where(visible, parts[0][:, head] @ k[:, head * kv_heads // heads].T * a["scale"], -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out = weights @ v[:, head * kv_heads // heads] / weights.sum(-1, keepdims=True)
            attn[start:end, head * dim : (head + 1) * dim] = out
    return attn, cache


CASES = {
    "one token alone": Sizes(),
    "one decode": Sizes(old=(9,)),
    "a prefill": Sizes(new=(37,)),
    "no sequence at all": Sizes(new=(), old=(), padding=2),
    "nothing at all": Sizes(new=(), old=()),
    "sequences without rows": Sizes(new=(0, 3, 0), old=(5, 2, 0)),
    "only sequences without rows": Sizes(new=(0, 0), old=(5, 2)),
    "mixed with padding": Sizes(new=(1, 6, 1, 11), old=(17, 0, 4, 5), padding=5),
    "no norm": Sizes(new=(5, 1), old=(3, 8), norm=False),
    "multi-head": Sizes(new=(7, 1), old=(2, 40), num_heads=3, num_kv_heads=3),
    "groups of 4": Sizes(new=(7, 1), old=(2, 40), num_heads=8, num_kv_heads=2),
    "groups of 8": Sizes(new=(7, 1), old=(2, 40), num_heads=8, num_kv_heads=1),
    "groups of 16": Sizes(new=(7, 1), old=(2, 40), num_heads=16, num_kv_heads=1),
    "groups of 5": Sizes(new=(40, 1), old=(2, 40), num_heads=10, num_kv_heads=2),
    "more heads than a tile's rows": Sizes(new=(3, 1), old=(2, 40), num_heads=130, num_kv_heads=1, head_dim=8),
    "head_dim 40": Sizes(new=(7, 1), old=(2, 40), head_dim=40),
    "head_dim 64": Sizes(new=(7, 1), old=(2, 40), head_dim=64),
    "head_dim 128": Sizes(new=(7, 1), old=(2, 40), head_dim=128),
    "block of 1": Sizes(new=(7, 1), old=(2, 40), block_size=1),
    "block of 5": Sizes(new=(7, 1, 33), old=(2, 40, 0), block_size=5),
    "block of 16": Sizes(new=(16, 1, 17), old=(0, 15, 16), block_size=16),
    "block of 32": Sizes(new=(32, 1, 33), old=(31, 31, 32), block_size=32),
    "block of 128": Sizes(new=(128, 1, 1), old=(3, 127, 128), block_size=128),
    "float16 cache": Sizes(new=(9, 1, 50), old=(2, 90, 0), kv_type=np.float16),
    "float16 cache, groups of 16": Sizes(new=(9, 1), old=(2, 90), num_heads=16, num_kv_heads=1, kv_type=np.float16),
    "float16 cache, head_dim 40": Sizes(new=(9, 1), old=(2, 90), head_dim=40, kv_type=np.float16),
    "int8 cache": Sizes(new=(9, 1, 50), old=(2, 90, 0), kv_type=np.int8),
    "int8 cache, groups of 16": Sizes(new=(9, 1), old=(2, 90), num_heads=16, num_kv_heads=1, kv_type=np.int8),
    "int8 cache, head_dim 40": Sizes(new=(9, 1), old=(2, 90), head_dim=40, kv_type=np.int8),
    "int8 cache, head_dim 128": Sizes(new=(7, 1), old=(2, 600), head_dim=128, block_size=32, kv_type=np.int8),
    "int8 cache, head_dim 640": Sizes(new=(7, 1), old=(2, 40), head_dim=640, kv_type=np.int8),
    "int8 cache, groups of 5": Sizes(new=(40, 1), old=(2, 40), num_heads=10, num_kv_heads=2, kv_type=np.int8),
    "int8 cache, two query tiles": Sizes(new=(100,), old=(450,), block_size=16, kv_type=np.int8),
    "int8 cache, window over chunks": Sizes(
        new=(100, 1), old=(980, 1090), sliding_window=600, block_size=16, kv_type=np.int8
    ),
    "int8 cache, no norm, window of 7": Sizes(new=(70, 1), old=(2, 90), norm=False, sliding_window=7, kv_type=np.int8),
    "window of 1": Sizes(new=(9, 1), old=(2, 90), sliding_window=1),
    "window of 7": Sizes(new=(70, 1), old=(2, 90), sliding_window=7),
    "window of 32": Sizes(new=(70, 1), old=(2, 90), sliding_window=32, block_size=16),
    "window over chunks": Sizes(new=(100, 1), old=(980, 1090), sliding_window=600, block_size=16),
    "window wider than the context": Sizes(new=(70, 1), old=(2, 90), sliding_window=1000),
    "chunk edges": Sizes(new=(3, 1, 1, 1), old=(510, 510, 511, 512), block_size=16),
    "two query tiles": Sizes(new=(100,), old=(450,), block_size=16),
    "large scores": Sizes(new=(20, 1), old=(2, 90), scale=30.0),
    "negative scale": Sizes(new=(20, 1), old=(2, 90), scale=-1.0),
    "4k context": Sizes(new=(2, 1), old=(4093, 4096), num_heads=2, num_kv_heads=1, head_dim=64, block_size=32),
}


def check(implementation: Implementation, call: Call) -> None:
    want, want_cache = dense(call)
    given = {name: tensor.copy() for name, tensor in call.tensors.items()}
    attn, cache = implementation(call)
    assert attn.dtype == np.float32
    assert cache.dtype == call["kv_cache"].dtype
    got_rows, want_rows = kv_values(cache), kv_values(want_cache)
    if cache.dtype == np.int8:
        # What lies halfway between two integers may become either.
        step = np.abs(want_rows).max(-1, keepdims=True) / 127
        assert ((np.abs(got_rows - want_rows) <= 1.01 * step) | np.isnan(want_rows)).all()
        assert (cache == want_cache).mean() > 0.99
        want, _ = dense(call, cache)
    else:
        rtol = 2e-3 if cache.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(got_rows, want_rows, rtol=rtol, atol=1e-5)
    # With an int8 pool q and weights are rounded to 16 bits.
    tolerance = 2e-4 if cache.dtype == np.int8 else 2e-5
    np.testing.assert_allclose(attn, want, rtol=tolerance, atol=tolerance)
    for name, tensor in given.items():
        np.testing.assert_array_equal(call[name], tensor)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(implementation: Implementation, case: str) -> None:
    check(implementation, make_call(CASES[case]))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_equals_dense_attention(isa: str, case: str) -> None:
    with using_isa(isa):
        check(by_c, make_call(CASES[case]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_share_the_blocks_of_a_prefix(implementation: Implementation) -> None:
    call = make_call(Sizes(new=(3, 1, 6), old=(8, 10, 8), block_size=4))
    tables = call["block_tables"].copy()
    tables[1, :2] = tables[2, :2] = tables[0, :2]
    cache = call["kv_cache"].copy()
    cache[np.isnan(cache)] = 0
    check(implementation, call.but(block_tables=tables, kv_cache=cache))


@pytest.mark.parametrize("implementation", COMPILED)
def test_swapped_norm_weights_change_the_result(implementation: Implementation) -> None:
    call = make_call(Sizes(new=(5,), old=(4,)))
    swapped = call.but(q_norm=call["k_norm"], k_norm=call["q_norm"])
    assert np.abs(implementation(call)[0] - implementation(swapped)[0]).max() > 1e-2


@pytest.mark.parametrize("implementation", COMPILED)
def test_epsilon_is_read_from_the_node(implementation: Implementation) -> None:
    call = make_call(Sizes(new=(5,), old=(4,)))
    small = call.but(qkv=call["qkv"] * np.float32(1e-3)).with_attributes(norm_eps=1e-3)
    check(implementation, small)


@pytest.mark.parametrize("implementation", COMPILED)
def test_one_norm_may_be_absent(implementation: Implementation) -> None:
    check(implementation, make_call(Sizes(new=(5,), old=(4,))).but(q_norm=np.zeros(0, np.float32)))


@pytest.mark.parametrize("isa", isas())
def test_the_largest_window_is_no_window(isa: str) -> None:
    call = make_call(Sizes(new=(70, 1), old=(2, 90)))
    with using_isa(isa):
        np.testing.assert_array_equal(by_c(call.with_attributes(sliding_window=2**63 - 1))[0], by_c(call)[0])


def test_float16_cache_rounds_as_numpy_does() -> None:
    """Subnormals, ties, overflow to infinity and NaN included."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(4096) * 10.0 ** rng.integers(-9, 6, 4096)).astype(np.float32)
    ties = np.float32(
        [65504, 65519.996, 65520, -1e30, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.0**-14, 1 + 2.0**-11, np.inf, np.nan]
    )
    values[: len(ties)] = ties
    call = make_call(
        Sizes(new=(64,), num_heads=1, num_kv_heads=1, head_dim=64, block_size=64, kv_type=np.float16, spare_blocks=0)
    )
    qkv = call["qkv"].copy()
    qkv[:, 128:] = values.reshape(64, 64)
    with np.errstate(over="ignore"):
        want = values.reshape(64, 64).astype(np.float16)
    for isa in isas():
        with using_isa(isa):
            _, cache = by_c(call.but(qkv=qkv))
        np.testing.assert_array_equal(cache[0, 1, 0], want)


@pytest.mark.parametrize("isa", isas())
def test_int8_cache_rounds_as_the_reference_does(isa: str) -> None:
    values = np.random.default_rng(3).standard_normal((64, 40)).astype(np.float32) * np.logspace(-3, 3, 64)[:, None]
    values[0], values[1], values[2, 3], values[3, 4], values[4, 5] = 0, 1e-35, np.inf, np.nan, -np.inf
    values = values.astype(np.float32)
    call = make_call(
        Sizes(new=(64,), num_heads=1, num_kv_heads=1, head_dim=40, block_size=64, kv_type=np.int8, spare_blocks=0)
    )
    qkv = call["qkv"].copy()
    qkv[:, 80:] = values
    with using_isa(isa):
        _, cache = by_c(call.but(qkv=qkv))
    np.testing.assert_array_equal(cache[0, 1, 0], reference.kv_rows(values, np.int8))


# What a row's bits may depend on: its own sequence, and nothing else.

LONG = Sizes(new=(600, 1, 37, 1, 9), old=(0, 1300, 500, 3, 0), num_heads=6, num_kv_heads=2, head_dim=32, block_size=16)
VARIANTS = [
    {},
    {"kv_type": np.float16},
    {"kv_type": np.int8},
    {"kv_type": np.int8, "sliding_window": 45},
    {"kv_type": np.int8, "head_dim": 40, "num_heads": 16, "num_kv_heads": 1},
    {"sliding_window": 45},
    {"num_kv_heads": 6},
    {"num_heads": 16, "num_kv_heads": 1},
]


def variant(changes: dict[str, object]) -> Call:
    return make_call(Sizes(**vars(LONG) | changes))


def part(call: Call, sequence: int, count: int, end: int) -> Call:
    """`count` tokens of one sequence up to position `end`, alone."""
    row = call["query_start"][sequence + 1] - (call["seq_lens"][sequence] - end)
    return call.but(
        qkv=call["qkv"][row - count : row],
        positions=call["positions"][row - count : row],
        block_tables=call["block_tables"][sequence : sequence + 1],
        seq_lens=np.array([end], np.int32),
        query_start=np.array([0, count], np.int32),
    )


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_bits_do_not_depend_on_threads(isa: str, changes: dict[str, object]) -> None:
    """Nor, with that, on whether contexts and heads are divided among them."""
    call = variant(changes)
    with using_isa(isa):
        want = by_c(call, threads=1)
        for threads in (2, 3, 64):
            got = by_c(call, threads=threads)
            np.testing.assert_array_equal(got[0], want[0])
            np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_bits_do_not_depend_on_the_other_sequences(isa: str, changes: dict[str, object]) -> None:
    call = variant(changes)
    with using_isa(isa):
        want, _ = by_c(call)
        for s in range(len(call["seq_lens"])):
            start, end = call["query_start"][s : s + 2]
            alone, _ = by_c(part(call, s, end - start, call["seq_lens"][s]), threads=64)
            np.testing.assert_array_equal(alone, want[start:end])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 32, 100, 513])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(isa: str, changes: dict[str, object], chunk: int) -> None:
    call = variant(changes)
    with using_isa(isa):
        want, want_cache = by_c(call)
        cache = call["kv_cache"].copy()
        length = 600
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            got = run_in_place(part(call, 0, end - start, end), cache, threads=1 + start % 2)
            np.testing.assert_array_equal(got, want[start:end])
        used = call["block_tables"][0, : -(-length // 16)]
        np.testing.assert_array_equal(cache[used], want_cache[used])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kv_type", [np.float32, np.float16, np.int8])
def test_what_is_no_number_reaches_only_the_rows_that_see_it(isa: str, kv_type: Any) -> None:
    call = make_call(Sizes(new=(70, 3), old=(2, 9), kv_type=kv_type))
    qkv = call["qkv"].copy()
    qkv[50] = np.nan
    with using_isa(isa):
        want, _ = by_c(call)
        got, _ = by_c(call.but(qkv=qkv))
    np.testing.assert_array_equal(got[:50], want[:50])
    np.testing.assert_array_equal(got[70:], want[70:])
    assert np.isnan(got[50:70]).all()


@pytest.mark.parametrize("isa", isas())
def test_bits_do_not_depend_on_block_ids_and_size(isa: str) -> None:
    with using_isa(isa):
        call = variant({})
        want, _ = by_c(call)
        order = np.random.default_rng(5).permutation(len(call["kv_cache"]))
        cache = np.empty_like(call["kv_cache"])
        cache[order] = call["kv_cache"]
        tables = call["block_tables"].copy()
        for s, length in enumerate(call["seq_lens"]):
            tables[s, : -(-length // 16)] = order[tables[s, : -(-length // 16)]]
        np.testing.assert_array_equal(by_c(call.but(kv_cache=cache, block_tables=tables))[0], want)

        # The pool in blocks of 4: block b of 16 becomes 4 b to 4 b + 3.
        blocks, _, heads, _, dim = cache.shape
        small = (
            call["kv_cache"]
            .reshape(blocks, 2, heads, 4, 4, dim)
            .transpose(0, 3, 1, 2, 4, 5)
            .reshape(blocks * 4, 2, heads, 4, dim)
        )
        wide = (call["block_tables"].astype(np.int64)[:, :, None] * 4 + np.arange(4)).reshape(len(tables), -1)
        small_tables = np.clip(wide, -1, 2**31 - 1).astype(np.int32)
        cut = call.but(kv_cache=np.ascontiguousarray(small), block_tables=small_tables).with_attributes(block_size=4)
        np.testing.assert_array_equal(by_c(cut)[0], want)


def test_onnxruntime_and_ctypes_give_the_same_bits() -> None:
    call = variant({})
    want = by_c(call)
    for implementation in (by_onnxruntime, by_onnxruntime_in_place, by_torch):
        got = implementation(call)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """Only the last block is used, of a sparse file; 32-bit offsets would wrap."""
    small = make_call(
        Sizes(new=(5,), num_heads=16, num_kv_heads=8, head_dim=128, block_size=16, kv_type=np.float16, spare_blocks=0)
    )
    want, want_cache = by_c(small)
    blocks = 65536 + 2
    shape = (blocks, *small["kv_cache"].shape[1:])
    path = tmp_path / "pool"
    with path.open("w+b") as file:
        file.truncate(int(np.prod(shape)) * 2)
        with mmap.mmap(file.fileno(), 0) as memory:
            pool = np.frombuffer(memory, np.float16).reshape(shape)
            assert pool.size > 2**31
            got = run_in_place(small.but(block_tables=np.full((1, 1), blocks - 1, np.int32)), pool)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(pool[-1, :, :, :5], want_cache[0, :, :, :5])
            assert not pool[0].any()
            del pool
    assert path.stat().st_blocks * 512 < 2**24
