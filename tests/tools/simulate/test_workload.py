"""Workloads: the same for the same seed, and what a trace file may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenrt.runtime import ConfigError
from qwenrt.tools.load.load import Range
from qwenrt.tools.simulate.workload import Arrival, Trace, Workload


def trace(path: Path, *lines: str) -> list[Arrival]:
    file = path / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return list(Trace(file))


def test_a_workload_is_the_same_every_time_and_has_the_sizes_and_the_rate_asked_for() -> None:
    workload = Workload(requests=4000, rate=50, prompt=Range(10, 20), new=Range(3, 5), shared=7, prefixes=4, seed=1)
    arrivals = list(workload)
    assert arrivals == list(workload)
    assert {arrival.num_prompt for arrival in arrivals} == set(range(17, 28))
    assert {arrival.new_tokens for arrival in arrivals} == {3, 4, 5}
    assert arrivals[-1].due == pytest.approx(4000 / 50, rel=0.1)
    assert len({arrival.token_ids()[0] for arrival in arrivals}) == 4
    assert len({arrival.token_ids()[7] for arrival in arrivals}) == 4000


def test_a_trace_says_what_prompts_have_in_common(tmp_path: Path) -> None:
    one, two, ids, alone = trace(
        tmp_path,
        '{"arrival": 0.5, "prompt": 12, "output": 3, "prefixes": [["system", 8], ["doc", 2]]}',
        '{"arrival": 0.5, "prompt": 11, "output": 4, "prefixes": [["system", 8]]}',
        '{"arrival": 1, "prompt": [5, 5, 6], "output": 1}',
        '{"arrival": 2, "prompt": 3, "output": 1}',
    )
    assert one.token_ids()[:8] == two.token_ids()[:8] and one.token_ids()[8] != two.token_ids()[8]
    assert (one.num_prompt, two.num_prompt, two.new_tokens, two.due) == (12, 11, 4, 0.5)
    assert ids.token_ids() == [5, 5, 6]
    assert not set(alone.token_ids()) & {*one.token_ids(), *two.token_ids()}


def test_mooncake_traces_are_read(tmp_path: Path) -> None:
    one, two = trace(
        tmp_path,
        '{"timestamp": 500, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}',
        '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [1, 3]}',
    )
    assert (one.due, one.num_prompt, one.new_tokens) == (0.5, 1000, 7)
    assert one.token_ids()[:512] == two.token_ids()[:512]
    assert one.token_ids()[512] != two.token_ids()[512]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 of .*: Expecting value"),
        ("[1]", "is no JSON object"),
        ('{"arrival": 1, "prompt": 3}', "has no 'output'"),
        ('{"arrival": 1, "prompt": 0, "output": 1}', "prompt is 0"),
        ('{"arrival": 1, "prompt": [1, -1], "output": 1}', "prompt must be"),
        ('{"arrival": 1, "prompt": 3, "output": 1, "prefixes": [["a", 4]]}', "its prefixes have 4"),
        ('{"arrival": -1, "prompt": 3, "output": 1}', "arrival is -1"),
        ('{"arrival": 0.1, "prompt": 3, "output": 1}', "earlier than the line before"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(tmp_path, '{"arrival": 0.5, "prompt": 1, "output": 1}', line)
