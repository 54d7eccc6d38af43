"""The engine of this process as what answers a batch's rows, through the very application that `qwenrt serve` serves."""

from __future__ import annotations

from dataclasses import dataclass

from ..async_llm import AsyncLLM, UnavailableError
from ..llm import LLM
from ..server.app import create_inner_app
from ..server.generation import Service
from ..server.inprocess import whole_response
from ..server.protocol import MAX_PROMPTS
from ..server.sampling import recommended_sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as the server would give it."""

    status: int
    body: bytes
    """JSON on one line."""


class EngineWorker:
    """An engine that answers rows; made where an event loop runs. `model` is the name that rows may call it by."""

    def __init__(self, llm: LLM, model: str) -> None:
        # Twice what the engine computes at a time: whoever comes next has been tokenized when a place is free.
        self.capacity = 2 * llm.engine.limits.max_num_seqs
        self._llm = AsyncLLM(llm, max_queue=self.capacity * MAX_PROMPTS)
        self._app = create_inner_app(Service(self._llm, model, recommended_sampling(llm.path)))

    async def start(self) -> None:
        """Nothing: the engine is there."""

    async def answer(self, url: str, body: bytes) -> Answer:
        """Answer a request; raises UnavailableError when the engine is broken."""
        status, answer = await whole_response(self._app, "POST", url, body)
        if status == 503 and self._llm.refusal is not None:
            raise UnavailableError(self._llm.refusal)
        return Answer(status, answer)

    async def close(self) -> None:
        """Drop what is being answered."""
        await self._llm.close()
