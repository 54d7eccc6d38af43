"""AsyncLLM without HTTP: whose turn it is, draining, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime import LLM, RequestError, SamplingParams
from qwenrt.runtime.admission import AdmissionQueue
from qwenrt.runtime.async_llm import AsyncLLM, QueueFullError, StepError, UnavailableError

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)


@dataclass(eq=False)
class Entry:
    name: str
    priority: int = 0
    tenant: str = ""


def order(entries: list[Entry]) -> str:
    queue: AdmissionQueue[Entry] = AdmissionQueue()
    for entry in entries:
        queue.push(entry)
    return "".join(queue.pop().name for _ in range(len(queue)))


def test_equal_requests_go_in_order_of_arrival() -> None:
    assert order([Entry(name) for name in "abcd"]) == "abcd"


def test_a_lower_priority_number_goes_first() -> None:
    assert order([Entry("a", 1), Entry("b", 0), Entry("c", -5), Entry("d", 0)]) == "cbda"


def test_tenants_take_turns_whoever_asks_more() -> None:
    entries = [Entry(name, tenant="x") for name in "abcd"] + [Entry("e", tenant="y"), Entry("f", tenant="y")]
    assert order(entries) == "aebfcd"


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue: AdmissionQueue[Entry] = AdmissionQueue()
    for name in "abcd":
        queue.push(Entry(name, tenant="x"))
    assert queue.pop().name + queue.pop().name == "ab"
    for name in "ef":
        queue.push(Entry(name, tenant="y"))
    gone = Entry("g", tenant="y")
    queue.push(gone)
    queue.remove(gone)
    assert "".join(queue.pop().name for _ in range(4)) in ("cedf", "ecfd")


class Gate:
    """A backend that computes no step before it is open."""

    def __init__(self, llm: LLM) -> None:
        self.real = llm.engine.backend
        self.opened = threading.Event()
        self.fail_once = False
        llm.engine.backend = self

    def execute(self, inputs: Any) -> Any:
        assert self.opened.wait(60)
        if self.fail_once:
            self.fail_once = False
            raise MemoryError
        return self.real.execute(inputs)


def run(engine: Path, scenario: Callable[[AsyncLLM, Gate], Awaitable[None]], **options: Any) -> None:
    """Run a scenario, after which the engine must be as it was and of use."""
    llm = LLM(engine, num_kv_blocks=64, max_num_seqs=1)

    async def main() -> None:
        gate = Gate(llm)
        async with asyncio.timeout(60), _closing(AsyncLLM(llm, **options)) as async_llm:
            await scenario(async_llm, gate)
        llm.engine.backend = gate.real

    asyncio.run(main())
    assert llm.engine.scheduler.pool.num_free == 64
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].token_ids) == 8


@asynccontextmanager
async def _closing(async_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    yield async_llm
    await async_llm.close()


async def tokens_of(async_llm: AsyncLLM, prompt: str, params: SamplingParams = PARAMS, **options: Any) -> list[int]:
    tokens: list[int] = []
    async with await async_llm.submit(prompt, params, **options) as stream:
        async for delta in stream:
            tokens += delta.outputs[0].token_ids
    return tokens


def test_a_stream_gives_each_token_once_however_late_it_is_read(tiny_engine: Path) -> None:
    expected = LLM(tiny_engine, num_kv_blocks=64).generate("abc", PARAMS)[0].outputs[0]

    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        gate.opened.set()
        assert await tokens_of(async_llm, "abc") == expected.token_ids
        async with await async_llm.submit("abc", PARAMS) as stream:
            await asyncio.sleep(0.3)
            (delta,) = [delta async for delta in stream]
        (output,) = delta.outputs
        assert (output.token_ids, output.text, output.finish_reason) == (expected.token_ids, expected.text, "length")

    run(tiny_engine, scenario)


def test_requests_are_let_in_by_priority_and_tenant(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        done: list[str] = []

        async def ask(name: str, **options: Any) -> None:
            await tokens_of(async_llm, name, **options)
            done.append(name)

        tasks = []
        for number, (name, options) in enumerate(
            {
                "first": {},
                "a": {"tenant": "x"},
                "b": {"tenant": "x"},
                "c": {"tenant": "y"},
                "late": {"priority": 1},
            }.items()
        ):
            tasks.append(asyncio.create_task(ask(name, **options)))
            while async_llm.num_running + async_llm.num_waiting <= number or async_llm.num_running == 0:
                await asyncio.sleep(0.001)
        urgent = asyncio.create_task(ask("urgent", priority=-1))
        while async_llm.num_waiting < 5:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        gate.opened.set()
        await asyncio.gather(*tasks, urgent)
        assert done == ["first", "urgent", "a", "c", "b", "late"]

    run(tiny_engine, scenario)


def test_what_is_accepted_is_finished_by_a_drain_and_the_rest_refused(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        asking = [asyncio.create_task(tokens_of(async_llm, prompt)) for prompt in ("abc", "def")]
        while async_llm.num_running + async_llm.num_waiting < 2:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(async_llm.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await async_llm.submit("ghi", PARAMS)
        gate.opened.set()
        assert [len(tokens) for tokens in await asyncio.gather(*asking)] == [8, 8]
        await draining

    run(tiny_engine, scenario)


def test_what_a_drain_has_no_time_for_fails(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        asking = [asyncio.create_task(tokens_of(async_llm, "abc", ENDLESS)) for _ in range(3)]
        while async_llm.num_running + async_llm.num_waiting < 3:
            await asyncio.sleep(0.001)
        await async_llm.drain(0.01)
        for task in asking:
            with pytest.raises(UnavailableError, match=r"not finished within 0\.01 s"):
                await task
        gate.opened.set()

    run(tiny_engine, scenario)


def test_a_full_queue_refuses(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        streams = [await async_llm.submit("abc", PARAMS) for _ in range(3)]
        with pytest.raises(QueueFullError) as refusal:
            await async_llm.submit("abc", PARAMS)
        assert 1 <= refusal.value.retry_after <= 60
        streams.pop().close()
        streams.append(await async_llm.submit("abc", PARAMS))
        gate.opened.set()
        for stream in streams:
            stream.close()

    run(tiny_engine, scenario, max_queue=2)


def test_a_bad_request_raises_before_anything_runs(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        gate.opened.set()
        for prompt in ("", "x" * 1000, [999]):
            with pytest.raises(RequestError):
                await async_llm.submit(prompt, PARAMS)
        assert async_llm.num_waiting == 0

    run(tiny_engine, scenario)


def test_running_out_of_memory_in_a_step_fails_its_requests_alone(tiny_engine: Path) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        asking = [asyncio.create_task(tokens_of(async_llm, prompt)) for prompt in ("abc", "def")]
        while async_llm.num_running + async_llm.num_waiting < 2 or async_llm.num_running == 0:
            await asyncio.sleep(0.001)
        gate.fail_once = True
        gate.opened.set()
        with pytest.raises(StepError, match="MemoryError"):
            await asking[0]
        assert len(await asking[1]) == 8
        assert async_llm.alive

    run(tiny_engine, scenario)


def test_an_engine_that_cannot_go_on_says_so_to_everybody(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(async_llm: AsyncLLM, gate: Gate) -> None:
        asking = asyncio.create_task(tokens_of(async_llm, "abc"))
        while async_llm.num_running == 0:
            await asyncio.sleep(0.001)
        with monkeypatch.context() as broken:
            broken.setattr(async_llm, "_let_in", lambda: 1 / 0)
            gate.opened.set()
            with pytest.raises(UnavailableError, match=r"the engine stopped.*start the server again"):
                await asking
        with pytest.raises(UnavailableError, match="the engine stopped"):
            await async_llm.submit("abc", PARAMS)
        assert async_llm.refusal is not None
        for request_id in async_llm.llm.engine.requests_in_step():
            async_llm.llm.engine.abort(request_id)

    run(tiny_engine, scenario)
    assert "ZeroDivisionError" in caplog.text
