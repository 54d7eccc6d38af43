"""Checkpoint folders: names, shards and headers that are right, and all that may be wrong there (cases L01, L05, L07, L08)."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qwenrt.exporter import Checkpoint, ModelConfig, open_checkpoint
from qwenrt.plugins import ConfigError
from tests import packing
from tests.checkpoints import quantize_checkpoint, write_checkpoint

SHARDS = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sharded") / "checkpoint", shards=3)


@pytest.fixture
def single(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "single"))


@pytest.fixture
def sharded(sharded_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_checkpoint, tmp_path / "sharded"))


def load(folder: Path) -> Checkpoint:
    """What an export does before it writes anything."""
    checkpoint = open_checkpoint(folder)
    checkpoint.check(ModelConfig.from_dir(folder))
    return checkpoint


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def edit_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors")


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def rewrite_header(path: Path, change: Any) -> None:
    """Replace the JSON header of a safetensors file and leave its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_tensors_read_as_the_safetensors_library_reads_them(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    checkpoint = load(folder)
    expected = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert checkpoint.tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), value.numpy())
        checkpoint.forget(name)
        np.testing.assert_array_equal(checkpoint.read(name), value.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", dtype=dtype)
    checkpoint = load(folder)
    for name, value in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.read(name).view(np.uint16), value.view(torch.uint16).numpy())


class TestNames:
    """Case L01."""

    def flat(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): value for name, value in weights.items()}

    def test_flat_names_are_the_same_tensors(self, single: Path, tiny_checkpoint: Path) -> None:
        edit_weights(single, self.flat)
        flat, prefixed = load(single), load(tiny_checkpoint)
        assert flat.tensors.keys() == prefixed.tensors.keys()
        for name in prefixed.tensors:
            np.testing.assert_array_equal(flat.read(name), prefixed.read(name))

    def test_half_of_the_names_prefixed_is_refused(self, single: Path) -> None:
        edit_weights(
            single, lambda w: {k.removeprefix("model.") if i % 2 else k: v for i, (k, v) in enumerate(w.items())}
        )
        refused(single, r"names some tensors with the prefix 'model\.'.*and some without.*one spelling")

    def test_another_root_is_named(self, single: Path) -> None:
        edit_weights(single, lambda w: {f"transformer.{k}": v for k, v in w.items()})
        refused(single, r'lacks "model\.embed_tokens\.weight" and \d+ more tensors')


class TestContents:
    """Tensors that are missing, left over, of another shape or type."""

    def test_a_missing_tensor(self, single: Path) -> None:
        edit_weights(single, lambda w: {k: v for k, v in w.items() if k != "model.layers.2.mlp.up_proj.weight"})
        refused(single, r'lacks "model\.layers\.2\.mlp\.up_proj\.weight", which its config\.json asks for')

    def test_a_missing_layer(self, single: Path) -> None:
        edit_config(single, num_hidden_layers=5, layer_types=None, max_window_layers=None)
        refused(single, r'lacks "model\.layers\.4\..*and 10 more tensors')

    def test_a_layer_too_many(self, single: Path) -> None:
        edit_config(single, num_hidden_layers=3, layer_types=None, max_window_layers=None)
        refused(single, r'has "model\.layers\.3\..*and 10 more tensors, which its config\.json has no place for')

    def test_biases_that_the_config_denies(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "checkpoint", attention_bias=True)
        load(folder)
        edit_config(folder, attention_bias=False)
        refused(folder, r'has "model\.layers\.0\.self_attn\..*bias"')

    def test_biases_that_are_not_there(self, single: Path) -> None:
        edit_config(single, attention_bias=True)
        refused(single, r'lacks "model\.layers\.0\.self_attn\.q_proj\.bias"')

    def test_a_tied_checkpoint_may_hold_a_head_and_old_frequencies(self, single: Path) -> None:
        extra = {
            "lm_head.weight": torch.zeros(320, 64),
            "lm_head.scales": torch.zeros(1),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
        }
        edit_weights(single, lambda w: {**w, **extra})
        load(single)

    def test_an_untied_one_must_hold_a_head(self, single: Path) -> None:
        edit_config(single, tie_word_embeddings=False)
        refused(single, r'lacks "lm_head\.weight"')

    def test_a_transposed_tensor(self, single: Path) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        edit_weights(single, lambda w: {**w, name: w[name].T.contiguous()})
        refused(single, r"down_proj\.weight has shape \[128, 64\], config\.json makes it \[64, 128\]")

    def test_a_quantized_tensor(self, single: Path) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        edit_weights(single, lambda w: {**w, name: w[name].to(torch.int8)})
        refused(single, r"down_proj\.weight is I8, must be F32, F16, BF16; config.json has no quantization_config")

    def test_a_head_dim_that_the_weights_contradict(self, single: Path) -> None:
        """Case L05: 128 is the default, the weights say 32; nobody takes hidden_size / heads = 16."""
        edit_config(single, head_dim=None)
        refused(
            single,
            r"q_proj\.weight has shape \[128, 64\], config\.json makes it \[512, 64\] \(head_dim 128, the default",
        )
        edit_config(single, head_dim=16)
        refused(
            single,
            r"q_proj\.weight has shape \[128, 64\], config\.json makes it \[64, 64\] \(head_dim 16, from config\.json",
        )


class TestQuantized:
    """Matrices in parts."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        path = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, family="qwen2")
        quantize_checkpoint(path, tmp_path / "reference", "gptq")
        return path

    def test_matrices_read_as_what_they_stand_for(self, folder: Path, tmp_path: Path) -> None:
        found, expected = load(folder), load(tmp_path / "reference")
        for name in expected.tensors:
            np.testing.assert_array_equal(found.read(name), expected.read(name))
            found.forget(name)

    def test_biases_of_zeros_and_scales_of_activations_do_no_harm(self, folder: Path) -> None:
        layer = "model.layers.0."
        extra = {
            f"{layer}mlp.up_proj.bias": torch.zeros(128),
            f"{layer}mlp.up_proj.input_scale": torch.ones(1),
            f"{layer}self_attn.k_scale": torch.ones(1),
            "lm_head.scales": torch.ones(1),
        }
        edit_weights(folder, lambda w: {**w, **extra})
        load(folder)
        edit_weights(folder, lambda w: {**w, f"{layer}mlp.up_proj.bias": torch.full((128,), 1e-9)})
        refused(folder, r'has "model\.layers\.0\.mlp\.up_proj\.bias", which its config\.json has no place for')

    def test_a_part_that_is_missing_or_left_over(self, folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj."
        weights = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in weights.items() if k != name + "scales"}, folder / "model.safetensors")
        refused(folder, r'"model\.layers\.0\.mlp\.up_proj" has g_idx, qweight, qzeros and no scales, which gptq needs')
        save_file({k: v for k, v in weights.items() if k != name + "qweight"}, folder / "model.safetensors")
        refused(folder, r'lacks "model\.layers\.0\.mlp\.up_proj\.weight"')
        save_file({**weights, name + "weight_scale": torch.ones(1)}, folder / "model.safetensors")
        refused(folder, r'has "model\.layers\.0\.mlp\.up_proj\.weight_scale", which its config\.json has no place for')

    def test_a_config_of_another_method(self, folder: Path) -> None:
        edit_config(folder, quantization_config=packing.CONFIGS["w4a16"])
        refused(folder, r'lacks "model\.layers\.0\.self_attn\.q_proj\.weight"')
        edit_config(folder, quantization_config=None)
        refused(folder, r'lacks "model\.layers\.0\.self_attn\.q_proj\.weight"')
        edit_config(folder, quantization_config={**packing.CONFIGS["gptq"], "bits": 8})
        refused(folder, r"qweight has shape \[8, 128\], must be \[16, 128\] for a weight \[128, 64\] of gptq, 8 bits")


class TestShards:
    """Case L07."""

    def test_a_missing_shard(self, sharded: Path) -> None:
        (sharded / SHARDS[1]).unlink()
        refused(sharded, rf"{SHARDS[1]} is missing")

    def test_a_stray_file_changes_nothing(self, sharded: Path, sharded_checkpoint: Path) -> None:
        weights = load_file(sharded / SHARDS[0])
        save_file({name: value + 1 for name, value in weights.items()}, sharded / "model.safetensors")
        save_file({name: value + 2 for name, value in weights.items()}, sharded / "adapter.safetensors")
        expected = load(sharded_checkpoint)
        found = load(sharded)
        for name in weights:
            np.testing.assert_array_equal(found.read(name), expected.read(name))

    def test_an_index_that_names_the_wrong_shard(self, sharded: Path) -> None:
        edit_index(sharded, **{"model.norm.weight": SHARDS[0]})
        refused(sharded, rf'{SHARDS[0]} lacks "model\.norm\.weight", which {INDEX} places there')

    def test_a_tensor_in_two_shards_is_taken_from_the_one_that_the_index_names(self, sharded: Path) -> None:
        first, last = load_file(sharded / SHARDS[0]), load_file(sharded / SHARDS[2])
        name = "model.embed_tokens.weight"
        assert name in first
        save_file({**last, name: first[name] + 1}, sharded / SHARDS[2])
        edit_index(sharded, **{name: SHARDS[2]})
        np.testing.assert_array_equal(load(sharded).read(name), (first[name] + 1).numpy())

    @pytest.mark.parametrize("count", [1, 10, 5000])
    def test_a_truncated_shard(self, count: int, sharded: Path) -> None:
        path = sharded / SHARDS[1]
        os.truncate(path, path.stat().st_size - count)
        refused(sharded, rf"{SHARDS[1]} is truncated: it has \d+ bytes, its header describes \d+; download it again")

    @pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 10**9])
    def test_a_header_length_out_of_range(self, length: int, sharded: Path) -> None:
        with (sharded / SHARDS[0]).open("r+b") as file:
            file.write(struct.pack("<Q", length))
        refused(sharded, rf"{SHARDS[0]} is truncated or no safetensors file: .* names a header of {length}")

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 100])
    def test_hardly_a_file(self, size: int, sharded: Path) -> None:
        os.truncate(sharded / SHARDS[2], size)
        refused(sharded, SHARDS[2])

    def test_a_file_of_another_kind_is_named(self, single: Path) -> None:
        (single / "model.safetensors").rename(single / "pytorch_model.bin")
        refused(
            single, r"has neither model\.safetensors nor .*; pytorch_model\.bin is not read, save it as safetensors"
        )


class TestHeaders:
    """A header that lies."""

    def edit(self, folder: Path, **changes: Any) -> None:
        rewrite_header(
            folder / "model.safetensors", lambda h: {**h, "model.norm.weight": {**h["model.norm.weight"], **changes}}
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dtype": "F128"}, 'the dtype "F128"'),
            ({"dtype": 4}, "the dtype 4"),
            ({"shape": [2**40, 2**40]}, "offsets that do not fit its shape"),
            ({"shape": [-64]}, "a shape that is no list of sizes"),
            ({"shape": [64.0]}, "a shape that is no list of sizes"),
            ({"shape": 64}, "a shape that is no list of sizes"),
            ({"shape": [1] * 50}, "a shape that is no list of sizes"),
            ({"data_offsets": [0, 2**61]}, "offsets that do not fit"),
            ({"data_offsets": [2**61, 2**61 + 256]}, "does not start where the one before it ends"),
            ({"data_offsets": [-256, 0]}, "offsets that do not fit"),
            ({"data_offsets": [256, 0]}, "offsets that do not fit"),
            ({"data_offsets": [0]}, "offsets that do not fit"),
            ({"data_offsets": [0, 256]}, "does not start where the one before it ends"),
            ({"data_offsets": None}, "offsets that do not fit"),
        ],
        ids=str,
    )
    def test_a_tensor_that_does_not_fit(self, changes: dict[str, Any], message: str, single: Path) -> None:
        self.edit(single, **changes)
        refused(single, rf"model\.safetensors is damaged: tensor .*{message}")

    @pytest.mark.parametrize(
        "header",
        [b"", b"{", b"[]", b"null", b"\xff" * 10, b"[" * 10_000, b'{"a": 1}', b'{"a": {}}', b'{"a":{},"a":{}}'],
    )
    def test_a_header_that_is_none(self, header: bytes, single: Path) -> None:
        rewrite_header(single / "model.safetensors", lambda _: header)
        refused(single, r"model\.safetensors")

    def test_random_damage_is_refused_or_harmless(self, single: Path) -> None:
        """One byte of the header changed: never anything but a ConfigError."""
        path = single / "model.safetensors"
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        random = np.random.default_rng(0)
        for _ in range(300):
            damaged = bytearray(data)
            damaged[int(random.integers(0, 8 + length))] = int(random.integers(0, 256))
            path.write_bytes(damaged)
            try:
                load(single)
            except ConfigError as error:
                assert "\n" not in str(error)  # noqa: PT017


class TestPaths:
    """Case L08: nothing but plain files of the folder is opened."""

    @pytest.mark.parametrize(
        "value",
        [
            "../other/x.safetensors",
            "/abs/x.safetensors",
            "sub/../x.safetensors",
            "sub/x.safetensors",
            "..",
            "",
            7,
            None,
            ["x.safetensors"],
            "x\0.safetensors",
            "x\n.safetensors",
            "config.json",
            "C:\\x.safetensors",
        ],
        ids=repr,
    )
    def test_a_shard_name_that_is_no_file_name(self, value: Any, sharded: Path) -> None:
        edit_index(sharded, **{"model.norm.weight": value})
        refused(sharded, rf'{INDEX}: "model\.norm\.weight" lies in .*, which is no file name in this folder')

    @pytest.mark.parametrize("target", ["outside", "inside"])
    def test_a_link(self, target: str, sharded: Path, tmp_path: Path) -> None:
        path = sharded / SHARDS[1]
        moved = path.rename(tmp_path / "x.safetensors" if target == "outside" else sharded / "y.safetensors")
        path.symlink_to(moved)
        refused(sharded, rf"{SHARDS[1]} is a link that leaves its folder")

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
    def test_a_link_in_place_of_other_files(self, name: str, single: Path, tmp_path: Path) -> None:
        (single / name).rename(tmp_path / name)
        (single / name).symlink_to(tmp_path / name)
        refused(single, rf"{name} is a link that leaves its folder")

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
    @pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
    def test_what_is_no_file(self, kind: str, name: str, single: Path) -> None:
        path = single / name
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(single / "nowhere")
        refused(single, name)

    def test_the_links_of_the_hub_cache_are_followed(self, sharded: Path, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc123"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for number, path in enumerate(sorted(sharded.iterdir())):
            path.rename(blobs / f"{number:064x}")
            (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
        load(snapshot)
        (tmp_path / "secret").write_bytes((snapshot / SHARDS[0]).read_bytes())
        (snapshot / SHARDS[0]).unlink()
        (snapshot / SHARDS[0]).symlink_to("../../../secret")
        refused(snapshot, rf"{SHARDS[0]} is a link that leaves its folder")

    @pytest.mark.parametrize(
        "index",
        [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}, {"weight_map": "model.safetensors"}],
        ids=str,
    )
    def test_an_index_without_a_map(self, index: Any, sharded: Path) -> None:
        (sharded / INDEX).write_text(json.dumps(index))
        refused(sharded, rf"{INDEX}: weight_map must be an object")

    def test_an_index_that_is_nested_deeply(self, sharded: Path) -> None:
        (sharded / INDEX).write_text('{"weight_map":' * 10_000)
        refused(sharded, rf"{INDEX} is nested too deeply")


def test_a_checkpoint_is_opened_without_torch(tiny_checkpoint: Path) -> None:
    code = (
        "import sys; from qwenrt.exporter import ModelConfig, open_checkpoint\n"
        "open_checkpoint(sys.argv[1]).check(ModelConfig.from_dir(sys.argv[1]))\n"
        "assert not {'torch', 'onnx', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", code, tiny_checkpoint],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
