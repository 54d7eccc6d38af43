"""Every layer's output, and the logits, of an engine in ONNX Runtime against transformers in float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from qwenrt.exporter import export
from qwenrt.plugins.library import cpu_library
from tests.checkpoints import write_checkpoint
from tests.oracle import Oracle

BLOCK_SIZE, LENGTHS = 8, (1, 7, 8, 9, 40)
TOLERANCE = 1e-4


def session_with_layer_outputs(engine: Path, folder: Path, num_layers: int) -> ort.InferenceSession:
    """The engine's graph with the residual stream after each layer as further outputs."""
    folder.mkdir()
    shutil.copy(engine / "model.safetensors", folder)
    model = onnx.load(engine / "model.onnx", load_external_data=False)
    known = {value.name: value for value in model.graph.value_info}
    model.graph.output.extend(known[f"model.layers.{layer}.add_1"] for layer in range(num_layers))
    onnx.save(model, folder / "model.onnx")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(folder / "model.onnx", options)


def step_inputs(prompts: list[list[int]], num_layers: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """One step that prefills all prompts, over blocks in a shuffled order."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-lengths.max() // BLOCK_SIZE)
    blocks = np.random.default_rng(1).permutation(len(prompts) * width).astype(np.int32)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cache = np.full((len(blocks), 2, kv_heads, BLOCK_SIZE, head_dim), np.nan, np.float32)
    return {
        "input_ids": np.concatenate(prompts).astype(np.int32),
        "positions": np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        "block_tables": blocks.reshape(len(prompts), width),
        "seq_lens": lengths,
        "query_start": query_start,
        "logits_indices": np.arange(query_start[-1], dtype=np.int32),
        **{f"kv_cache.{layer}": cache for layer in range(num_layers)},
    }


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 5}])
def test_every_layer_and_the_logits_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=4, **config)
    export(checkpoint, tmp_path / "engine", block_size=BLOCK_SIZE)
    num_layers = config.get("num_hidden_layers", 4)
    session = session_with_layer_outputs(tmp_path / "engine", tmp_path / "layers", num_layers)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, length).tolist() for length in LENGTHS]
    inputs = step_inputs(prompts, num_layers, kv_heads=2, head_dim=32)
    names = [f"model.layers.{layer}.add_1" for layer in range(num_layers)]
    *layers, logits = session.run([*names, "logits"], inputs)
    model = Oracle(checkpoint).model
    # transformers gives the last layer's output after the final norm, so that one is taken at the layer itself.
    last_layer: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, output: last_layer.append(output[0] if isinstance(output, tuple) else output)
    )
    for prompt, start in zip(prompts, inputs["query_start"], strict=False):
        rows = slice(start, start + len(prompt))
        with torch.inference_mode():
            result = model(torch.tensor([prompt]), output_hidden_states=True)
        expected = [*result.hidden_states[1:-1], last_layer.pop()]
        for layer, (actual, hidden) in enumerate(zip(layers, expected, strict=True)):
            assert relative_error(actual[rows], hidden.reshape(len(prompt), -1).numpy()) < TOLERANCE, f"layer {layer}"
        assert relative_error(logits[rows], result.logits[0].numpy()) < TOLERANCE
