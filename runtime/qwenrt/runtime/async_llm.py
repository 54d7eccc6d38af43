"""AsyncLLM: an LLM whose engine steps on a thread of its own, for asyncio programs such as the server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from qwenrt.plugins import QwenrtError, RequestError

from .adapters import LoRARequest
from .admission import AdmissionQueue
from .job import PreparedRequest
from .llm import LLM, Prompt
from .outputs import RequestDelta, merge_deltas
from .pooling import PoolingParams
from .sampling.params import SamplingParams

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class QueueFullError(RequestError):
    """As many requests wait as may; `retry_after` is a guess in seconds at when one more may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests wait already; try again in {retry_after} s")
        self.retry_after = retry_after


class RequestTimeoutError(RequestError):
    """A request took longer than requests may."""


class UnavailableError(QwenrtError):
    """The engine takes no requests (any more)."""


class StepError(QwenrtError):
    """The engine failed in a step of this request; other requests go on."""


class RequestStream:
    """A request's news as they come: an asynchronous iterator, and a context that aborts the request when it is left early.

    A reader that is slower than the engine gets more at once.
    """

    def __init__(self, llm: AsyncLLM, prepared: PreparedRequest, priority: int, tenant: str) -> None:
        self.prepared = prepared
        self.priority = priority
        self.tenant = tenant
        self.engine_id: str | None = None
        """Its id in the engine, once it is there."""
        self._llm = llm
        self._news: list[RequestDelta] = []
        self._error: Exception | None = None
        self._finished = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """The next news; raises what went wrong: RequestError, RequestTimeoutError, StepError or UnavailableError."""
        while not self._news:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            await self._changed.wait()
        self._changed.clear()
        news, self._news = self._news, []
        return merge_deltas(news)

    def close(self) -> None:
        """Abort the request unless it is finished; its blocks are free before the next step."""
        if self._timer is not None:
            self._timer.cancel()
        self._llm._forget(self, abort=self._unfinished)

    def end_after(self, timeout: float, since: float) -> None:
        """End the request with RequestTimeoutError `timeout` seconds after the loop's time `since`, unless it has ended."""
        self._timer = asyncio.get_running_loop().call_at(since + timeout, self._time_out, timeout)

    @property
    def _unfinished(self) -> bool:
        return not self._finished and self._error is None

    def _push(self, delta: RequestDelta) -> None:
        if self._unfinished:
            self._news.append(delta)
            self._finished = delta.finished
            self._changed.set()

    def _fail(self, error: Exception) -> None:
        if self._unfinished:
            self._error = error
            self._changed.set()

    def _time_out(self, timeout: float) -> None:
        if self._unfinished:
            self._llm._abort(self)
            self._fail(RequestTimeoutError(f"the request took more than {timeout:g} s; ask for fewer tokens"))


_Command = tuple[Literal["add", "abort", "stop"], RequestStream | None]
_News = list[tuple[RequestStream, RequestDelta | Exception]]


class AsyncLLM:
    """An LLM for the running asyncio event loop; its engine steps on a thread of its own while there are requests.

    llm: not to be used otherwise meanwhile. max_queue: requests that may wait beyond those that the engine has places for.
    request_timeout: seconds that a request may take, waiting included. Those that wait are let in as `AdmissionQueue` has it. A
    step that fails ends the requests that took part in it; the others go on.
    """

    def __init__(self, llm: LLM, *, max_queue: int = 256, request_timeout: float | None = None) -> None:
        self.llm = llm
        self.request_timeout = request_timeout
        self._max_open = llm.engine.limits.max_num_seqs + max_queue
        self._loop = asyncio.get_running_loop()
        self._refusal: str | None = None
        self._cut = False
        # Requests of which the loop's side knows, and those still being prepared.
        self._open: set[RequestStream] = set()
        self._preparing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed_at: deque[float] = deque(maxlen=16)
        # What the engine's thread owns.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._queue: AdmissionQueue[RequestStream] = AdmissionQueue()
        self._running: dict[str, RequestStream] = {}
        self._ids = itertools.count()
        # Tokenizing and rendering must not wait for a grammar that takes long to compile.
        self._text_pool = ThreadPoolExecutor(2, "text")
        self._grammar_pool = ThreadPoolExecutor(1, "grammar")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def refusal(self) -> str | None:
        """Why no request is taken; None while they are."""
        return self._refusal

    @property
    def alive(self) -> bool:
        """Whether the engine's thread lives."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Requests that the engine has."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in the engine, or are being prepared."""
        return max(0, len(self._open) + self._preparing - len(self._running))

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
        since: float | None = None,
        place_of: RequestStream | None = None,
    ) -> RequestStream:
        """Take a request in; raises RequestError (QueueFullError among them) or UnavailableError if it cannot be served.

        prompt: text or token ids. add_special_tokens, lora_request: as in `LLM.generate`. priority: lower goes first. tenant:
        whose request it is; tenants take turns. timeout: seconds that it may take, waiting included, where `request_timeout`
        is not less; since: the loop's time from which they count, by default now. place_of: a stream that has ended, whose
        place this one takes, so that neither a full queue nor the begin of a drain keeps it out; it is closed. The caller
        must enter the stream (`async with`) or close it.
        """
        since = self._loop.time() if since is None else since
        if place_of is None:
            self._check_room()
        compiles = isinstance(params, SamplingParams) and params.structured_outputs is not None
        pool = self._grammar_pool if compiles else self._text_pool
        prepare = functools.partial(
            self.llm.engine.prepare,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
        )
        self._preparing += 1
        self._idle.clear()
        if place_of is not None:
            place_of.close()
        try:
            prepared = await self._loop.run_in_executor(pool, prepare)
            if self._cut:
                raise UnavailableError(self._refusal)
            stream = RequestStream(self, prepared, priority, tenant)
            limits = [limit for limit in (timeout, self.request_timeout) if limit is not None]
            if limits:
                stream.end_after(min(limits), since)
            self._open.add(stream)
            self._commands.put(("add", stream))
            return stream
        finally:
            self._preparing -= 1
            self._note_idle()

    def _check_room(self) -> None:
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        if len(self._open) + self._preparing >= self._max_open:
            raise QueueFullError(self.num_waiting, self._seconds_to_next_place())

    async def in_text_thread(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run tokenizing or rendering where it does not hold up the loop."""
        return await self._loop.run_in_executor(self._text_pool, functools.partial(function, *args, **kwargs))

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait for those taken until they are finished or `timeout` seconds are over; these fail."""
        self._refusal = self._refusal or "the server is shutting down"
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self._cut_off(UnavailableError(f"{self._refusal}, and the request was not finished within {timeout:g} s"))

    def _cut_off(self, error: UnavailableError) -> None:
        """Fail what is not finished, and what is still being prepared."""
        self._cut = True
        for stream in self._open:
            self._abort(stream)
            stream._fail(error)

    async def close(self) -> None:
        """End the engine's thread and all requests. The LLM is then the caller's again."""
        await self.drain(0)
        self._commands.put(("stop", None))
        await self._loop.run_in_executor(None, self._thread.join)
        self._text_pool.shutdown()
        self._grammar_pool.shutdown()

    def _seconds_to_next_place(self) -> int:
        """How long one of the last requests took to follow the one before, 1 to 60."""
        if len(self._closed_at) < 2:
            return 1
        mean = (self._closed_at[-1] - self._closed_at[0]) / (len(self._closed_at) - 1)
        return min(60, max(1, math.ceil(mean)))

    def _abort(self, stream: RequestStream) -> None:
        self._commands.put(("abort", stream))

    def _forget(self, stream: RequestStream, *, abort: bool) -> None:
        if stream not in self._open:
            return
        if abort:
            self._abort(stream)
        self._open.remove(stream)
        self._closed_at.append(self._loop.time())
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._open and not self._preparing:
            self._idle.set()

    def _deliver(self, news: _News) -> None:
        for stream, item in news:
            if isinstance(item, RequestDelta):
                stream._push(item)
            else:
                stream._fail(item)

    def _post(self, news: _News) -> None:
        """Hand news from the engine's thread to the loop's."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _run(self) -> None:
        """What the engine's thread does."""
        try:
            while self._take_commands():
                self._let_in()
                if self.llm.engine.has_unfinished_requests():
                    self._post(self._step())
                if self.llm.engine.failure is not None:
                    raise self.llm.engine.failure
            for request_id in self._running:
                self.llm.engine.abort(request_id)
        except BaseException as error:
            logger.exception("the engine stopped")
            self._refusal = f"the engine stopped ({type(error).__name__}: {error}); start the server again"
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._cut_off, UnavailableError(self._refusal))

    def _take_commands(self) -> bool:
        """Obey what the loop has sent, waiting for it if there is nothing else to do; returns whether to go on."""
        wait = not self._queue and not self.llm.engine.has_unfinished_requests()
        while True:
            try:
                command, stream = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if stream is None:
                return False
            if command == "add":
                self._queue.push(stream)
            elif stream.engine_id is None:
                self._queue.remove(stream)
            elif self._running.pop(stream.engine_id, None) is not None:
                self.llm.engine.abort(stream.engine_id)

    def _let_in(self) -> None:
        """Give the engine requests while it has places; those that it cannot take at once would lose their turn there."""
        engine = self.llm.engine
        scheduler = engine.scheduler
        while self._queue and len(scheduler.running) + len(scheduler.waiting) < engine.limits.max_num_seqs:
            stream = self._queue.pop()
            stream.engine_id = str(next(self._ids))
            engine.submit(stream.engine_id, stream.prepared)
            self._running[stream.engine_id] = stream

    def _step(self) -> _News:
        engine = self.llm.engine
        try:
            jobs = engine.step_jobs()
        except Exception as error:
            logger.exception("a step failed; its requests end, the others go on")
            failed = engine.requests_in_step()
            for request_id in failed:
                engine.abort(request_id)
            message = f"the engine failed while it computed this request ({type(error).__name__}: {error})"
            return [(self._running.pop(request_id), StepError(message)) for request_id in failed]
        news: _News = []
        for job in jobs:
            stream = self._running.pop(job.request_id) if job.finished else self._running[job.request_id]
            news.append((stream, job.take_delta()))
        return news
