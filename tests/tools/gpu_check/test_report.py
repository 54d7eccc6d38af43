"""The table and the JSON say what was found, and whether the op suite passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_check.parts import Result, Row, Status
from gpu_check.report import op_suite_passed, text, timings, write_json

CASES: list[Row] = [{"case": "one", "passed": True}, {"case": "two", "passed": True}]
RATES = Result("rates", Status.PASSED, 3.0, [
    {"what": "copy", "seconds": 2.0, "bytes": 8e12},
    {"what": "bf16 matmul", "seconds": 1.0, "flops": 8e14},
])  # fmt: skip


def suite(status: Status = Status.PASSED, rows: list[Row] = CASES) -> Result:
    return Result("op suite", status, 1.0, rows)


def test_the_op_suite_passes_only_if_it_ran_to_its_end_and_every_case_passed() -> None:
    assert op_suite_passed([suite(), Result("decode", Status.FAILED)])
    assert not op_suite_passed([])
    assert not op_suite_passed([Result("decode", Status.PASSED)])
    assert not op_suite_passed([suite(rows=[])])
    assert not op_suite_passed([suite(rows=[*CASES, {"case": "three", "passed": False, "error": "wrong"}])])
    for status in (Status.FAILED, Status.TIMED_OUT, Status.SKIPPED):
        assert not op_suite_passed([suite(status)])


def decode(seconds: float, **changes: object) -> Result:
    row: Row = {"pool": "bfloat16", "batch": 64, "context": 4096, "seconds": seconds, "bytes": 4e9}
    return Result("decode", Status.PASSED, 1.0, [row | changes])


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0e-3, "85% met"), (1.3e-3, "85% MISSED")])
def test_a_kernel_is_held_against_the_rate_of_the_same_run(seconds: float, verdict: str) -> None:
    line = timings([RATES, decode(seconds, torch_seconds=2 * seconds, op_seconds=1.5 * seconds, error=1e-3)])[2]
    percent = f"{4e9 / seconds / 4e12:.0%}"
    assert line[:4] == ("decode", "bfloat16", "64 x 4096", f"{seconds * 1e6:.1f} us")
    assert line[5:] == (
        percent, verdict, f"{1.5 * seconds * 1e6:.1f} us", f"{2 * seconds * 1e6:.1f} us (2.00x)", "", "", "1.0e-03"
    )  # fmt: skip


def test_other_kernels_stand_beside_ours_at_the_same_size() -> None:
    theirs = Result("flashinfer", Status.PASSED, 1.0, [
        {"kernel": "decode", "batch": 64, "context": 1024, "seconds": 9e-3},
        {"kernel": "decode", "batch": 64, "context": 4096, "seconds": 5e-4},
    ])  # fmt: skip
    assert timings([RATES, decode(1e-3), theirs])[2][9] == "500.0 us (0.50x)"
    assert timings([RATES, decode(1e-3, pool="float8_e4m3fn"), theirs])[2][9] == ""


@pytest.mark.parametrize(("error", "told"), [(1e-3, "500.0 us (0.50x)"), (0.9, "computes something else")])
def test_another_kernel_counts_if_it_computes_the_same(error: float, told: str) -> None:
    row = {"kernel": "decode", "batch": 64, "context": 4096, "seconds": 5e-4, "error": error}
    line = timings([RATES, decode(1e-3), Result("xqa", Status.PASSED, 1.0, [row])])[2]
    assert (line[9], line[10]) == ("", told)


def test_what_is_missing_leaves_the_rest_of_the_table() -> None:
    """No rates: the times without percentages. A size that did not fit: why. An error, or NaN: said in the line."""
    assert timings([decode(1e-3)])[0][3:7] == ("1000.0 us", "4.00 TB/s", "", "")
    assert timings([decode(1e-3, skipped="needs 52 GB, 20 GB are free")])[0][3] == "needs 52 GB, 20 GB are free"
    assert timings([decode(1e-3, error=0.5)])[0][-1] == "5.0e-01 TOO LARGE"
    assert timings([decode(1e-3, error=float("nan"))])[0][-1] == "nan TOO LARGE"


def test_the_text_names_every_part_and_every_failed_case() -> None:
    failed = suite(Status.FAILED, [*CASES, {"case": "three", "passed": False, "error": "off by one"}])
    lines = text(
        [failed, RATES, decode(1e-3), Result("memcheck", Status.SKIPPED, error="it is not installed")]
    ).splitlines()
    assert lines[0] == "op suite: failed in 1 s, 2 of 3 cases passed"
    assert "memcheck: skipped in 0 s: it is not installed" in lines
    assert "  three: off by one" in lines
    header = next(line for line in lines if line.startswith("kernel"))
    (row,) = (line for line in lines if line.startswith("decode  "))
    assert row.index("64 x 4096") == header.index("size")


def test_json_has_all_rows_and_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"gpu": "a GPU"}, [suite(), RATES, decode(1e-3, error=float("nan"))])
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["op_suite_passed"] is True
    assert [part["name"] for part in document["parts"]] == ["op suite", "rates", "decode"]
    assert document["parts"][2]["rows"][0]["error"] is None
