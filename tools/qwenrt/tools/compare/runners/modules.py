"""What the modules of a PyTorch decoder compute, under the names that the engine's graph has for it.

Forward hooks tell of every module as it starts and finishes, in our own Qwen3ForCausalLM and in Hugging Face's alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import ModuleTensor

Tell = Callable[[str, Tensor], None]

_PACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Projections that the engine has packed into one, and what they are in a checkpoint."""


@contextmanager
def watched(layer: nn.Module, tensors: Mapping[ModuleTensor, str], tell: Tell) -> Iterator[None]:
    """While the block runs, `tell` of what the modules of a decoder layer take and give, by the names in `tensors`.

    What the layer has no module for is left out.
    """
    handles: list[Any] = []
    for (path, side), name in tensors.items():
        modules = [layer.get_submodule(part) for part in _parts(layer, path)]
        if modules and side == "in":
            handles.append(modules[0].register_forward_pre_hook(lambda module, args, name=name: tell(name, args[0])))
        elif modules:
            together = _Together(name, len(modules), tell)
            handles += [module.register_forward_hook(together.hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(layer: nn.Module, path: str) -> tuple[str, ...]:
    """The modules that `path` is made of in this model, itself or several; none if it has no such thing."""
    known = {name for name, _ in layer.named_modules()}
    for parts in ((path,), _PACKED.get(path, ())):
        if parts and known.issuperset(parts):
            return parts
    return ()


class _Together:
    """Tells of the results of `count` modules, which run one after the other, as one tensor."""

    def __init__(self, name: str, count: int, tell: Tell) -> None:
        self._name, self._count, self._tell = name, count, tell
        self._results: list[Tensor] = []

    def hook(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of each."""
        self._results.append(output[0] if isinstance(output, tuple) else output)
        if len(self._results) == self._count:
            results, self._results = self._results, []
            self._tell(self._name, results[0] if self._count == 1 else torch.cat(results, -1))
