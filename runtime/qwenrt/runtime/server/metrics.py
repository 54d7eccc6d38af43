"""Figures for Prometheus; those that mean the same as vLLM's have vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..async_llm import AsyncLLM
from ..outputs import RequestDelta

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """What has been served, and what the engine is doing; `model` is the label model_name of all."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(model)

        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of requests that gave a first token or were pooled."
        )
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "From a token to the next.", _SECONDS)
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self.generation_size = histogram("request_generation_tokens", "Tokens that a request generated.", _TOKENS)
        self._ended = Counter(
            "vllm:request_success",
            "Answers by how they ended; abort: the client left, or an error.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._add_gauges(llm)
        self._registry.register(_EngineTotals(llm, model))

    def ended(self, reason: str) -> None:
        """Count an answer that ended."""
        self._ended.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add_gauges(self, llm: AsyncLLM) -> None:
        pool = llm.llm.engine.scheduler.pool
        gauges = {
            "vllm:num_requests_running": ("Requests in the engine.", lambda: llm.num_running),
            "vllm:num_requests_waiting": ("Requests that wait for a place in it.", lambda: llm.num_waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of KV blocks in use, 0 to 1.",
                lambda: 1.0 - pool.num_free / pool.num_blocks,
            ),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, ["model_name"], registry=self._registry).labels(self._model).set_function(value)


class _EngineTotals(Collector):
    """What the engine counts itself, read when it is asked for."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._engine = llm.llm.engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The families, for the registry."""
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests that gave up their KV blocks.", labels=["model_name"]
        )
        preemptions.add_metric([self._model], self._engine.scheduler.num_preemptions)
        yield preemptions
        timings = self._engine.timings
        steps = CounterMetricFamily("qwenrt:steps", "Steps of the engine.", labels=["model_name"])
        steps.add_metric([self._model], timings.steps)
        yield steps
        seconds = CounterMetricFamily(
            "qwenrt:step_seconds", "Time in the parts of a step.", labels=["model_name", "part"]
        )
        for part in ("schedule", "prepare", "execute", "sample", "process"):
            seconds.add_metric([self._model, part], getattr(timings, part))
        yield seconds


class RequestMeter:
    """Measures one request; `arrival` is its time on `time.perf_counter`."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, arrival: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._start = self._last = arrival
        self._num_generated = 0
        self._prompt_seen = False
        self._ended: set[int] = set()

    def see(self, delta: RequestDelta) -> None:
        """Count what came."""
        now = perf_counter()
        tokens = sum(len(output.token_ids) for output in delta.outputs)
        metrics = self._metrics
        if not self._prompt_seen:
            self._see_prompt(delta)
        if delta.pooled is not None:
            self._ended.add(0)
            metrics.ended("stop")
        elif tokens and not self._num_generated:
            metrics.first_token.observe(now - self._start)
        elif tokens:
            metrics.inter_token.observe((now - self._last) / max(1, tokens // len(delta.outputs)))
        metrics.generation_tokens.inc(tokens)
        self._num_generated += tokens
        self._last = now
        for output in delta.outputs:
            if output.finish_reason is not None:
                self._ended.add(output.index)
                metrics.ended(output.finish_reason)

    def _see_prompt(self, delta: RequestDelta) -> None:
        self._prompt_seen = True
        metrics = self._metrics
        metrics.prompt_tokens.inc(self._num_prompt_tokens)
        metrics.prompt_size.observe(self._num_prompt_tokens)
        metrics.prefix_cache_queries.inc(self._num_prompt_tokens)
        metrics.prefix_cache_hits.inc(delta.num_cached_tokens)

    def end(self, num_answers: int) -> None:
        """The request is over, finished or not."""
        self._metrics.latency.observe(perf_counter() - self._start)
        self._metrics.generation_size.observe(self._num_generated)
        for _ in range(num_answers - len(self._ended)):
            self._metrics.ended("abort")
