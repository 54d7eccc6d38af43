"""Matrices packed as quantising tools pack them, from codes, scales and zero points; and what they then stand for.

The packers are the formats' definitions read the other way round from our decoder: one code at a time, in Python integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "awq": {
        "backend": "autoawq",
        "bits": 4,
        "do_fuse": False,
        "group_size": 32,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "desc_act": True,
        "group_size": 32,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": False,
        "true_sequential": True,
    },
    "gptq-v2": {"bits": 4, "checkpoint_format": "gptq_v2", "group_size": 32, "quant_method": "gptq", "sym": False},
    "gptq-int8": {"bits": 8, "desc_act": False, "group_size": -1, "quant_method": "gptq", "sym": True},
    "w8a8": {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "int"},
                "targets": ["Linear"],
                "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
            }
        },
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    "w4a16": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"},
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
    },
}
"""Per kind of checkpoint, what the tools that write them put into config.json as quantization_config."""


def quantized(kind: str, rows: int, columns: int, seed: int) -> tuple[Tensors, Array]:
    """A random matrix as a checkpoint of this kind holds it, by what follows the module's name; and what it stands for."""
    rng = np.random.default_rng(seed)
    if kind == "fp8":
        grid = (-(-rows // 128), -(-columns // 128))
        scales = (rng.uniform(0.5, 2, grid) / columns**0.5).astype(ml_dtypes.bfloat16)
        tensors = fp8(rng.standard_normal((rows, columns)), scales)
        return tensors, fp8_value(tensors, (128, 128))
    if kind == "w8a8":
        codes = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        scale = (rng.uniform(0.5, 2, (rows, 1)) / 74 / columns**0.5).astype(ml_dtypes.bfloat16)
        return {"weight": codes, "weight_scale": scale}, codes * scale.astype(np.float32)
    int8 = kind == "gptq-int8"
    matrix = random_codes(
        rows,
        columns,
        bits=8 if int8 else 4,
        group_size=columns if int8 else 32,
        symmetric=int8 or kind == "w4a16",
        act_order=kind == "gptq",
        seed=seed,
    )
    if kind == "w4a16":
        shape = np.array([rows, columns])
        packed_codes = {"weight_packed": packed(matrix.codes, 4), "weight_scale": matrix.scales, "weight_shape": shape}
        return packed_codes, matrix.value()
    if kind == "awq":
        return awq(matrix), matrix.value()
    return gptq(matrix, bits=8 if int8 else 4, version=2 if kind == "gptq-v2" else 1), matrix.value()


@dataclasses.dataclass(frozen=True)
class Codes:
    """Unsigned codes [rows, columns], zero points and scales [rows, groups], and each column's group."""

    codes: Array
    zeros: Array
    scales: Array
    groups: Array

    def value(self) -> Array:
        """What the codes stand for: in float64, where the products are exact, then rounded to float32 once."""
        difference = self.codes.astype(np.float64) - self.zeros[:, self.groups]
        return (difference * self.scales[:, self.groups].astype(np.float64)).astype(np.float32)


def random_codes(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: npt.DTypeLike = np.float16,
    seed: int = 0,
) -> Codes:
    """Every code and zero point is equally likely; scales are such that values have about the size of a trained weight's."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // group_size)
    index = np.arange(columns) // group_size
    zeros = rng.integers(0, 1 << bits, (rows, groups))
    return Codes(
        rng.integers(0, 1 << bits, (rows, columns)),
        np.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros,
        (rng.uniform(0.5, 2, (rows, groups)) / (1 << bits) / columns**0.5).astype(dtype),
        rng.permutation(index) if act_order else index,
    )


def words(codes: Sequence[int], bits: int) -> list[int]:
    """Codes in 32-bit words, the first in the lowest bits; the last word is filled up with zeros."""
    per_word = 32 // bits
    found = []
    for start in range(0, len(codes), per_word):
        word = sum(int(code) << (bits * place) for place, code in enumerate(codes[start : start + per_word]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def packed(codes: Array, bits: int) -> Array:
    """Each row in words."""
    return np.array([words(row.tolist(), bits) for row in codes], np.int32)


def gptq(matrix: Codes, *, bits: int = 4, version: int = 1, g_idx: bool = True) -> Tensors:
    """AutoGPTQ's tensors; version 1 stores zero points less one."""
    zeros = (matrix.zeros.T - (version == 1)) % (1 << bits)
    tensors = {
        "qweight": packed(matrix.codes, bits).T.copy(),
        "qzeros": packed(zeros, bits),
        "scales": matrix.scales.T.copy(),
    }
    return tensors | ({"g_idx": matrix.groups.astype(np.int32)} if g_idx else {})


def awq(matrix: Codes) -> Tensors:
    """AutoAWQ's tensors, version gemm: place i of a word holds row (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    order = [8 * word + row for word in range(len(matrix.codes) // 8) for row in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": packed(matrix.codes.T[:, order], 4),
        "qzeros": packed(matrix.zeros.T[:, order], 4),
        "scales": matrix.scales.T.copy(),
    }


def fp8(values: Array, scales: Array, name: str = "weight_scale_inv") -> Tensors:
    """Values as 8-bit floats, and the scales of their blocks."""
    return {"weight": values.astype(ml_dtypes.float8_e4m3fn), name: scales}


def fp8_value(tensors: Tensors, block: tuple[int, int], name: str = "weight_scale_inv") -> Array:
    """What they stand for, block by block."""
    values, scales = tensors["weight"].astype(np.float32), tensors[name].astype(np.float32)
    for row in range(0, values.shape[0], block[0]):
        for column in range(0, values.shape[1], block[1]):
            values[row : row + block[0], column : column + block[1]] *= scales[row // block[0], column // block[1]]
    return values
