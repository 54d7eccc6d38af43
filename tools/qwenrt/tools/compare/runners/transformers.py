"""Hugging Face transformers on paged batches: the judge that owes nothing to our modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwenrt.plugins import ConfigError, reference
from qwenrt.runtime import EngineDir
from qwenrt.runtime.lora import LoraAdapter

from ..feeds import Array, Places
from ..graph import EngineGraph
from .base import PagedRunner, Visit
from .modules import watched

try:
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
except ImportError as error:
    raise ConfigError(
        "--against transformers needs transformers; install it with: pip install 'qwenrt[compare]', or compare --against eager"
    ) from error


_MODELS: dict[str, Any] = {
    "generate": (AutoModelForCausalLM, "lm_head"),
    "embed": (AutoModel, None),
    "classify": (AutoModelForSequenceClassification, "score"),
}
"""By an engine's task: the class, and the module that makes its output of the hidden states."""


class TransformersRunner(PagedRunner):
    """A checkpoint in transformers' own modules with eager attention, on the CPU.

    The sequences of a step become one batch: the past of each, taken out of its blocks, is padded on the left, its new tokens on
    the right, and the padding is masked. Only sequences that have rows in the step take part.
    """

    def __init__(
        self, engine: EngineDir, checkpoint: Path, dtype: str = "float32", adapter: LoraAdapter | None = None
    ) -> None:
        """adapter: merged into the checkpoint."""
        super().__init__(f"transformers {transformers.__version__} {dtype}", engine.manifest)
        self._adapter = adapter
        self._graph = EngineGraph(engine)
        self._checkpoint = checkpoint
        self._dtype = getattr(torch, dtype)
        self._model: Any = None

    @property
    def tensors(self) -> list[str]:
        """What the model's modules take and give, by the graph's names."""
        return self._graph.tensors_of_modules

    def activate_impl(self) -> None:
        """Load the checkpoint; nothing of it is executed, and nothing is downloaded."""
        transformers.logging.disable_progress_bar()
        try:
            self._model = (
                _MODELS[self.manifest.task][0]
                .from_pretrained(
                    self._checkpoint,
                    dtype=self._dtype,
                    attn_implementation="eager",
                    trust_remote_code=False,
                    local_files_only=True,
                )
                .eval()
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"transformers cannot load {self._checkpoint}: {reason}; compare --against eager"
            ) from error

        if self._adapter is not None:
            self._merge(self._adapter)

    @torch.no_grad()
    def _merge(self, adapter: LoraAdapter) -> None:
        """Add an adapter to the matrices, in float32."""
        prefix = "" if _MODELS[self.manifest.task][1] else "model."
        for name, pair in adapter.pairs.items():
            try:
                weight = self._model.get_parameter(name.removeprefix(prefix))
            except AttributeError:
                raise ConfigError(
                    f"transformers' model has no {name}, which adapter {adapter.path} changes; compare --against eager"
                ) from None
            weight.copy_(weight.float() + torch.from_numpy(pair.b @ pair.a))

    def deactivate_impl(self) -> None:
        """Free the model."""
        self._model = None

    @torch.inference_mode()
    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        """Run a step and hand over each wanted tensor, in the order in which they are computed, as soon as it is there."""
        batch = _Padded(feed, self.manifest.block_size)
        cache = DynamicCache()
        for layer in range(self.manifest.model.num_layers):
            if batch.past.shape[1]:
                cache.update(*(part.to(self._dtype) for part in batch.past_kv(feed[f"kv_cache.{layer}"])), layer)
        head = _MODELS[self.manifest.task][1]
        backbone = self._model.model if head else self._model

        def tell(name: str, values: Tensor) -> None:
            visit(name, batch.rows(values.float()).numpy())

        def tell_kv(layer: int) -> None:
            name = f"kv_cache_out.{layer}"
            if name in wanted:
                keys, values = cache.layers[layer].keys, cache.layers[layer].values
                visit(name, batch.written(feed[f"kv_cache.{layer}"], keys.float(), values.float()))

        with ExitStack() as stack:
            boundary = self._graph.boundaries[0]
            if boundary in wanted:
                hook = backbone.embed_tokens.register_forward_hook(lambda module, args, output: tell(boundary, output))
                stack.callback(hook.remove)
            for layer, module in enumerate(backbone.layers):
                names = {key: name for key, name in self._graph.module_tensors(layer).items() if name in wanted}
                stack.enter_context(watched(module, names, tell))
                hook = module.register_forward_hook(lambda module, args, output, layer=layer: tell_kv(layer))
                stack.callback(hook.remove)
            result = backbone(
                batch.input_ids, attention_mask=batch.mask, position_ids=batch.positions, cache=cache, use_cache=True
            )
        if "logits" in wanted:
            rows = torch.from_numpy(feed["logits_indices"].astype(np.int64))
            hidden = batch.rows(result.last_hidden_state)[rows]
            visit("logits", (getattr(self._model, head)(hidden) if head else hidden).float().numpy())


class _Padded:
    """A step as a batch of sequences, [B, past + new], and the ways between the two."""

    def __init__(self, feed: Mapping[str, Array], block_size: int) -> None:
        counts = np.diff(feed["query_start"]).astype(np.int64)
        self._sequences = np.flatnonzero(counts)
        counts = counts[self._sequences]
        lengths = feed["seq_lens"][self._sequences].astype(np.int64)
        past = lengths - counts
        places = Places(feed, block_size)
        self._num_tokens = len(feed["input_ids"])
        # Of every new token: its sequence's place in the batch, and its own among the sequence's new tokens.
        self._which = np.repeat(np.arange(len(counts)), counts)
        self._where = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._new_blocks, self._new_slots = places.blocks[places.new], places.slots[places.new]
        self._past_blocks, self._past_slots = places.blocks[~places.new], places.slots[~places.new]
        self._past_which = np.repeat(np.arange(len(past)), past)
        self._past_where = past.max(initial=0) - np.repeat(past, past) + places.positions[~places.new]
        size = (len(counts), counts.max(initial=0))
        self.input_ids = torch.zeros(size, dtype=torch.int64)
        self.input_ids[self._which, self._where] = torch.from_numpy(
            feed["input_ids"][: len(self._which)].astype(np.int64)
        )
        self.positions = torch.from_numpy(np.minimum(past[:, None] + np.arange(size[1]), lengths[:, None] - 1))
        self.past = np.zeros((len(counts), past.max(initial=0)), bool)
        self.past[self._past_which, self._past_where] = True
        new = np.arange(size[1]) < counts[:, None]
        self.mask = torch.from_numpy(np.concatenate([self.past, new], 1).astype(np.int64))

    def past_kv(self, pool: Array) -> tuple[Tensor, Tensor]:
        """Keys and values of earlier tokens, each [B, Hkv, past, D], from [num_blocks, 2, Hkv, block_size, kv_row]."""
        found = reference.kv_values(pool[self._past_blocks, :, :, self._past_slots])
        shape = (len(self.past), self.past.shape[1], *found.shape[1:])
        gathered = np.zeros(shape, np.float32)
        gathered[self._past_which, self._past_where] = found
        keys, values = torch.from_numpy(gathered).permute(2, 0, 3, 1, 4)
        return keys, values

    def written(self, pool: Array, keys: Tensor, values: Tensor) -> Array:
        """A copy of the pool with the new tokens' keys and values, [B, Hkv, past + new, D], in their slots."""
        both = torch.stack([keys, values]).numpy()[:, :, :, self.past.shape[1] :]
        result = pool.copy()
        rows = reference.kv_rows(both[:, self._which, :, self._where], pool.dtype)
        result[self._new_blocks, :, :, self._new_slots] = rows
        return result

    def rows(self, values: Tensor) -> Tensor:
        """[B, new, ...] as the step's rows [T, ...]; rows of no sequence are zero."""
        result = values.new_zeros((self._num_tokens, *values.shape[2:]))
        result[: len(self._which)] = values[torch.from_numpy(self._which), torch.from_numpy(self._where)]
        return result
