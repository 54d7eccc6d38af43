"""`qwenrt bench` on a tiny engine: every number is there and adds up."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from qwenrt.runtime import EngineDir
from qwenrt.tools.bench_worker import Bench, bandwidth

from .command import qwenrt, start


@pytest.mark.slow
def test_json_goes_to_stdout_and_the_table_to_stderr(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--repeats", "2", "--threads", "1", "--kv-memory", "8MiB")
    assert status == 0, stderr
    result = json.loads(stdout)
    manifest = EngineDir.open(tiny_engine).manifest
    assert result["engine"]["parameters"] == manifest.model.num_parameters
    assert result["options"] == {"threads": 1, "kv_memory": 8 << 20, "enable_prefix_caching": True}
    assert len(result["load"]["load_s"]["runs"]) == len(result["prefill"]["ttft_s"]["runs"]) == 2
    prefill, decode, batch = result["prefill"], result["decode"], result["batch"]
    assert prefill["tokens"] == min(512, manifest.limits.max_model_len - 1)
    for run, rate in zip(prefill["ttft_s"]["runs"], prefill["tokens_per_s"]["runs"], strict=True):
        assert rate == pytest.approx(prefill["tokens"] / run)
    assert decode["read_gb_s"] == pytest.approx(
        decode["weight_bytes_per_token"] * decode["tokens_per_s"]["median"] / 1e9
    )
    assert decode["bandwidth_share"] == pytest.approx(decode["read_gb_s"] / result["machine"]["read_gb_s"]["median"])
    assert batch["sequences"] == min(16, manifest.limits.max_num_seqs)
    for i in range(2):
        shares = [batch[name]["runs"][i] for name in batch if name.startswith("share_")]
        assert len(shares) == 6
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1)
    assert 0 < batch["kv_pool_bytes"] <= 8 << 20
    for part in (prefill, decode, batch):
        assert part["peak_rss_bytes"] > part["kv_pool_bytes"]
    for label in ("load", "decode, batch 1", "share of execute", "memory read bandwidth", "peak memory, batch 1"):
        assert label in stderr


def test_prompts_are_the_same_every_time_and_hold_no_special_token(tiny_engine: Path) -> None:
    bench = Bench(str(tiny_engine), {}, 1)
    prompt = bench.prompt(500, 7)
    assert prompt == bench.prompt(500, 7)
    assert prompt[:100] != bench.prompt(500, 8)[:100]
    assert not set(prompt) & set(bench.engine.tokenizer.special_token_ids)


def test_no_run_hits_the_prefix_cache_of_another(tiny_engine: Path) -> None:
    bench = Bench(str(tiny_engine), {}, 3)
    cached = []
    step = bench.engine.step

    def watched() -> object:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    bench.engine.step = watched  # type: ignore[method-assign, assignment]
    bench.prefill()
    bench.decode()
    bench.batch()
    assert cached
    assert set(cached) == {0}


def test_bandwidth_is_a_plausible_number_of_bytes_a_second() -> None:
    rates = bandwidth(1, 2)["read_gb_s"]
    assert len(rates) == 2
    assert all(0.5 < rate < 5000 for rate in rates)


def test_what_stops_a_measurement_is_said_in_one_line(tiny_engine: Path) -> None:
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--kv-memory", "1")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("qwenrt: error: measuring load failed: kv_memory is 1 bytes")
    assert stderr.count("\n") == 1
    status, stdout, stderr = qwenrt("bench", tiny_engine, "--max-model-len", "4")
    assert (status, stdout) == (1, "")
    assert stderr == "qwenrt: error: measuring load failed: max_model_len is 4, bench needs 5 or more\n"


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
