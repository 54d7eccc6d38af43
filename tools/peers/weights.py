"""Gives every rival the same weights: python -m peers.weights CHECKPOINT DIR, where setup.sh has filled DIR and qwenrt is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GGUF_TYPES = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's types; the embedding, which is lm_head too, has them as all other matrices."""

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layer, kind = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[kind]}.weight"


def write_gguf(checkpoint: Path, out: Path, weights: str) -> None:
    """Write a dense Qwen3 checkpoint as a GGUF file of type GGUF_TYPES[weights], with its tokenizer's tokens."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    for name, array in _tensors(checkpoint):
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else gguf.GGMLQuantizationType[GGUF_TYPES[weights]]
        data = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, checkpoint: Path, vocab_size: int) -> None:
    """The tokens by their ids; ids that the tokenizer does not have are unused ones."""
    import gguf

    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    texts = [f"[unused{token}]" for token in range(vocab_size)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocab_size
    for text, token in tokenizer["model"]["vocab"].items():
        texts[token], kinds[token] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        texts[added["id"]], kinds[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"].get("merges", [])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    # llama.cpp wants at least one; this one joins what stands in no text.
    writer.add_token_merges(merges or [f"{texts[-2]} {texts[-1]}"])
    writer.add_add_bos_token(False)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Name and float32 array of every tensor."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name).float().numpy()


def _llama(checkpoint: Path, dir: Path, weights: str) -> None:
    write_gguf(checkpoint, dir / "weights" / f"llama-{weights}.gguf", weights)


def _ortgenai(checkpoint: Path, dir: Path, weights: str) -> None:
    precision = {"float32": "fp32", "int4": "int4"}[weights]
    options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"] if weights == "int4" else []
    out = dir / "weights" / f"ortgenai-{weights}"
    builder = [str(dir / "ortgenai/bin/python"), "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
    paths = ["-i", str(checkpoint), "-o", str(out), "-c", str(dir / "cache")]
    subprocess.run([*builder, *paths, *options], check=True)


def _openvino(checkpoint: Path, dir: Path, weights: str) -> None:
    precision = {"float32": "fp32", "int8": "int8", "int4": "int4"}[weights]
    options = ["--group-size", "128", "--ratio", "1.0", "--sym"] if weights == "int4" else []
    out = dir / "weights" / f"openvino-{weights}"
    cli = [str(dir / "openvino/bin/optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
    subprocess.run([*cli, "-m", str(checkpoint), "--weight-format", precision, *options, str(out)], check=True)


MAKERS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path, str], None]]] = {
    "llama": (("float32", "int8", "int4"), _llama),
    "ortgenai": (("float32", "int4"), _ortgenai),
    "openvino": (("float32", "int8", "int4"), _openvino),
}
"""Per rival the weights that it can have, and what makes them in DIR/weights."""


def main() -> None:
    """Make what is not there, of those rivals that are installed."""
    checkpoint, dir = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    (dir / "weights").mkdir(exist_ok=True)
    for rival, (kinds, make) in MAKERS.items():
        for weights in kinds:
            if (dir / rival).is_dir() and not list((dir / "weights").glob(f"{rival}-{weights}*")):
                print(f"peers: weights of {rival}, {weights}", flush=True)
                make(checkpoint, dir, weights)


if __name__ == "__main__":
    main()
