"""Rows over workers that come and go: one line each, and no row is blamed for another's deed."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from qwenrt.runtime.batch import Answer, BatchReport, ResultFile, RowReader, WorkerLostError, run_batch


class FrailWorker:
    """Answers with the request itself, in any order, and is lost by chance or by a row with `deadly`; no engine is behind it."""

    def __init__(self, chance: random.Random, hazard: float, capacity: int = 4) -> None:
        self.capacity = capacity
        self.answered: list[int] = []
        self.starts = 0
        self._chance = chance
        self._hazard = hazard
        self._alive = False
        self._in_flight = 0

    async def start(self) -> None:
        assert not self._in_flight
        self.starts += 1
        self._alive = True

    async def answer(self, url: str, body: bytes) -> Answer:
        self._in_flight += 1
        assert self._in_flight <= self.capacity
        try:
            data = json.loads(body)
            for _ in range(self._chance.randrange(4)):
                await asyncio.sleep(0)
                if not self._alive:
                    break
            if self._chance.random() < self._hazard or "deadly" in data:
                self._alive = False
            if not self._alive:
                raise WorkerLostError("it fell over")
            self.answered.append(data["number"])
            return Answer(200, body)
        finally:
            self._in_flight -= 1

    async def close(self) -> None:
        self._alive = False


def write(path: Path, bodies: list[dict[str, Any]]) -> RowReader:
    rows = [{"custom_id": str(number), "url": "/v1/completions", "body": body} for number, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RowReader(path)


def run(rows: RowReader, out: Path, workers: list[FrailWorker]) -> tuple[BatchReport, list[dict[str, Any]]]:
    with ResultFile(out) as results:
        report = asyncio.run(asyncio.wait_for(run_batch(rows, results, workers), 60))
    return report, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_one_line_however_often_workers_are_lost(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    bodies = [{"number": number, "prompt": [number % 7, number]} for number in range(chance.choice([0, 1, 15, 300]))]
    rows = write(tmp_path / "in", bodies)
    workers = [FrailWorker(chance, 0.01) for _ in range(chance.choice([1, 2, 5]))]
    report, lines = run(rows, tmp_path / "out", workers)
    assert sorted(int(line["custom_id"]) for line in lines) == list(range(len(bodies)))
    assert report.answered + report.failed == len(bodies)
    for line in lines:
        if line["response"] is not None:
            assert line["response"]["body"] == bodies[int(line["custom_id"])]
    answered = [number for worker in workers for number in worker.answered]
    assert sorted(answered) == sorted(int(line["custom_id"]) for line in lines if line["response"])


def test_a_row_that_kills_its_workers_is_given_up_and_no_other_is(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"number": number} for number in range(100)]
    bodies[40]["deadly"] = True
    workers = [FrailWorker(random.Random(1), 0.0), FrailWorker(random.Random(2), 0.0)]
    report, lines = run(write(tmp_path / "in", bodies), tmp_path / "out", workers)
    assert (report.answered, report.failed) == (99, 1)
    (lost,) = (line for line in lines if line["error"])
    assert (lost["custom_id"], lost["error"]["code"]) == ("40", "worker_lost")
    assert lost["error"]["message"] == "3 workers were lost with it; the last: it fell over"
    again, same = run(write(tmp_path / "in", bodies), tmp_path / "out", [FrailWorker(random.Random(3), 0.0)])
    assert (again.found, again.answered, again.failed) == (100, 0, 0) and same == lines


def test_a_worker_that_never_answers_ends_the_job(tmp_path: Path) -> None:
    rows = write(tmp_path / "in", [{"number": number} for number in range(1000)])
    worker = FrailWorker(random.Random(1), 1.0)
    with ResultFile(tmp_path / "out") as results, pytest.raises(WorkerLostError, match="it fell over"):
        asyncio.run(run_batch(rows, results, [worker]))
    assert worker.starts <= 30
