"""The weights that rivals get are the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from peers.weights import GGUF_TYPES, gguf_name, write_gguf

from ...checkpoints import write_checkpoint


@pytest.mark.parametrize("weights", GGUF_TYPES)
def test_a_gguf_file_holds_every_tensor_of_the_checkpoint(weights: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", shards=2)
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    write_gguf(checkpoint, tmp_path / "model.gguf", weights)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    tensors = {name: one for file in checkpoint.glob("*.safetensors") for name, one in load_file(file).items()}
    assert set(found) == {gguf_name(name) for name in tensors}
    for name, expected in tensors.items():
        one = found[gguf_name(name)]
        assert one.tensor_type.name == ("F32" if expected.ndim == 1 else GGUF_TYPES[weights])
        values = gguf.quants.dequantize(one.data, one.tensor_type).reshape(expected.shape)
        exact = expected.float().numpy()
        if weights == "float32" or expected.ndim == 1:
            assert np.array_equal(values, exact)
        else:
            # Half a step of a block of 32, whose scale is a half-precision number: of 127 to each side, or 8.
            step = np.abs(exact).reshape(-1, 32).max(1) / (127 if weights == "int8" else 8)
            assert (np.abs(values - exact).reshape(-1, 32).max(1) <= 1.01 * step).all()
    assert reader.fields["qwen3.rope.freq_base"].contents() == 1_000_000.0
    assert reader.fields["qwen3.attention.head_count_kv"].contents() == config["num_key_value_heads"]
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == config["vocab_size"]


def test_names_of_a_layer() -> None:
    assert gguf_name("model.layers.12.self_attn.q_norm.weight") == "blk.12.attn_q_norm.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
