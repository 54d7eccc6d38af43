"""The op-suite part of gpu_check as it runs on a GPU, but over the emulated kernels."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpu_check.op_suite import SMALL, whole_suite
from gpu_check.parts import Part, Result, Status, run_part
from gpu_check.report import op_suite_passed
from tests.simt.build import KERNELS, build, missing


@pytest.fixture(autouse=True)
def _toolkit() -> None:
    if reason := missing():
        pytest.skip(reason)


def run_small(library: Path) -> Result:
    command = [sys.executable, "-m", "gpu_check.op_suite", str(library), "--small", "--host"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return run_part(Part("op suite", command, 300), 300, environment)


def test_each_case_is_told_and_passes() -> None:
    result = run_small(build())
    assert result.status is Status.PASSED, result.error
    names = [case.name for case in whole_suite(small=True)]
    assert [row["case"] for row in result.rows] == names
    assert all(any(part in name for name in names) for part in SMALL)
    assert op_suite_passed([result])


@pytest.mark.slow
def test_wrong_kernels_fail_the_cases_that_see_it(tmp_path: Path) -> None:
    kernels = tmp_path / "cuda"
    shutil.copytree(KERNELS, kernels)
    source = kernels / "paging.cuh"
    text = source.read_text()
    assert "max(0, end - window)" in text
    source.write_text(text.replace("max(0, end - window)", "max(0, end - 1 - window)"))
    result = run_small(build(kernels=kernels))
    assert result.status is Status.FAILED
    failed = [row for row in result.rows if not row["passed"]]
    assert {row["case"].split(",")[0] for row in failed} == {"window of 65"}
    assert all("Not equal to tolerance" in row["error"] for row in failed)
    assert len(result.rows) > len(failed)
    assert not op_suite_passed([result])
