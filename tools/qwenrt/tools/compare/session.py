"""All that one `qwenrt compare` does: an engine against each of the references that were named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from qwenrt.exporter.hub import local_checkpoint
from qwenrt.plugins import ConfigError
from qwenrt.runtime import EngineDir
from qwenrt.runtime.lora import LoraAdapter

from .batch_files import batch_writer
from .comparison import Comparer, EngineUnderTest, Wanted
from .references import (
    OF_A_CHECKPOINT,
    OF_THE_GRAPH,
    ReferenceSpec,
    check_checkpoint,
    default_reference,
    load_reference,
)
from .results import Comparison
from .sample_text import PROMPTS
from .tolerances import overridden, tolerance_for

_GRAPH_NOTE = (
    "{} runs the engine's own graph and weights, which proves what executes the graph, not the export; for that give --reference "
    "CHECKPOINT"
)


def compare_engine(
    engine: EngineDir,
    *,
    reference: str | None = None,
    against: Sequence[str] = (),
    backend: str | None = None,
    layers: bool = False,
    bisect: bool = False,
    tokens: int = 32,
    prompts: Sequence[str] | None = None,
    inputs: Path | None = None,
    save_inputs: Path | None = None,
    perplexity: str | None = None,
    window: int = 512,
    tolerances: Mapping[str, float] | None = None,
    threads: int | None = None,
    lora: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Comparison]:
    """Compare an engine folder with each reference; see `qwenrt compare --help` for the options.

    reference: a checkpoint folder or hub id. against: names as `references.ReferenceSpec` parses them, by default the strictest
    that there is. perplexity: a text. lora: an adapter's folder, merged into the checkpoint; the engine has it in a slot or,
    without places for adapters, in its weights. Raises ConfigError if something cannot be compared at all; what differs is in
    the results.
    """
    if engine.manifest.tp > 1:
        raise ConfigError(
            f"{engine.path} is split over {engine.manifest.tp} ranks, each with a graph and a KV pool of its own, which are not "
            "compared; compare an export without --tp, which computes the same"
        )
    if perplexity is not None and engine.manifest.task != "generate":
        raise ConfigError(
            f"{engine.path} is for the task {engine.manifest.task}, which has no perplexity; leave it out"
        )
    checkpoint = None if reference is None else local_checkpoint(reference, weights=True)
    dtypes = None if checkpoint is None else check_checkpoint(checkpoint, engine.manifest)
    specs = [ReferenceSpec.parse(name) for name in against] or [default_reference(checkpoint)]
    adapter = None if lora is None else LoraAdapter.from_dir(lora)
    if adapter is not None and checkpoint is None and not engine.manifest.max_lora_rank:
        raise ConfigError(
            f"{engine.path} has no places for adapters; --lora is then for the checkpoint: give --reference"
        )
    runners = [load_reference(spec, engine, checkpoint, adapter) for spec in specs]
    wanted = Wanted(layers, bisect, tokens, prompts or PROMPTS, inputs, perplexity, window)
    subject = EngineUnderTest(engine, backend or _default_backend(engine), threads, adapter)
    results: list[Comparison] = []
    for spec, runner in zip(specs, runners, strict=True):
        stored = dtypes if spec.name in OF_A_CHECKPOINT else None
        tolerance = overridden(tolerance_for(engine.manifest, stored, spec.dtype), tolerances or {})
        comparer = Comparer(subject, runner, tolerance, wanted, progress)
        with batch_writer(save_inputs) if save_inputs and not results else nullcontext() as writer:
            results.append(comparer.run(writer))
        if spec.name in OF_THE_GRAPH:
            results[-1].notes.insert(0, _GRAPH_NOTE.format(spec.name))
    return results


def _default_backend(engine: EngineDir) -> str:
    return "onnxruntime" if engine.manifest.target == "onnxruntime" else "tensorrt"
