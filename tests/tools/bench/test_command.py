"""`qwenrt bench ENGINE` as a user calls it: the result, the table, the plots, and what is refused."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from qwenrt.runtime import EngineDir

from ..command import qwenrt, start


@pytest.mark.slow
def test_json_goes_to_stdout_and_the_table_to_stderr(tiny_engine: Path, tmp_path: Path) -> None:
    names = ("prefill", "decode", "long-context", "batch", "shared-prefix", "mix")
    chosen = [argument for name in names for argument in ("--workload", name)]
    options = ("--repeats", "2", "--threads", "1", "--kv-memory", "8MiB", "--rate", "50", "--requests", "10")
    sizes = ("--concurrency", "4", "--concurrency", "16")
    status, stdout, stderr = qwenrt(
        "bench", tiny_engine, *chosen, *options, *sizes, "--plots", tmp_path / "plots", "--words", "3-9"
    )
    assert status == 0, stderr
    result = json.loads(stdout)
    manifest = EngineDir.open(tiny_engine).manifest
    assert result["engine"]["parameters"] == manifest.model.num_parameters
    assert result["options"] == {"threads": 1, "kv_memory": 8 << 20, "enable_prefix_caching": True, "max_loras": 4}
    assert len(result["load"]["load_s"]["runs"]) == 2
    places = ["prefill", "decode", "long-context", "batch", "batch", "shared-prefix", "mix", "mix", "mix"]
    assert [entry["workload"] for entry in result["workloads"]] == places
    prefill, decode, long, *batches, shared, closed, _, opened = result["workloads"]
    assert prefill["prompt_tokens"] == min(512, manifest.limits.max_model_len - 1)
    for run, rate in zip(prefill["ttft_s"]["runs"], prefill["tokens_per_s"]["runs"], strict=True):
        assert rate == pytest.approx(prefill["prompt_tokens"] / run)
    assert [batch["sequences"] for batch in batches] == [4, 16]
    assert shared["cached_share"]["median"] > 0.5 > prefill["cached_share"]["max"] == 0
    assert (closed["concurrency"], closed["rate"], opened["concurrency"], opened["rate"]) == (4, None, None, 50)
    for mix in (closed, opened):
        assert mix["failed"] == 0 and mix["requests"] == 10
        assert 0 < mix["ttft_ms"]["p50"] <= mix["ttft_ms"]["p99"]
        assert 0 <= mix["goodput_per_s"] <= mix["requests_per_s"]
    for entry in (decode, long, *batches, shared):
        for i in range(2):
            shares = [entry[name]["runs"][i] for name in entry if name.startswith("share_")]
            assert len(shares) == 6
            assert all(0 <= share <= 1 for share in shares)
            assert sum(shares) == pytest.approx(1)
        assert entry["roofline_share"]["min"] > 0
        assert 0 <= entry["roofline_by_memory"] <= 1
    for entry in result["workloads"]:
        assert 0 < entry["kv_pool_bytes"] <= 8 << 20 < entry["peak_rss_bytes"]
    for label in ("load", "decode, 16 + ", "shared-prefix, ", "mix, 50", "memory read", "int8 products"):
        assert label in stderr
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["latency.png", "step.png", "throughput.png"]


def test_what_stops_a_measurement_is_said_in_one_line(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--kv-memory", "1")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("qwenrt: error: measuring load failed: kv_memory is 1 bytes")
    assert stderr.count("\n") == 1
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--max-model-len", "4")
    assert (status, stdout) == (1, "")
    assert stderr == "qwenrt: error: measuring load failed: max_model_len is 4, bench needs 5 or more\n"


def test_plots_without_matplotlib_are_refused_before_measuring(tiny_engine: Path, tmp_path: Path) -> None:
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--plots", tmp_path / "plots", blocked=("matplotlib",))
    assert (status, stdout) == (1, "")
    assert stderr == "qwenrt: error: this needs matplotlib; install it with: pip install 'qwenrt[plots]'\n"


def test_a_result_that_could_not_be_written_is_refused_before_measuring(tiny_engine: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "bench.json"):
        status, stdout, stderr = qwenrt("bench", tiny_engine, "--json", place)
        assert (status, stdout) == (2, "")
        assert stderr.endswith(f"Error: --json {place} is no file that could be written\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_measurement_ends_with_the_command(tiny_engine: Path, signum: signal.Signals) -> None:
    process = start("bench", tiny_engine)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (workers := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    status, line = {
        signal.SIGINT: (130, b"qwenrt: error: interrupted\n"),
        signal.SIGTERM: (143, b"qwenrt: error: terminated\n"),
        signal.SIGKILL: (-9, b""),
    }[signum]
    assert (process.returncode, stdout, stderr) == (status, b"", line)
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
