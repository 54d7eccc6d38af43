"""How long a step takes: a roofline with what a step costs besides."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from qwenrt.plugins import ConfigError
from qwenrt.runtime.engine_dir import EngineManifest
from qwenrt.runtime.request import Chunk


@dataclasses.dataclass(slots=True)
class Work:
    """What a step computes, as far as its time depends on it."""

    tokens: int = 0
    samples: int = 0
    """Rows of logits."""
    context: int = 0
    """Tokens whose K and V are read, over all sequences."""
    pairs: int = 0
    """Pairs of a computed token and one that it sees."""

    def add(self, chunk: Chunk) -> None:
        """Count a chunk of a step."""
        end = chunk.start + chunk.count
        self.tokens += chunk.count
        self.samples += chunk.num_logits
        self.context += end
        self.pairs += chunk.count * (chunk.start + end + 1) // 2

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Work:
        """That of a whole step."""
        work = cls()
        for chunk in chunks:
            work.add(chunk)
        return work


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a step; all coefficients are in seconds but `knee`, in tokens.

    seconds = fixed + weights * max(1, tokens / knee) + per_token * tokens + per_sample * samples + per_context * context
              + per_pair * pairs

    weights: reading the weights once; up to `knee` tokens their products hide behind that, beyond it they are what takes time.
    """

    fixed: float
    weights: float
    knee: float
    per_token: float
    per_sample: float
    per_context: float
    per_pair: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} of the cost model is {value!r}, must be a number of 0 or more")
        if self.knee < 1:
            raise ConfigError(f"knee of the cost model is {self.knee}, must be 1 or more")
        if not self.fixed + self.weights + self.per_token > 0:
            raise ConfigError("fixed, weights and per_token of the cost model are all 0: steps that take no time")

    def seconds(self, work: Work) -> float:
        """Of one step."""
        attention = self.per_context * work.context + self.per_pair * work.pairs
        return self.without_attention(work.tokens, work.samples) + attention

    def without_attention(self, tokens: int, samples: int) -> float:
        """Seconds of a step but for what depends on how much its tokens see."""
        weights = self.weights * max(1.0, tokens / self.knee)
        return self.fixed + weights + self.per_token * tokens + self.per_sample * samples

    @property
    def per_seen(self) -> float:
        """Seconds for each token that a decoding sequence sees in a step."""
        return self.per_context + self.per_pair

    def to_json(self) -> str:
        """JSON text that `from_file` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> CostModel:
        """Read what `to_json` wrote; raises ConfigError naming what is wrong."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the cost model {path}: {error}") from None
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ConfigError(f"{path} is no cost model; it must be a JSON object of {', '.join(sorted(names))}")
        return cls(**value)

    @classmethod
    def of_hardware(
        cls, manifest: EngineManifest, weight_bytes: int, *, bandwidth: float, flops: float, overhead: float
    ) -> CostModel:
        """The roofline of a machine: `bandwidth` in bytes and `flops` in operations a second, `overhead` seconds a step.

        A step reads the weights that its tokens use (`weight_bytes`) and K and V of what they see once, and multiplies each
        weight with each token (2 operations), queries with keys and weights with values (4 * num_heads * head_dim a layer). That
        is the least it can take: give figures that the machine reaches, not those of its data sheet.
        """
        model = manifest.model
        gathered = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        head = 2 * model.vocab_size * model.hidden_size / flops
        products = 2 * (model.num_active_parameters - gathered) / flops - head
        weights = weight_bytes / bandwidth
        return cls(
            fixed=overhead,
            weights=weights,
            knee=max(1.0, weights / products),
            per_token=0.0,
            per_sample=head,
            per_context=manifest.kv_bytes_per_token / bandwidth,
            per_pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
        )


def weight_bytes_of(manifest: EngineManifest) -> int:
    """Bytes of weights that a step of one token reads: without an untied embedding, which is gathered, and idle experts."""
    model = manifest.model
    gathered = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    share = (model.num_active_parameters - gathered) / model.num_parameters
    return round(share * manifest.files["model.safetensors"].size)
