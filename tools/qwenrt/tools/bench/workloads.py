"""The workloads of fixed size, by name. Standard library alone: tools/peers gives rivals the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`sequences` requests at once, each of `shared_tokens` that all have and `prompt_tokens` of its own, and `new_tokens`.

    rate: what its tokens_per_s counts. "prompt": prompt tokens by the time to the first token; "decode": tokens after the first
    by the time after it; "output": all generated tokens by the whole time.
    """

    sequences: int = 1
    shared_tokens: int = 0
    prompt_tokens: int
    new_tokens: int
    rate: Literal["prompt", "decode", "output"]

    @property
    def length(self) -> int:
        """Tokens of a sequence when it is finished."""
        return self.shared_tokens + self.prompt_tokens + self.new_tokens

    def within(self, *, max_len: int, max_sequences: int) -> Workload:
        """The same work made as small as an engine needs it: no more sequences, each of at most `max_len` (>= 3) tokens."""
        sequences = min(self.sequences, max_sequences)
        if self.length <= max_len:
            return replace(self, sequences=sequences)
        new = self.new_tokens if self.new_tokens == 1 else max(2, self.new_tokens * max_len // self.length)
        prompt = max(1, self.prompt_tokens * (max_len - new) // (self.length - self.new_tokens))
        shared = max_len - new - prompt if self.shared_tokens else 0
        return replace(
            self,
            sequences=sequences,
            shared_tokens=shared,
            prompt_tokens=prompt if self.shared_tokens else max_len - new,
            new_tokens=new,
        )

    def prompts(self, vocabulary: Sequence[int], seed: int) -> list[list[int]]:
        """Random token ids out of `vocabulary` for each sequence; the same for the same seed, nothing in common for another."""
        rng = random.Random(seed)
        shared = rng.choices(vocabulary, k=self.shared_tokens)
        return [shared + rng.choices(vocabulary, k=self.prompt_tokens) for _ in range(self.sequences)]

    def tokens_per_s(self, first: float, total: float) -> float:
        """The rate, from seconds to the first token of all and to the last."""
        if self.rate == "prompt":
            return self.sequences * (self.shared_tokens + self.prompt_tokens) / first
        if self.rate == "decode":
            return self.sequences * (self.new_tokens - 1) / (total - first)
        return self.sequences * self.new_tokens / total


WORKLOADS = {
    "prefill": Workload(prompt_tokens=512, new_tokens=1, rate="prompt"),
    "decode": Workload(prompt_tokens=16, new_tokens=128, rate="decode"),
    "long-context": Workload(prompt_tokens=4096, new_tokens=32, rate="decode"),
    "batch": Workload(sequences=16, prompt_tokens=128, new_tokens=64, rate="output"),
    "shared-prefix": Workload(sequences=16, shared_tokens=1024, prompt_tokens=32, new_tokens=32, rate="output"),
}
"""Those of a fixed size; `mix` is the one beside them."""

WARM_UP = Workload(prompt_tokens=16, new_tokens=4, rate="decode")
