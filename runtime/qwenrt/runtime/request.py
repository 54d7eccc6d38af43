"""One sequence being computed, as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from .lora import LoraAdapter
from .sampling.sampler import SequenceSampler
from .speculation import Drafter


class RequestStatus(enum.Enum):
    """Where a request is: in the waiting queue, in the running list, or in neither for good."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A sequence and how far it is: tokens below `num_computed` have their K and V in `block_ids`.

    Outside a step `len(block_ids) == ceil(num_computed / block_size)`. A request that was preempted, one that is half prefilled
    and one that decodes differ only in their integers.
    """

    request_id: str
    token_ids: list[int]
    """Prompt, then what was generated."""
    num_prompt: int
    max_tokens: int
    """How many tokens may be generated, after every limit was applied."""
    sampler: SequenceSampler | None
    """None: the logits of the last token are wanted as they are, and nothing is generated."""
    drafter: Drafter | None = None
    drafts: list[int] = field(default_factory=list)
    """Guesses at the tokens that follow `token_ids`, to be checked by the next step."""
    adapter: LoraAdapter | None = None
    """What it is answered with; None: the model as it is."""
    adapter_slot: int = -1
    """Where the adapter is while the request runs."""
    num_computed: int = 0
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `token_ids`, extended when they are asked for."""
    status: RequestStatus = RequestStatus.WAITING
    prompt_logprobs: int | None = None
    """While the prompt's log-probabilities are wanted: how many of the most likely tokens in each place."""
    num_cached: int | None = None
    """Prompt tokens that the first admission found in the prefix cache; None before."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return len(self.token_ids) - self.num_prompt


class Chunk(NamedTuple):
    """Compute `count` tokens of a request from `start` on: its own, then `drafts`.

    `samples` tells whether the request's last token is among them: the step samples after it and after each draft.
    """

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # a tuple's method of that name is none that a chunk needs
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_logits(self) -> int:
        """Rows of logits that the chunk needs: those of its last tokens, or of all where the prompt's are wanted."""
        if self.request.prompt_logprobs is not None:
            return self.count
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, and which requests lost their blocks to make room for it."""

    chunks: list[Chunk]
    preempted: list[Request]
