"""What the machine can do at most, measured: how fast its threads read memory, and how fast they multiply."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

_BANDWIDTH_BYTES = 1 << 30
_PRODUCT = 1024
"""Rows, columns and depth of the products: 12 MB in float32, so that a cache holds much of it."""


def measure(threads: int, repeats: int) -> dict[str, Any]:
    """Each figure `repeats` times, with `threads` threads: read_gb_s, float32_gflop_s and int8_gop_s (1e9 a second).

    read_gb_s: matrix-vector products over 1 GiB, one BLAS thread on each slice. float32_gflop_s: NumPy's matrix product (BLAS) of
    1024 x 1024 x 1024, one in each thread; a multiply-add counts as two. int8_gop_s: the same product of uint8 and int8 by ONNX
    Runtime's MatMulInteger, which takes VNNI or AMX where the CPU has it. Needs OPENBLAS_NUM_THREADS=1 in the environment.
    """
    with ThreadPoolExecutor(threads) as pool:
        return {
            "read_gb_s": _read(pool, threads, repeats),
            "float32_gflop_s": _rates(_float32_products(pool, threads), repeats),
            "int8_gop_s": _rates(_int8_products(threads), repeats),
        }


def _read(pool: ThreadPoolExecutor, threads: int, repeats: int) -> list[float]:
    columns = 4096
    matrix = np.ones((_BANDWIDTH_BYTES // 4 // columns, columns), np.float32)
    vector = np.ones(columns, np.float32)
    slices = np.array_split(matrix, threads)

    def read() -> float:
        sums = list(pool.map(lambda part: part @ vector, slices))
        assert all((part == columns).all() for part in sums)
        return matrix.nbytes

    return _rates(read, repeats)


def _float32_products(pool: ThreadPoolExecutor, threads: int) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    left, right = rng.random((2, _PRODUCT, _PRODUCT), np.float32)
    outs = [np.empty_like(left) for _ in range(threads)]

    def multiply() -> float:
        list(pool.map(lambda out: np.matmul(left, right, out=out), outs))
        return 2 * threads * _PRODUCT**3

    return multiply


def _int8_products(threads: int) -> Callable[[], float]:
    rows = _PRODUCT * threads
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (_PRODUCT, _PRODUCT), np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["c"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, [rows, _PRODUCT])],
        [helper.make_tensor_value_info("c", TensorProto.INT32, [rows, _PRODUCT])],
        [onnx.numpy_helper.from_array(weight, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {"a": rng.integers(0, 256, (rows, _PRODUCT), np.uint8)}

    def multiply() -> float:
        session.run(None, inputs)
        return 2 * rows * _PRODUCT**2

    return multiply


def _rates(work: Callable[[], float], repeats: int) -> list[float]:
    """1e9 a second of what `work` says it has done, of `repeats` runs after one that does not count."""
    rates = []
    for _ in range(repeats + 1):
        start = perf_counter()
        done = work()
        rates.append(done / (perf_counter() - start) / 1e9)
    return rates[1:]
