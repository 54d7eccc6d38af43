"""Which engines are run, and how one is measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from peers import rival
from peers.ours import Ours
from peers.run import commands, main
from qwenrt.tools.bench.workloads import WORKLOADS


def test_the_rivals_that_have_weights_are_run_and_our_engines(tmp_path: Path, tiny_engine: Path) -> None:
    (tmp_path / "weights" / "openvino-int8").mkdir(parents=True)
    (tmp_path / "weights" / "llama-int4.gguf").touch()
    found = commands(tmp_path, [tiny_engine])
    assert found == {
        ("llama", "int4"): [sys.executable, "-m", "peers.llama", str(tmp_path / "weights" / "llama-int4.gguf")],
        ("openvino", "int8"): [
            *(str(tmp_path / "openvino/bin/python"), "-m", "peers.openvino"),
            str(tmp_path / "weights" / "openvino-int8"),
        ],
        ("qwenrt", "float32"): [sys.executable, "-m", "peers.ours", str(tiny_engine)],
    }


def test_who_cannot_be_limited_to_avx2_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--results", str(tmp_path / "r.json"), "--avx2", "--who", "openvino"])
    assert "openvino cannot be told to use AVX2 only" in capsys.readouterr().err


def test_results_with_and_without_avx2_do_not_share_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "r.json"
    results.write_text('[{"who": "llama", "weights": "int4", "workload": "decode"}]')
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--results", str(results), "--avx2"])
    assert "has results without --avx2; give another file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decode", "batch", "shared-prefix"])
def test_ours_is_measured_as_rivals_are(demo_engine: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(WORKLOADS[name], shared_tokens=WORKLOADS[name].shared_tokens // 8, new_tokens=9)
    monkeypatch.setitem(rival.WORKLOADS, name, small)
    monkeypatch.setattr(rival, "VOCABULARY", range(300))
    found = rival.measure(name, Ours(demo_engine, 1, small), 0.25, 2)
    assert (found["workload"], found["load_s"]) == (name, 0.25)
    assert len(found["tokens_per_s"]) == len(found["other_cpus"]) == 2
    assert all(rate > 0 for rate in found["tokens_per_s"])
    assert found["peak_rss_bytes"] > 10 << 20
