"""The TensorRT plugin through its interfaces: what TensorRT asks of it while it builds, keeps and runs an engine."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gpu_check.cases import BFLOAT16, FLOAT16, MIXED, Call, make_call
from gpu_check.memory import aligned
from gpu_check.op_suite import check
from qwenrt.plugins.schema import MIXTURE_OF_EXPERTS, PAGED_ATTENTION, OpSpec
from tests.plugins.cuda.test_paged_attention import DTYPES

from .binding import INPUTS, OUTPUTS, STRUCTURES, TYPES, DataType, FieldType, FieldValue, Host, Phase, Plugin, PluginOp

REQUIRED = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 32, "scale": 0.125}
DEFAULTS = {a.name: a.default for a in PAGED_ATTENTION.attributes if a.default is not None}
WIDTH = (16 + 2 * 8) * 128
SHAPES = {
    "qkv": (-1, WIDTH),
    "q_norm": (128,),
    "k_norm": (128,),
    "rope": (4096, 128),
    "positions": (-1,),
    "kv_cache": (-1, 2, 8, 32, 128),
    "block_tables": (-1, -1),
    "seq_lens": (-1,),
    "query_start": (-1,),
}
LARGEST = {
    **SHAPES,
    "qkv": (2048, WIDTH),
    "positions": (2048,),
    "kv_cache": (1000, 2, 8, 32, 128),
    "block_tables": (256, 128),
    "seq_lens": (256,),
    "query_start": (257,),
}
INDEX = DataType.INT32


def types(dtype: DataType = DataType.HALF, kv_dtype: DataType | None = None) -> list[DataType]:
    """The inputs' types."""
    return [dtype, dtype, dtype, DataType.FLOAT, INDEX, dtype if kv_dtype is None else kv_dtype, INDEX, INDEX, INDEX]


def all_types(dtype: DataType = DataType.HALF, kv_dtype: DataType | None = None) -> list[DataType]:
    """The inputs' and then the outputs' types."""
    given = types(dtype, kv_dtype)
    return [*given, given[0], given[INPUTS.index("kv_cache")]]


def shapes(base: dict[str, tuple[int, ...]] = SHAPES, **changes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list((base | changes).values())


def make(host: Host, values: dict[str, Any] = REQUIRED, phase: Phase = Phase.BUILD) -> Plugin:
    host.messages()
    plugin = host.create(values, phase)
    assert plugin is not None, host.messages()
    return plugin


def only_error(host: Host) -> str:
    """The one line that was logged, which is an error."""
    (line,) = host.messages()
    assert line.startswith("1 PagedAttention: "), line
    return line


def test_structures_are_those_of_the_headers(host: Host) -> None:
    sizes = (ctypes.c_size_t * len(STRUCTURES))()
    host.library.host_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in STRUCTURES]


def test_the_parser_finds_the_creator_by_the_name_of_the_op(host: Host) -> None:
    texts = [host.library.creator_text(creator).decode() for creator in host.creators().values()]
    assert texts == [f"PLUGIN CREATOR_V3ONE 1: /{op.name}/{op.version}" for op in (PAGED_ATTENTION, MIXTURE_OF_EXPERTS)]


@pytest.mark.parametrize("op", [PAGED_ATTENTION, MIXTURE_OF_EXPERTS], ids=lambda op: op.name)
def test_the_creator_names_the_attributes_of_the_schema(host: Host, op: OpSpec) -> None:
    fields = host.library.creator_fields(host.creators()[op.name]).contents
    kinds = {int: FieldType.INT32, float: FieldType.FLOAT32}
    named = [(field.name.decode(), field.type, field.length, field.data) for field in fields.fields[: fields.count]]
    assert named == [(a.name, kinds[a.kind], 1, None) for a in op.attributes]


def test_plugin_says_what_its_creator_says(host: Host) -> None:
    plugin = make(host)
    assert host.library.plugin_text(plugin.address).decode() == "PLUGIN_V3ONE_BUILD 2: /PagedAttention/1"
    assert host.library.plugin_num_outputs(plugin.address) == len(OUTPUTS)
    assert host.library.plugin_num_tactics(plugin.address) == 0


def test_attributes_have_the_defaults_of_the_schema(host: Host) -> None:
    kept = make(host).serialized()
    assert kept.pop("plan_version") == 1
    assert kept == pytest.approx({**REQUIRED, **DEFAULTS}, rel=1e-7)


def test_numbers_may_be_64_bits_wide(host: Host) -> None:
    wide = {name: FieldValue(FieldType.INT64, (value,)) for name, value in REQUIRED.items() if name != "scale"}
    plugin = make(host, {**wide, "scale": FieldValue(FieldType.FLOAT64, (0.125,))})
    assert plugin.serialized() == make(host).serialized()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 15}, "num_heads must be a positive multiple"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_kv_heads": -8}, "num_kv_heads"),
        ({"num_heads": 256}, "num_heads / num_kv_heads"),
        ({"head_dim": 96}, "head_dim must be 64 or 128"),
        ({"block_size": 24}, "block_size must be"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"head_dim": 128.0}, "head_dim must be an integer"),
        ({"scale": 1}, "scale must be a float"),
        ({"head_dim": FieldValue(FieldType.CHAR, (b"a",))}, "head_dim must be an integer"),
        ({"block_size": FieldValue(FieldType.INT64, (2**32 + 32,))}, "block_size is 4294967328"),
        ({"block_size": FieldValue(FieldType.INT32, (32, 32))}, "block_size must be one number"),
        ({"block_size": FieldValue(FieldType.INT32, ())}, "block_size must be one number"),
        ({"block_size": None}, "block_size must be one number"),
        ({"windows": 3}, "unknown attribute windows; there are: num_heads, num_kv_heads,"),
        ({"plan_version": 1}, "unknown attribute plan_version"),
    ],
    ids=str,
)
def test_a_wrong_attribute_is_named(host: Host, changes: dict[str, Any], named: str) -> None:
    host.messages()
    assert host.create(REQUIRED | changes, name="layers.7/attention") is None
    line = only_error(host)
    assert named in line
    assert 'node "layers.7/attention"' in line


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_attribute_is_named(host: Host, name: str) -> None:
    host.messages()
    assert host.create({key: value for key, value in REQUIRED.items() if key != name}) is None
    assert f"attribute {name} is missing" in only_error(host)


def test_a_plan_gives_the_plugin_back(host: Host) -> None:
    values = {**REQUIRED, "norm_eps": 1.1e-5, "sliding_window": 4096}
    plugin = make(host, values)
    kept = plugin.serialized()
    restored = make(host, kept, Phase.RUNTIME)
    assert restored.serialized() == kept
    for how in ("plugin_clone", "plugin_attach"):
        clone = plugin.clone(how)
        assert clone.address.value != plugin.address.value
        assert clone.serialized() == kept


def test_a_clone_outlives_its_origin(host: Host) -> None:
    plugin = make(host)
    kept, clone = plugin.serialized(), plugin.clone()
    del plugin
    assert clone.serialized() == kept


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan_version": 2}, "the plan was built with plan_version 2, this plugin library reads plan_version 1"),
        ({"plan_version": None}, "plan_version must be one number"),
        ({"num_heads": None}, "num_heads must be one number"),
        ({"head_dim": 32}, "head_dim must be"),
        ({"rotary_dim": 64}, "unknown attribute rotary_dim"),
    ],
    ids=str,
)
def test_a_plan_of_another_version_is_refused(host: Host, changes: dict[str, Any], named: str) -> None:
    kept = make(host).serialized()
    assert host.create(kept | changes, Phase.RUNTIME) is None
    assert named in only_error(host)


@pytest.mark.parametrize("name", ["plan_version", "num_heads", "norm_eps", "sliding_window"])
def test_a_plan_that_lacks_a_field_is_refused(host: Host, name: str) -> None:
    kept = make(host).serialized()
    del kept[name]
    assert host.create(kept, Phase.RUNTIME) is None
    assert "export the engine again" in (line := only_error(host)) or f"attribute {name} is missing" in line


def test_the_timing_cache_tells_plugins_apart_by_their_attributes(host: Host) -> None:
    def timing_id(plugin: Plugin) -> str:
        return str(host.library.plugin_timing_id(plugin.address).decode())

    one = make(host)
    assert timing_id(one) == timing_id(one.clone())
    others = [
        make(host, {**REQUIRED, **change})
        for change in ({"num_heads": 8}, {"scale": 0.12500001}, {"sliding_window": 7})
    ]
    assert len({timing_id(one), *map(timing_id, others)}) == 4


def test_the_cache_is_written_in_place(host: Host) -> None:
    plugin = make(host)
    aliased = [host.library.plugin_aliased_input(plugin.address, output) for output in range(len(OUTPUTS))]
    assert aliased == [-1, INPUTS.index("kv_cache")]


def test_output_types_are_those_of_qkv_and_of_the_cache(host: Host) -> None:
    plugin = make(host)
    assert plugin.output_types(types(DataType.BF16)) == [DataType.BF16, DataType.BF16]
    assert plugin.output_types(types(DataType.BF16, DataType.FP8)) == [DataType.BF16, DataType.FP8]


def test_a_node_with_other_inputs_is_refused(host: Host) -> None:
    plugin = make(host)
    assert plugin.output_types(types()[:-1]) is None
    assert "8 inputs and 2 outputs, must have 9 and 2" in only_error(host)
    assert plugin.output_types(types(), num_outputs=1) is None
    assert "9 inputs and 1 outputs" in only_error(host)
    assert plugin.output_shapes(shapes()[:-1]) is None
    assert "8 inputs" in only_error(host)


def test_output_shapes_follow_the_inputs(host: Host) -> None:
    plugin = make(host)
    flat = [(name, k) for name, shape in SHAPES.items() for k in range(len(shape))]

    def symbol(name: str, dimension: int) -> int:
        return -1 - flat.index((name, dimension))

    assert plugin.output_shapes(shapes()) == [(symbol("qkv", 0), 16 * 128), (symbol("kv_cache", 0), 2, 8, 32, 128)]
    assert plugin.output_shapes(shapes(LARGEST)) == [(2048, 16 * 128), (1000, 2, 8, 32, 128)]
    assert plugin.output_shapes(shapes(q_norm=(0,), k_norm=(0,))) is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qkv": (2048, WIDTH + 8)}, f"qkv has shape [2048, {WIDTH + 8}], must be [T, {WIDTH}]"),
        ({"qkv": (2048, 1, WIDTH)}, "qkv has shape [2048, 1, 4096]"),
        ({"q_norm": (64,)}, "q_norm has shape [64], must be [128] or [0]"),
        ({"k_norm": (1, 128)}, "k_norm has shape [1, 128]"),
        ({"k_norm": (0,)}, "of q_norm and k_norm one is empty"),
        ({"rope": (4096, 64)}, "rope has shape [4096, 64], must be [max_positions, 128]"),
        ({"positions": (2047,)}, "positions has shape [2047], must be [T]"),
        (
            {"kv_cache": (1000, 2, 8, 16, 128)},
            "kv_cache has shape [1000, 2, 8, 16, 128], must be [num_blocks, 2, 8, 32, 128]",
        ),
        ({"kv_cache": (1000, 2, 8, 32 * 128)}, "kv_cache"),
        ({"block_tables": (255, 128)}, "block_tables has shape [255, 128], must be [S, max_blocks]"),
        ({"seq_lens": (256, 1)}, "seq_lens has shape [256, 1]"),
        ({"query_start": (256,)}, "query_start has shape [256], must be [S + 1]"),
        ({"qkv": ()}, "qkv has shape []"),
    ],
    ids=str,
)
def test_a_wrong_shape_is_named_whoever_brings_it(host: Host, changes: dict[str, tuple[int, ...]], named: str) -> None:
    plugin = make(host)
    wrong = shapes(LARGEST, **changes)
    assert plugin.output_shapes(wrong) is None
    assert named in only_error(host)
    assert plugin.configure(shapes(), wrong, types()) != 0
    assert named in only_error(host)
    assert plugin.shape_change(wrong, types()) != 0
    assert named in only_error(host)
    assert plugin.workspace_size(wrong, types()) == 0
    assert named in only_error(host)


def test_a_step_too_large_for_the_kernels_is_refused(host: Host) -> None:
    plugin = make(host)
    for changes, named in (
        ({"block_tables": (256, 2**26)}, "max_blocks"),
        ({"kv_cache": (2**31, 2, 8, 32, 128)}, "the number of blocks is 2147483648, must be below 2^31"),
    ):
        assert plugin.configure(shapes(), shapes(LARGEST, **changes), types()) != 0
        assert named in only_error(host)


def test_dimensions_may_be_unknown_while_building(host: Host) -> None:
    plugin = make(host)
    assert plugin.configure(shapes(), shapes(LARGEST), types()) == 0
    assert host.messages() == []


@pytest.mark.parametrize("dtype", [DataType.HALF, DataType.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "FP8"])
def test_formats_that_are_supported(host: Host, dtype: DataType, fp8: bool) -> None:
    given = all_types(dtype, DataType.FP8 if fp8 else None)
    assert [make(host).supports(position, given) for position in range(len(given))] == [True] * len(given)
    assert host.messages() == []


@pytest.mark.parametrize("dtype", [DataType.HALF, DataType.BF16], ids=lambda t: t.name)
def test_no_other_type_is_supported_at_any_place(host: Host, dtype: DataType) -> None:
    plugin, right = make(host), all_types(dtype)
    for position, own in enumerate(right):
        allowed = {own}
        if position == 0:
            allowed = {DataType.HALF, DataType.BF16}
        elif INPUTS[position : position + 1] == ["kv_cache"]:
            allowed = {own, DataType.FP8}
        for kind in DataType:
            given = [*right[:position], kind, *right[position + 1 :]]
            assert plugin.supports(position, given) == (kind in allowed), (position, kind)


def test_only_contiguous_tensors_are_supported(host: Host) -> None:
    plugin, given = make(host), all_types()
    for position in range(len(given)):
        formats = [0] * len(given)
        formats[position] = 1
        assert not plugin.supports(position, given, formats)


def test_the_answer_does_not_look_ahead(host: Host) -> None:
    plugin = make(host)
    for position in range(len(all_types())):
        given = [*all_types()[: position + 1], *[DataType.BOOL] * (len(all_types()) - position - 1)]
        assert plugin.supports(position, given)


def test_workspace_for_the_largest_step_serves_all(host: Host) -> None:
    plugin = make(host)
    largest = plugin.workspace_size(shapes(LARGEST), types())
    small = {"block_tables": (3, 1), "seq_lens": (3,), "query_start": (4,), "qkv": (5, WIDTH), "positions": (5,)}
    assert 0 < plugin.workspace_size(shapes(LARGEST, **small), types()) <= largest


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_a_step_gives_what_the_reference_gives(host: Host, dtype: Any, head_dim: int, in_place: bool) -> None:
    call = make_call(MIXED, dtype=dtype, head_dim=head_dim, padding_rows=3, shared_blocks=1)
    check(PluginOp(host), call, in_place=in_place)


@pytest.mark.parametrize("sliding_window", [1, 40])
def test_attributes_reach_the_kernels(host: Host, sliding_window: int) -> None:
    call = make_call(
        [(40, 90), (1, 77)], dtype=BFLOAT16, num_heads=8, num_kv_heads=1, sliding_window=sliding_window, block_size=64
    )
    call.attributes |= {"norm_eps": 1e-2, "scale": 0.3}
    check(PluginOp(host), call, in_place=True)


def test_a_family_without_norms(host: Host) -> None:
    check(PluginOp(host), make_call(MIXED, dtype=FLOAT16, norm=False), in_place=True)


def test_a_cache_that_is_not_aliased_is_told_once(host: Host) -> None:
    call = make_call([(2, 5)], dtype=FLOAT16)
    op = PluginOp(host)
    op.paged_attention(**call.tensors, **call.attributes)
    host.messages()
    op.paged_attention(**call.tensors, **call.attributes)
    op.paged_attention(**call.tensors, **call.attributes, in_place=True)
    assert host.messages() == []


def step(host: Host, call: Call) -> tuple[Plugin, list[Any], list[Any], Any]:
    tensors = [aligned(call.tensors[name]) for name in INPUTS]
    plugin = make(host, call.attributes)
    attn = aligned(
        np.zeros((len(tensors[0]), call.attributes["num_heads"] * call.attributes["head_dim"]), tensors[0].dtype)
    )
    size = plugin.workspace_size([t.shape for t in tensors], [TYPES[t.dtype] for t in tensors])
    return plugin, tensors, [attn, tensors[5]], aligned(np.zeros(size, np.uint8))


def test_an_error_of_a_launch_is_told(host: Host) -> None:
    plugin, tensors, outputs, workspace = step(host, make_call([(2, 5)], dtype=FLOAT16))
    assert plugin.enqueue(tensors, outputs, workspace[8:]) != 0
    assert "could not be launched: cudaErrorInvalidValue" in only_error(host)


@pytest.mark.parametrize("fill", ["zeros", "random"])
def test_inputs_without_meaning_reach_no_other_memory(host: Host, fill: str) -> None:
    """A builder that times the plugin does so on buffers that nobody has filled."""
    plugin, tensors, outputs, workspace = step(host, make_call([(40, 90), (1, 33), (3, 20)], dtype=FLOAT16))
    random = np.random.default_rng(0)
    for name in ("positions", "block_tables", "seq_lens", "query_start"):
        tensor = tensors[INPUTS.index(name)]
        tensor[...] = 0 if fill == "zeros" else random.integers(-(2**31), 2**31, tensor.shape)
    assert plugin.enqueue(tensors, outputs, workspace) == 0


def test_every_function_is_where_the_headers_have_it(host: Host) -> None:
    of_headers, of_plugin = (ctypes.c_int32 * 3)(), (ctypes.c_int32 * 3)()
    host.library.host_slots(of_headers, of_plugin)
    assert list(of_plugin) == list(of_headers)
