"""MixtureOfExperts: against float64, which experts are chosen and with what share, and what a row's bits may depend on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qwenrt.plugins import reference
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS

from ..tolerance import relative_error
from .ops import ONNX_TYPES, Array, isas, library, run_node, using_isa
from .test_group_scales import grouped_weight
from .test_integer_linear import FORMATS, integer_weight

GROUPED = ["uint8-32", "uint8-8-offset", "int8-16-offset", "int8-128-offset"]


@dataclass(frozen=True)
class Layer:
    """One call."""

    x: Array
    router_logits: Array
    gate_up: Array
    down: Array
    top_k: int
    norm_topk_prob: int = 0
    gate_up_scale: Array | None = None
    down_scale: Array | None = None
    gate_up_groups: Array | None = None
    down_groups: Array | None = None
    gate_up_group_scale: Array | None = None
    down_group_scale: Array | None = None
    gate_up_group_offset: Array | None = None
    down_group_offset: Array | None = None

    @property
    def tensors(self) -> dict[str, Array]:
        names = [value.name for value in MIXTURE_OF_EXPERTS.inputs]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def attributes(self) -> dict[str, int]:
        return {"top_k": self.top_k, "norm_topk_prob": self.norm_topk_prob}

    def rows(self, *rows: int) -> Layer:
        return replace(self, x=self.x[list(rows)], router_logits=self.router_logits[list(rows)])


def layer(
    tokens: int = 5,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 24,
    inner: int = 16,
    dtype: npt.DTypeLike = np.float32,
    norm: int = 0,
    seed: int = 0,
) -> Layer:
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal((experts * 2 * inner, hidden), np.float32) / np.float32(hidden**0.5)
    down = rng.standard_normal((experts * hidden, inner), np.float32) / np.float32(inner**0.5)
    return Layer(
        rng.standard_normal((tokens, hidden), np.float32),
        rng.standard_normal((tokens, experts), np.float32),
        gate_up.astype(dtype),
        down.astype(dtype),
        top_k,
        norm,
    )


def integer_layer(
    kind: str, tokens: int, experts: int, hidden: int, inner: int, top_k: int = 2, seed: int = 0
) -> Layer:
    """A layer whose matrices are of integers, scaled to about the size of `layer`'s."""
    call = layer(tokens, experts, top_k, hidden, inner, norm=1, seed=seed)
    if kind in GROUPED:
        gate_up = grouped_weight(kind, experts * 2 * inner, hidden, seed)
        down = grouped_weight(kind, experts * hidden, inner, seed + 1)
        size = 128 if kind.startswith("int8") else 10
        return replace(
            call,
            gate_up=gate_up.weight,
            down=down.weight,
            gate_up_scale=gate_up.scale / np.float32(size * hidden**0.5),
            down_scale=down.scale / np.float32(size * inner**0.5),
            gate_up_groups=gate_up.groups,
            down_groups=down.groups,
            gate_up_group_scale=gate_up.group_scale,
            down_group_scale=down.group_scale,
            gate_up_group_offset=gate_up.group_offset,
            down_group_offset=down.group_offset,
        )
    gate_up, gate_up_scale, gate_up_groups = integer_weight(kind, experts * 2 * inner, hidden, seed)
    down, down_scale, down_groups = integer_weight(kind, experts * hidden, inner, seed + 1)
    return replace(
        call,
        gate_up=gate_up,
        down=down,
        gate_up_scale=gate_up_scale / np.float32(60 * hidden**0.5),
        down_scale=down_scale / np.float32(60 * inner**0.5),
        gate_up_groups=gate_up_groups,
        down_groups=down_groups,
    )


def by_reference(call: Layer) -> Array:
    return reference.mixture_of_experts(**call.tensors, **call.attributes)


def by_onnxruntime(call: Layer) -> Array:
    inputs = [call.tensors.get(value.name) for value in MIXTURE_OF_EXPERTS.inputs]
    return run_node("MixtureOfExperts", inputs, **call.attributes)


def by_torch(call: Layer) -> Array:
    import torch

    from qwenrt.plugins import torch_experts

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    tensors = [tensor(call.tensors[v.name]) if v.name in call.tensors else None for v in MIXTURE_OF_EXPERTS.inputs]
    y: Array = torch_experts.mixture_of_experts(*tensors, *call.attributes.values()).numpy()
    return y


class Weight(ctypes.Structure):
    """QwenrtWeight of plugins/cpu/c_api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "groups", "group_scale", "group_offset")),
        *((name, ctypes.c_int64) for name in ("width", "depth", "group_size")),
        ("type", ctypes.c_int32),
    )


class Arguments(ctypes.Structure):
    """QwenrtMixtureOfExperts of plugins/cpu/c_api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "router_logits")),
        *((name, Weight) for name in ("gate_up", "down")),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "inner", "num_experts", "top_k")),
        ("norm_topk_prob", ctypes.c_int32),
    )


def float_weight(array: Array) -> Weight:
    width, depth = array.shape
    return Weight(data=array.ctypes.data, width=width, depth=depth, type=ONNX_TYPES[array.dtype])


def by_c(call: Layer, threads: int = 1) -> Array:
    """Matrices of floats."""
    y = np.full_like(call.x, np.nan)
    arguments = Arguments(
        x=call.x.ctypes.data,
        router_logits=call.router_logits.ctypes.data,
        gate_up=float_weight(call.gate_up),
        down=float_weight(call.down),
        y=y.ctypes.data,
        tokens=len(call.x),
        hidden=call.x.shape[1],
        inner=call.down.shape[1],
        num_experts=call.router_logits.shape[1],
        **call.attributes,
    )
    error = ctypes.create_string_buffer(500)
    if library().qwenrt_mixture_of_experts(ctypes.byref(arguments), threads, error, ctypes.c_size_t(len(error))):
        raise ValueError(error.value.decode())
    return y


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"tokens": 0},
    {"tokens": 1, "experts": 1, "top_k": 1},
    {"tokens": 70, "experts": 128, "top_k": 8},
    {"tokens": 3, "experts": 3, "top_k": 3, "hidden": 7, "inner": 5},
    {"tokens": 40, "experts": 4, "top_k": 1, "hidden": 40, "inner": 70},
    {"tokens": 1500, "experts": 4, "top_k": 2, "hidden": 8, "inner": 8},
)


@pytest.mark.parametrize("implementation", [by_onnxruntime, by_torch, by_c])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_a_float64_computation(implementation: Any, norm: int, shape: dict[str, Any]) -> None:
    call = layer(**shape, norm=norm)
    np.testing.assert_allclose(implementation(call), by_reference(call), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_instruction_set_and_type(isa: str, dtype: npt.DTypeLike) -> None:
    call = layer(tokens=9, hidden=37, inner=45, top_k=3, dtype=dtype)
    with using_isa(isa):
        np.testing.assert_allclose(by_onnxruntime(call), by_reference(call), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(by_torch(call), by_reference(call), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", [*FORMATS, *GROUPED])
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner"),
    [(0, 4, 16, 16), (1, 4, 64, 48), (9, 8, 144, 80), (70, 3, 208, 112), (1300, 3, 48, 32)],
)
def test_integers_on_every_instruction_set(
    isa: str, kind: str, tokens: int, experts: int, hidden: int, inner: int
) -> None:
    call = integer_layer(kind, tokens, experts, hidden, inner)
    with using_isa(isa):
        y = by_onnxruntime(call)
    # An inner value that lies between two integers may be rounded to either.
    assert relative_error(y, by_reference(call)) < 4e-3
    assert not tokens or np.abs(y).max() > 0.1


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", [*FORMATS, *GROUPED])
def test_a_row_of_integer_experts_has_the_same_bits_whatever_else_is_computed(isa: str, kind: str) -> None:
    call = integer_layer(kind, tokens=150, experts=6, hidden=80, inner=48, top_k=3)
    with using_isa(isa):
        whole = by_onnxruntime(call)
        for rows in ([0], [149, 5], list(range(30, 90)), list(range(149, -1, -1))):
            np.testing.assert_array_equal(by_onnxruntime(call.rows(*rows)), whole[rows])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_scale": None}, "gate_up_scale is missing"),
        ({"down_groups": None}, "down_groups is missing"),
        ({"gate_up_scale": np.ones(250, np.float32)}, "gate_up has 250 rows, expected 240"),
        ({"down_scale": np.ones(250, np.float32)}, "down has 250 rows, expected 256|down has shape"),
    ],
    ids=str,
)
def test_integer_experts_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        by_onnxruntime(replace(integer_layer("int4-32", 5, 8, 32, 16), **changes))


@pytest.mark.parametrize(("hidden", "inner"), [(24, 16), (16, 24)])
def test_integer_experts_fill_whole_panels(hidden: int, inner: int) -> None:
    with pytest.raises(Exception, match=f"experts of integers are {inner} by {hidden}; both must be multiples of 16"):
        by_onnxruntime(integer_layer("int8", 3, 2, hidden, inner))


def shares(call: Layer) -> Array:
    """What share each expert has of the first token, from a call in which expert e gives the token e-th unit vector."""
    experts = call.router_logits.shape[1]
    # silu(gate) * up of the only inner value is 1.
    one = 1.2784645427610738
    gate_up = np.tile(np.array([[one], [1]], np.float32), (experts, 1))
    y = by_onnxruntime(
        replace(
            call,
            x=np.eye(1, experts, dtype=np.float32),
            gate_up=np.concatenate([gate_up, np.zeros((2 * experts, experts - 1), np.float32)], 1),
            down=np.eye(experts, dtype=np.float32).reshape(-1, 1),
        )
    )
    return y[0] if y.size else y


def routed(logits: list[float], top_k: int, norm: int) -> list[float]:
    router = np.array([logits], np.float32)
    call = Layer(np.zeros((1, len(logits)), np.float32), router, np.zeros(0), np.zeros(0), top_k, norm)
    return list(shares(call))


def test_shares_of_the_softmax_over_all_experts() -> None:
    """Case L11: two ways of normalising, and only one of them a softmax over the chosen."""
    np.testing.assert_allclose(routed([2, 1, 0.5, -1], 2, 1), [0.731059, 0.268941, 0, 0], atol=1e-6)
    np.testing.assert_allclose(routed([2, 1, 0.5, -1], 2, 0), [0.609460, 0.224208, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "top_k", "chosen"),
    [
        ([1, 1, 1, 1], 2, [0, 1]),
        ([0, 1, 0, 1], 2, [1, 3]),
        ([0, 1, 1, 1], 2, [1, 2]),
        ([-3, -2, -1, 0], 4, [0, 1, 2, 3]),
        ([200, -200, 100, 0], 1, [0]),
        ([-np.inf, 0, -np.inf, -1], 2, [1, 3]),
    ],
)
def test_the_largest_are_chosen_and_the_lower_index_among_equals(
    logits: list[float], top_k: int, chosen: list[int]
) -> None:
    assert list(np.flatnonzero(routed(logits, top_k, 1))) == chosen


def test_logits_that_are_no_numbers_spoil_their_own_row_alone() -> None:
    call = layer(tokens=3)
    call.router_logits[1, 4] = np.nan
    y = by_onnxruntime(call)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], by_onnxruntime(call.rows(0, 2)))


def test_an_expert_without_tokens_is_not_read() -> None:
    call = layer(tokens=6, experts=4, top_k=2)
    call.router_logits[:, 2] = -100
    expected = by_onnxruntime(call)
    call.gate_up.reshape(4, -1)[2] = np.nan
    call.down.reshape(4, -1)[2] = np.nan
    np.testing.assert_array_equal(by_onnxruntime(call), expected)
    call.router_logits[:, 2] = 100
    assert np.isnan(by_onnxruntime(call)).all()


def test_all_tokens_may_go_to_one_expert() -> None:
    call = layer(tokens=1300, experts=4, top_k=1)
    call.router_logits[:, 3] = 9
    np.testing.assert_allclose(by_onnxruntime(call), by_reference(call), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("inner", [20, 40])
def test_a_row_has_the_same_bits_whatever_else_is_computed(isa: str, dtype: npt.DTypeLike, inner: int) -> None:
    call = layer(tokens=400, experts=6, top_k=3, hidden=72, inner=inner, dtype=dtype)
    with using_isa(isa):
        whole = by_onnxruntime(call)
        for rows in ([0], [399, 5], list(range(100, 333)), list(range(399, -1, -1))):
            np.testing.assert_array_equal(by_onnxruntime(call.rows(*rows)), whole[rows])
        for threads in (1, 2, 3):
            np.testing.assert_array_equal(by_c(call, threads), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k is 0; it must be between 1 and the 8 experts"),
        ({"top_k": 9}, "top_k is 9"),
        ({"x": np.zeros((4, 24), np.float32)}, r"router_logits has shape \[5, 8\], expected \[4, 8\]"),
        ({"x": np.zeros((5, 23), np.float32)}, r"gate_up has shape \[256, 24\], expected \[256, 23\]"),
        ({"down": np.zeros((192, 15), np.float32)}, r"down has shape \[192, 15\], expected \[192, 16\]"),
        ({"down": np.zeros((191, 16), np.float32)}, "down has 191 rows, expected 192"),
        ({"gate_up": np.zeros((250, 24), np.float32)}, "gate_up has 250 rows, expected 240"),
        ({"down": np.zeros(16, np.float32)}, r"down has shape \[16\], expected 2 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        by_onnxruntime(replace(layer(), **changes))
