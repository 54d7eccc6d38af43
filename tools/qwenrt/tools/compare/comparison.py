"""One engine against one reference, from the first batch to the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qwenrt.plugins import ConfigError
from qwenrt.runtime import LLM, EngineDir, LoRARequest, RequestOutput
from qwenrt.runtime.lora import LoraAdapter
from qwenrt.runtime.text.tokenizer import Tokenizer

from .batch_files import BatchWriter, load_batches
from .batches import Batch, make_batches
from .bisect import bisect
from .feeds import Array
from .greedy import compare_greedy, generate_greedily
from .layers import LayerWalk, compare_layers, worst_errors
from .perplexity import compare_perplexity
from .references import executor
from .results import Check, Comparison, LogitErrors
from .runners.backend import BackendRunner
from .runners.base import PagedRunner
from .runners.graph import GraphRunner
from .sample_text import PROMPTS
from .steps import compare_step, worst_checks
from .tolerances import Tolerance

Progress = Callable[[str], None]

RUNTIME_BACKENDS = ("onnxruntime", "torch", "tensorrt")
BACKENDS = (*RUNTIME_BACKENDS, "numpy")
_GREEDY_BLOCKS = 512


@dataclass(frozen=True)
class Wanted:
    """What is to be compared."""

    layers: bool = False
    """Every layer; else they are looked at where something is out of tolerance."""
    bisect: bool = False
    tokens: int = 32
    """To generate after each prompt."""
    prompts: Sequence[str] = PROMPTS
    inputs: Path | None = None
    """Recorded batches, in the place of those that are made."""
    perplexity: str | None = None
    """A text."""
    window: int = 512


class EngineUnderTest:
    """An engine as a whole, run by the runtime, and in parts, by what can run parts of its graph."""

    def __init__(
        self, engine: EngineDir, backend: str, threads: int | None = None, adapter: LoraAdapter | None = None
    ) -> None:
        """adapter: for every token, where the engine has places for adapters; else it was merged at export."""
        self.engine, self.backend, self._threads = engine, backend, threads
        # TensorRT fuses layers: there the parts of the graph are run by torch, in the graph's own types.
        parts = executor("torch" if backend == "tensorrt" else backend, engine, threads)
        self.parts = GraphRunner(f"{backend}, part by part", engine, parts, adapter=adapter)
        self.in_runtime = backend in RUNTIME_BACKENDS
        self.whole: PagedRunner = BackendRunner(backend, engine, threads, adapter) if self.in_runtime else self.parts

        self.lora_request: LoRARequest | None = None
        if adapter is not None and engine.manifest.max_lora_rank:
            self.lora_request = LoRARequest("compared", adapter.path)

    def llm(self) -> LLM:
        """The engine as users run it."""
        manifest = self.engine.manifest
        blocks = manifest.limits.max_num_seqs * -(-manifest.limits.max_model_len // manifest.block_size)
        return LLM(
            self.engine.path, backend=self.backend, threads=self._threads, num_kv_blocks=min(blocks, _GREEDY_BLOCKS)
        )


class Comparer:
    """Compares an engine with a reference, step by step of what is wanted."""

    def __init__(
        self,
        subject: EngineUnderTest,
        reference: PagedRunner,
        tolerance: Tolerance,
        wanted: Wanted,
        progress: Progress,
    ) -> None:
        self.subject, self.reference = subject, reference
        self.tolerance, self.wanted, self.progress = tolerance, wanted, progress
        manifest = subject.engine.manifest
        self.result = Comparison(
            engine=str(subject.engine.path),
            backend=subject.backend,
            reference=reference.name,
            formats=f"computes in {manifest.dtype}, weights {manifest.weights}, KV cache {manifest.kv_dtype}",
            tolerances=asdict(tolerance),
        )
        self._walks: list[tuple[Batch, LayerWalk]] = []
        self._failed: Batch | None = None
        # What the reference gave for the last batch: the next one starts from its KV pools.
        self._expected: dict[str, Array] = {}

    def run(self, writer: BatchWriter | None = None) -> Comparison:
        """All of it; the reference's weights are in memory while this runs, and no longer. `writer` gets every batch."""
        answers = self._generate()
        self.progress(f"loading {self.reference.name}")
        with self.reference, self.subject.whole:
            self._steps(writer)
            if self._failed is not None and not self.wanted.layers:
                self._walk(self._failed)
            self._layers()
            if self.wanted.bisect:
                self._bisect()
            if answers:
                self._greedy(answers)
            if self.wanted.perplexity is not None:
                self._perplexity(self.wanted.perplexity)
        return self.result

    def _steps(self, writer: BatchWriter | None) -> None:
        """Every batch as a whole, and layer by layer if that is wanted."""
        checks: list[Check] = []
        empty = True
        for batch in self._batches():
            empty = False
            if writer is not None:
                writer.append(batch.feed)
            found, logits, self._expected = self._step(batch)
            checks += found
            self.result.logits += [logits] if logits else []
            if self._failed is None and not all(check.passed for check in found):
                self._failed = batch
            if self.wanted.layers:
                self._walk(batch)
        if empty:
            raise ConfigError(
                f"{self.wanted.inputs} holds no batches, so nothing was compared; record some with: qwenrt generate --record"
            )
        self.result.checks += worst_checks(checks)

    def _batches(self) -> Iterator[Batch]:
        """Recorded ones, or made ones whose KV pools hold what the reference left in them a step before."""
        engine = self.subject.engine
        if self.wanted.inputs is not None:
            return load_batches(self.wanted.inputs, engine.manifest)
        return make_batches(engine, lambda feed: self._expected)

    def _step(self, batch: Batch) -> tuple[list[Check], LogitErrors | None, dict[str, Array]]:
        self.progress(f"batch {batch.name}")
        return compare_step(self.subject.whole, self.reference, batch, self.tolerance)

    def _walk(self, batch: Batch) -> None:
        self.progress(f"batch {batch.name}, layer by layer")
        walk = compare_layers(self.subject.parts, self.reference, batch, self.tolerance)
        self._walks.append((batch, walk))

    def _layers(self) -> None:
        """What the walks found. Where only the whole is out of tolerance, say what that means."""
        walks = [walk for _, walk in self._walks]
        checks = worst_checks([check for walk in walks for check in walk.checks])
        bad = [check for check in checks if not check.passed]
        self.result.checks += checks if self.wanted.layers else bad
        self.result.layers = worst_errors(walks)
        if self._failed is None or bad:
            return
        end = self.result.layers[-1].accumulated
        if end <= self.tolerance.logits:
            self.result.notes.append(
                "part by part the engine's graph is right, as a whole it is not: look at what only the whole has, buffers that "
                f"are bound in place, the optimisation of the graph, the backend {self.subject.backend}"
            )
        else:
            self.result.notes.append(
                "every part is within tolerance by itself; the errors of all of them add up beyond what is allowed for the whole"
            )

    def _bisect(self) -> None:
        """Look into the first part that is out of tolerance, in the first batch that shows it."""
        parts = [segment.name for segment in self.subject.parts.graph.segments]
        bad = [(parts.index(walk.first_bad), batch) for batch, walk in self._walks if walk.first_bad is not None]
        if not bad:
            self.result.notes.append("--bisect: no part of the graph is out of tolerance by itself")
            return
        index, batch = min(bad, key=lambda item: item[0])
        segment = self.subject.parts.graph.segments[index]
        self.progress(f"batch {batch.name}: bisecting {segment.name}")
        self.result.bisection = bisect(self.subject.parts, self.reference, batch, segment, self.tolerance)

    def _generate(self) -> list[tuple[str, RequestOutput]]:
        """What the engine itself says after each prompt; before all else, so that its weights are in memory once at a time."""
        if not self.wanted.tokens:
            return []
        if not self.subject.in_runtime:
            self.result.notes.append(
                f"greedy tokens were not compared: the runtime has no backend {self.subject.backend}"
            )
            return []
        if self.subject.engine.manifest.task != "generate":
            self.result.notes.append("greedy tokens were not compared: the engine gives none")
            return []
        if self.subject.engine.manifest.limits.max_model_len < 2:
            self.result.notes.append("greedy tokens were not compared: the engine's sequences end after one token")
            return []
        self.progress("greedy tokens")
        outputs = generate_greedily(
            self.subject.llm(), self.wanted.prompts, self.wanted.tokens, self.subject.lora_request
        )
        return list(zip(self.wanted.prompts, outputs, strict=True))

    def _greedy(self, answers: Sequence[tuple[str, RequestOutput]]) -> None:
        self.progress("the reference's opinion of the greedy tokens")
        tokenizer = Tokenizer.from_dir(self.subject.engine.path)
        checks, self.result.divergences = compare_greedy(
            answers, self.subject.whole, self.reference, tokenizer, self.tolerance
        )
        self.result.checks += worst_checks(checks)

    def _perplexity(self, text: str) -> None:
        engine = self.subject.engine
        token_ids = Tokenizer.from_dir(engine.path).encode(text)
        window = min(self.wanted.window, engine.manifest.limits.max_model_len)
        check, self.result.perplexity = compare_perplexity(
            self.subject.whole, self.reference, token_ids, window, self.tolerance, self.progress
        )
        self.result.checks.append(check)
