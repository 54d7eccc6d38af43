"""A checkpoint in our own PyTorch modules, the ones that an engine is traced from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from qwenrt.exporter.eager import load_module
from qwenrt.exporter.modeling import Qwen3ForCausalLM
from qwenrt.runtime import EngineDir
from qwenrt.runtime.lora import LoraAdapter

from ..feeds import INDEX_INPUTS, Array, kv_names
from ..graph import EngineGraph
from .base import PagedRunner, Visit
from .executors import to_numpy, to_torch
from .modules import watched


class EagerRunner(PagedRunner):
    """Qwen3ForCausalLM with a checkpoint's weights, computed in `dtype`; PagedAttention by its torch op, in float32."""

    def __init__(
        self, engine: EngineDir, checkpoint: Path, dtype: str = "float32", adapter: LoraAdapter | None = None
    ) -> None:
        """adapter: merged into the checkpoint."""
        super().__init__(f"eager {dtype}", engine.manifest)
        self._adapter = adapter
        self._graph = EngineGraph(engine)
        self._checkpoint = checkpoint
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._module: Qwen3ForCausalLM | None = None

    @property
    def tensors(self) -> list[str]:
        """What the model's modules take and give, by the graph's names."""
        return self._graph.tensors_of_modules

    def activate_impl(self) -> None:
        """Load the checkpoint."""
        manifest = self.manifest
        self._module = load_module(
            self._checkpoint,
            block_size=manifest.block_size,
            max_model_len=manifest.limits.max_model_len,
            dtype=self._dtype,
            task=manifest.task,
            adapter=self._adapter,
        )

    def deactivate_impl(self) -> None:
        """Free the module."""
        self._module = None

    @torch.inference_mode()
    def visit(self, feed: Mapping[str, Array], wanted: Collection[str], visit: Visit) -> None:
        """Run a step and hand over each wanted tensor, in the order in which they are computed, as soon as it is there."""
        module = self._module
        assert module is not None

        def tell(name: str, values: Tensor) -> None:
            visit(name, to_numpy(values if name.startswith("kv_cache_out.") else values.float()))

        with ExitStack() as stack:
            boundary = self._graph.boundaries[0]
            if boundary in wanted:
                hook = module.model.embed_tokens.register_forward_hook(
                    lambda module, args, output: tell(boundary, output)
                )
                stack.callback(hook.remove)
            for layer, part in enumerate(module.model.layers):
                names = {key: name for key, name in self._graph.module_tensors(layer).items() if name in wanted}
                stack.enter_context(watched(part, names, tell))
                if f"kv_cache_out.{layer}" in wanted:
                    hook = part.register_forward_hook(
                        lambda module, args, output, layer=layer: tell(f"kv_cache_out.{layer}", output[1])
                    )
                    stack.callback(hook.remove)
            caches = [to_torch(feed[name]) for name in kv_names(self.manifest)]
            logits, _ = module(*(torch.from_numpy(feed[name]) for name in INDEX_INPUTS), caches)
        if "logits" in wanted:
            tell("logits", logits)
