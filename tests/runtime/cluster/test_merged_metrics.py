"""The figures of several replicas, put together."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from qwenrt.runtime.cluster.merged_metrics import MergedMetrics


def answer(tokens: int, running: int, usage: float, *seconds: float) -> str:
    """What a replica with these figures answers."""
    registry = CollectorRegistry()
    labels = ["model_name"]
    Counter("vllm:generation_tokens", "t", labels, registry=registry).labels("m").inc(tokens)
    Gauge("vllm:num_requests_running", "r", labels, registry=registry).labels("m").set(running)
    Gauge("vllm:kv_cache_usage_perc", "u", labels, registry=registry).labels("m").set(usage)
    histogram = Histogram("vllm:latency", "l", labels, buckets=(1, 2), registry=registry).labels("m")
    for one in seconds:
        histogram.observe(one)
    return generate_latest(registry).decode()


def value(text: bytes, series: str) -> float:
    (found,) = re.findall(rf"^{re.escape(series)} (\S+)$", text.decode(), re.MULTILINE)
    return float(found)


def test_counters_gauges_and_buckets_add_up_and_shares_are_averaged() -> None:
    text = MergedMetrics().text({"a": answer(10, 2, 0.5, 0.3, 1.5), "b": answer(5, 1, 0.1, 0.4)})
    assert value(text, 'vllm:generation_tokens_total{model_name="m"}') == 15
    assert value(text, 'vllm:num_requests_running{model_name="m"}') == 3
    assert value(text, 'vllm:kv_cache_usage_perc{model_name="m"}') == 0.3
    assert value(text, 'vllm:latency_bucket{le="1.0",model_name="m"}') == 2
    assert value(text, 'vllm:latency_bucket{le="+Inf",model_name="m"}') == 3
    assert value(text, 'vllm:latency_sum{model_name="m"}') == 0.3 + 1.5 + 0.4
    assert value(text, "qwenrt:replicas") == 2
    assert value(text, 'qwenrt:replica_generation_tokens_total{replica="a"}') == 10
    kinds = {family.name: family.type for family in text_string_to_metric_families(text.decode())}
    assert kinds["vllm:generation_tokens"] == "counter"
    assert kinds["vllm:latency"] == "histogram"
    assert kinds["vllm:kv_cache_usage_perc"] == "gauge"


def test_counters_do_not_fall_and_gauges_forget_when_a_replica_is_replaced() -> None:
    merged = MergedMetrics()
    merged.text({"a": answer(10, 2, 0.5, 0.3), "b": answer(5, 1, 0.1)})
    text = merged.text({"b": answer(6, 0, 0.2), "c": answer(1, 1, 0.4, 0.5)})
    assert value(text, 'vllm:generation_tokens_total{model_name="m"}') == 17
    assert value(text, 'vllm:latency_count{model_name="m"}') == 2
    assert value(text, 'vllm:num_requests_running{model_name="m"}') == 1
    assert value(text, 'vllm:kv_cache_usage_perc{model_name="m"}') == 0.2 / 2 + 0.4 / 2
    assert b'replica="a"' not in text


def test_of_many_replicas_that_are_gone_only_the_sums_are_kept() -> None:
    merged = MergedMetrics()
    sizes = [len(merged.text({str(number): answer(1, 1, 0.5, 0.3)})) for number in range(100)]
    text = merged.text({"late": answer(1, 1, 0.5), "99": answer(3, 1, 0.5, 0.3)})
    assert value(text, 'vllm:generation_tokens_total{model_name="m"}') == 103
    assert value(text, 'vllm:latency_count{model_name="m"}') == 100
    assert max(sizes) - min(sizes) < 100
    assert len(merged._latest) < 20


def test_without_a_replica_there_are_the_counters() -> None:
    merged = MergedMetrics()
    merged.text({"a": answer(10, 2, 0.5)})
    text = merged.text({})
    assert value(text, 'vllm:generation_tokens_total{model_name="m"}') == 10
    assert value(text, "qwenrt:replicas") == 0
    assert b"kv_cache_usage" not in text
