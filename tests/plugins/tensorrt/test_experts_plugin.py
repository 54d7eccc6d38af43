"""The plugin of MixtureOfExperts through its interfaces; what it shares with PagedAttention's is in test_plugin.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_check.cases import BFLOAT16, FLOAT16
from gpu_check.experts import ExpertsCase, check_experts, experts_suite, make_experts_call
from gpu_check.memory import aligned
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS

from .binding import EXPERTS_INPUTS, TYPES, DataType, FieldType, FieldValue, Host, Phase, Plugin, PluginOp

ATTRIBUTES = {"top_k": 8, "norm_topk_prob": 1}
SHAPES = {
    "x": (-1, 2048),
    "router_logits": (-1, 128),
    "gate_up": (128 * 2 * 768, 2048),
    "down": (128 * 2048, 768),
}
LARGEST = {**SHAPES, "x": (1024, 2048), "router_logits": (1024, 128)}
HALF = [DataType.HALF] * len(EXPERTS_INPUTS)


def shapes(base: dict[str, tuple[int, ...]] = SHAPES, **changes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list((base | changes).values())


def make(host: Host, values: dict[str, Any] = ATTRIBUTES, phase: Phase = Phase.BUILD) -> Plugin:
    host.messages()
    plugin = host.create(values, phase, op=MIXTURE_OF_EXPERTS.name)
    assert plugin is not None, host.messages()
    return plugin


def only_error(host: Host) -> str:
    (line,) = host.messages()
    assert line.startswith("1 MixtureOfExperts: "), line
    return line


def test_plugin_says_what_its_creator_says(host: Host) -> None:
    plugin = make(host)
    assert host.library.plugin_text(plugin.address).decode() == "PLUGIN_V3ONE_BUILD 2: /MixtureOfExperts/1"
    assert plugin.num_outputs == 1
    assert host.library.plugin_aliased_input(plugin.address, 0) == -1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_k": 0}, "top_k is 0, must be positive"),
        ({"norm_topk_prob": 2}, "norm_topk_prob is 2, must be 0 or 1"),
        ({"top_k": 8.0}, "top_k must be an integer"),
        ({"top_k": FieldValue(FieldType.INT64, (2**32 + 8,))}, "top_k is 4294967304"),
        ({"num_experts": 8}, "unknown attribute num_experts; there are: top_k, norm_topk_prob"),
    ],
    ids=str,
)
def test_a_wrong_attribute_is_named(host: Host, changes: dict[str, Any], named: str) -> None:
    host.messages()
    assert host.create(ATTRIBUTES | changes, name="layers.7/experts", op=MIXTURE_OF_EXPERTS.name) is None
    line = only_error(host)
    assert named in line
    assert 'node "layers.7/experts"' in line


def test_a_plan_gives_the_plugin_back(host: Host) -> None:
    plugin = make(host, {"top_k": 3, "norm_topk_prob": 0})
    kept = plugin.serialized()
    assert kept == {"top_k": 3, "norm_topk_prob": 0, "plan_version": 1}
    assert make(host, kept, Phase.RUNTIME).serialized() == plugin.clone("plugin_attach").serialized() == kept


def test_output_is_as_x(host: Host) -> None:
    plugin = make(host)
    assert plugin.output_types([DataType.BF16] * 4) == [DataType.BF16]
    assert plugin.output_shapes(shapes()) == [(-1, 2048)]
    assert plugin.output_shapes(shapes(LARGEST)) == [(1024, 2048)]
    assert plugin.output_shapes([(-1, -1)] * 4) == [(-1, -2)]


def test_a_node_with_integer_matrices_is_refused(host: Host) -> None:
    assert make(host).output_types([DataType.HALF] * 8) is None
    assert "8 inputs and 1 outputs, must have 4 and 1" in only_error(host)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": (1024, 1, 2048)}, "x has shape [1024, 1, 2048], must be [T, hidden]"),
        ({"router_logits": (1023, 128)}, "router_logits has shape [1023, 128], must be [T, num_experts]"),
        ({"down": (128 * 2048,)}, "down has shape [262144]"),
        ({"down": (64 * 2048, 768)}, "down has shape [131072, 768], must be [num_experts * hidden, inner]"),
        ({"gate_up": (128 * 768, 2048)}, "gate_up has shape [98304, 2048], must be [num_experts * 2 * inner, hidden]"),
        ({"x": ()}, "x has shape []"),
    ],
    ids=str,
)
def test_a_wrong_shape_is_named_whoever_brings_it(host: Host, changes: dict[str, tuple[int, ...]], named: str) -> None:
    plugin = make(host)
    wrong = shapes(LARGEST, **changes)
    assert plugin.output_shapes(wrong) is None
    assert named in only_error(host)
    assert plugin.configure(shapes(), wrong, HALF) != 0
    assert named in only_error(host)
    assert plugin.shape_change(wrong, HALF) != 0
    assert named in only_error(host)
    assert plugin.workspace_size(wrong, HALF) == 0
    assert named in only_error(host)


def test_what_the_kernels_cannot_do_is_refused_while_building(host: Host) -> None:
    plugin = make(host)
    odd = {"x": (1024, 2044), "gate_up": (128 * 2 * 768, 2044), "down": (128 * 2044, 768)}
    assert plugin.configure(shapes(), shapes(LARGEST, **odd), HALF) != 0
    assert "hidden must be a multiple of 8" in only_error(host)
    few = {"router_logits": (1024, 4), "gate_up": (4 * 2 * 768, 2048), "down": (4 * 2048, 768)}
    assert plugin.configure(shapes(), shapes(LARGEST, **few), HALF) != 0
    assert "top_k must be from 1 to num_experts" in only_error(host)


@pytest.mark.parametrize("dtype", [DataType.HALF, DataType.BF16], ids=lambda t: t.name)
def test_one_type_for_all(host: Host, dtype: DataType) -> None:
    plugin, right = make(host), [dtype] * 5
    for position in range(5):
        for kind in DataType:
            given = [*right[:position], kind, *right[position + 1 :]]
            allowed = {DataType.HALF, DataType.BF16} if position == 0 else {dtype}
            assert plugin.supports(position, given) == (kind in allowed), (position, kind)
        assert not plugin.supports(position, right, [int(place == position) for place in range(5)])


def test_workspace_for_the_largest_step_serves_all(host: Host) -> None:
    plugin = make(host)
    largest = plugin.workspace_size(shapes(LARGEST), HALF)
    assert largest == pytest.approx(2 * 1024 * 8 * (2048 + 768), rel=0.01)
    assert plugin.workspace_size(shapes(LARGEST, x=(7, 2048), router_logits=(7, 128)), HALF) < largest


@pytest.mark.parametrize("case", experts_suite(), ids=str)
def test_a_step_gives_what_the_reference_gives(host: Host, case: ExpertsCase) -> None:
    check_experts(PluginOp(host), case.call())


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF], ids=["zeros", "large", "NaN"])
def test_inputs_without_meaning_reach_no_other_memory(host: Host, fill: int) -> None:
    """A builder that times the plugin does so on buffers that nobody has filled."""
    call = make_experts_call(33, 6, 3, 40, 24, dtype=BFLOAT16)
    tensors = [aligned(call.tensors[name]) for name in EXPERTS_INPUTS]
    for tensor in tensors:
        tensor.view(np.uint8)[...] = fill
    plugin = make(host, call.attributes)
    size = plugin.workspace_size([t.shape for t in tensors], [TYPES[t.dtype] for t in tensors])
    workspace = aligned(np.full(size, fill, np.uint8))
    assert plugin.enqueue(tensors, [aligned(tensors[0])], workspace) == 0


def test_an_error_of_a_launch_is_told(host: Host) -> None:
    call = make_experts_call(3, 4, 2, 16, 8, dtype=FLOAT16)
    tensors = [aligned(call.tensors[name]) for name in EXPERTS_INPUTS]
    plugin = make(host, call.attributes)
    assert plugin.enqueue(tensors, [aligned(tensors[0])], aligned(np.zeros(1 << 16, np.uint8))[8:]) != 0
    assert "could not be launched: cudaErrorInvalidValue" in only_error(host)
