"""gpu_check as a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_check.__main__ import SECONDS, main, parts, run_all
from gpu_check.parts import Part, Status

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu_check"


def test_says_in_one_line_that_there_is_no_gpu() -> None:
    code = "import runpy, sys, torch; torch.cuda.is_available = lambda: False; sys.argv = ['gpu_check']; "
    command = [sys.executable, "-c", code + f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpu_check: PyTorch ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--json", "/no/such/folder/file.json"], ["--seconds", "soon"], ["--seconds", "-1"], ["decode"]],
    ids=str,
)
def test_bad_usage_ends_with_2_before_anything_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_every_part_is_there_once_and_all_fit_in_ten_minutes(tmp_path: Path) -> None:
    found = parts(tmp_path / "library.so", None)
    names = [part.name for part in found]
    assert names[:2] == ["build", "op suite"]
    assert len(set(names)) == len(names)
    assert sum(part.seconds for part in found) <= 600
    assert SECONDS < 600
    assert {part.name for part in found if part.missing == "compute-sanitizer is not installed"} == {
        "memcheck",
        "racecheck",
    }
    sanitized = {part.name: part for part in parts(tmp_path / "library.so", "/opt/compute-sanitizer")}["racecheck"]
    assert sanitized.missing is None
    assert list(sanitized.command[:3]) == ["/opt/compute-sanitizer", "--tool", "racecheck"]


def test_a_failed_part_does_not_keep_the_others_from_running() -> None:
    def python(name: str, code: str) -> Part:
        return Part(name, [sys.executable, "-c", code], 60)

    build = python("build", "print('{\"library\": 1}')")
    results = run_all([build, python("decode", "raise SystemExit(3)"), python("rope", "pass")], 100)
    assert [(r.name, r.status) for r in results] == [
        ("build", Status.PASSED),
        ("decode", Status.FAILED),
        ("rope", Status.PASSED),
    ]
    results = run_all([python("build", "raise SystemExit('nvcc is missing')"), python("rope", "pass")], 100)
    assert [(r.name, r.status, r.error) for r in results] == [("build", Status.FAILED, "nvcc is missing")]
