"""Prometheus metrics, with vLLM's names where the meaning is the same; the prefix is a setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lmjax.protocol import EngineInfo, EngineStats
from lmjax.types import RequestMetrics, RequestUpdate, SamplingParams

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request", TOKENS),
    "iteration_tokens_total": ("Tokens of a step", STEP_TOKENS),
    "request_params_n": ("n of a request", CHOICES),
    "request_params_max_tokens": ("max_tokens of a request", TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token", TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a request", ITL),
    "request_time_per_output_token_seconds": ("Mean time a token after the first", ITL),
    "e2e_request_latency_seconds": ("From arrival to the end", LATENCY),
    "request_queue_time_seconds": ("From arrival to the first step", LATENCY),
    "request_inference_time_seconds": ("From the first step to the end", LATENCY),
    "request_prefill_time_seconds": ("From the first step to the first token", LATENCY),
    "request_decode_time_seconds": ("From the first token to the end", LATENCY),
}
# of EngineStats: metric, field, help
_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache"),
    ("external_prefix_cache_queries", "host_queries", "Prompt tokens looked up in the host tier of the KV cache"),
    ("external_prefix_cache_hits", "host_hits", "Prompt tokens found there"),
    ("num_swaps_out", "swaps_out", "Preempted requests whose KV, or some of it, went to the host"),
    ("num_swaps_in", "swaps_in", "Preempted requests whose KV, or some of it, came back from the host"),
    ("swapped_out_blocks", "swapped_out_blocks", "KV blocks written to the host"),
    ("swapped_in_blocks", "swapped_in_blocks", "KV blocks read from the host"),
    ("swapped_bytes", "swapped_bytes", "Bytes of KV blocks written to and read from the host"),
    ("num_preemptions", "preemptions", "Preemptions of running requests"),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed"),
    ("generation_tokens", "generation_tokens", "Tokens generated"),
    ("steps", "steps", "Steps of the engine"),
    ("scheduled_tokens", "scheduled_tokens", "Tokens given to steps"),
    ("padded_tokens", "padded_tokens", "Tokens of padding in steps"),
    ("compiles", "compiles", "Programs compiled after the engine was ready"),
    ("pipeline_ticks", "pipeline_ticks", "Ticks of the pipeline (0: there is none)"),
    ("pipeline_idle_ticks", "pipeline_idle_ticks", "Ticks in which no step entered the pipeline"),
    ("step_host_seconds", "step_host_seconds", "Host time of steps"),
    ("step_device_seconds", "step_device_seconds", "Device time of steps"),
)
_GAUGES = (
    ("num_requests_running", "num_running", "Requests in the running batch"),
    ("num_requests_waiting", "num_waiting", "Requests that wait for a place"),
    ("cpu_cache_usage_perc", "host_usage", "Share of the host tier's KV blocks that hold something (0-1)"),
    ("kv_cache_usage_perc", "kv_usage", "Share of KV blocks in use (0-1); cached free blocks count as free"),
)


class ServerMetrics:
    """Made with the server; ``attach`` joins the engine when it is ready."""

    def __init__(self, prefix: str):
        disable_created_metrics()
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._info: EngineInfo | None = None
        self._stats: Callable[[], EngineStats] | None = None
        self._weights: Callable[[], tuple[int | str, int]] = lambda: (0, 0)
        self._steps_seen = 0
        self._latest = EngineStats()
        labels = ("model_name", "engine")
        self._families = {
            name: Histogram(f"{prefix}:{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            f"{prefix}:request_success", "Requests that ended", (*labels, "finished_reason"), registry=self.registry
        )
        self._cached = Counter(
            f"{prefix}:prompt_tokens_cached", "Prompt tokens taken from the cache", labels, registry=self.registry
        )
        self._rejections = Counter(
            f"{prefix}:admission_rejections", "Requests not admitted", (*labels, "reason"), registry=self.registry
        )
        self.registry.register(self)  # type: ignore[arg-type]
        self.attach_name("")

    def attach_name(self, model_name: str) -> None:
        self.model_name = model_name
        self.labels = (model_name, "0")
        if model_name:
            self.hist = {name: family.labels(*self.labels) for name, family in self._families.items()}

    def attach(
        self,
        model_name: str,
        info: EngineInfo,
        stats: Callable[[], EngineStats],
        weights: Callable[[], tuple[int | str, int]],
    ) -> None:
        """``weights``: their version, and the level of sleep."""
        self.attach_name(model_name)
        self._info, self._stats, self._weights = info, stats, weights

    def rejected(self, reason: str) -> None:
        self._rejections.labels(*self.labels, reason).inc()

    def ended(self, reason: str) -> None:
        self._success.labels(*self.labels, reason).inc()

    def cached(self, tokens: int) -> None:
        self._cached.labels(*self.labels).inc(tokens)

    def collect(self) -> Iterator[Any]:
        """The engine's own numbers of the latest poll (called by prometheus_client)."""
        if self._stats is None or self._info is None:
            return
        stats, names = self._latest, ("model_name", "engine")
        for metric, attribute, text in _GAUGES:
            gauge = GaugeMetricFamily(f"{self.prefix}:{metric}", text, labels=names)
            gauge.add_metric(self.labels, getattr(stats, attribute))
            yield gauge
        for metric, attribute, text in _COUNTERS:
            counter = CounterMetricFamily(f"{self.prefix}:{metric}", text, labels=names)
            counter.add_metric(self.labels, getattr(stats, attribute))
            yield counter
        info = self._info
        config = {"block_size": info.block_size, "num_gpu_blocks": info.num_kv_blocks, "cache_dtype": info.dtype}
        gauge = GaugeMetricFamily(f"{self.prefix}:cache_config_info", "The KV cache", labels=(*names, *config))
        gauge.add_metric((*self.labels, *map(str, config.values())), 1)
        yield gauge
        version, level = self._weights()
        gauge = GaugeMetricFamily(
            f"{self.prefix}:weights_info", "The version of the weights", labels=(*names, "weight_version")
        )
        gauge.add_metric((*self.labels, str(version)), 1)
        yield gauge
        gauge = GaugeMetricFamily(
            f"{self.prefix}:sleep_level", "0: awake; 1: no KV pool; 2: no weights either", labels=names
        )
        gauge.add_metric(self.labels, level)
        yield gauge

    def poll(self) -> None:
        """Takes the engine's snapshot; its list of step sizes goes into the histogram, each step once."""
        if self._stats is None:
            return
        stats = self._stats()
        new = stats.steps - self._steps_seen
        if new > 0:
            self._steps_seen = stats.steps
            observe = self.hist["iteration_tokens_total"].observe
            for tokens in stats.iteration_tokens[-new:]:
                observe(tokens)
        self._latest = stats

    def describe(self) -> list[Any]:
        return []  # the names do not depend on the engine's state; nothing to check at registration

    def render(self) -> bytes:
        self.poll()
        return generate_latest(self.registry)


class RequestTimer:
    """The histograms of one prompt's request. ``update`` is called for each update, ``finish`` once."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams):
        self._metrics = metrics
        self._hist = metrics.hist
        self._arrival = time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0
        self._prompt_tokens = 0
        self._times: RequestMetrics | None = None
        self._done = False
        self._hist["request_params_n"].observe(params.n)
        self._hist["request_params_max_tokens"].observe(params.max_tokens or 0)

    def update(self, update: RequestUpdate) -> None:
        new = 0
        for delta in update.deltas:
            new += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._metrics.ended(delta.finish_reason)
        if update.metrics is not None:
            self._times = update.metrics
        if not new:
            return
        now = time.monotonic()
        if not self._first:
            self._first = now
            self._prompt_tokens = update.num_prompt_tokens
            self._hist["time_to_first_token_seconds"].observe(now - self._arrival)
            self._metrics.cached(update.num_cached_tokens)
        else:
            self._hist["inter_token_latency_seconds"].observe(now - self._last)
        self._last = now
        self._tokens += new

    def finish(self) -> None:
        """Also called when the request was aborted; then only what happened is observed."""
        if self._done:
            return
        self._done = True
        if not self._first:
            return
        hist = self._hist
        hist["e2e_request_latency_seconds"].observe(self._last - self._arrival)
        hist["request_prompt_tokens"].observe(self._prompt_tokens)
        hist["request_generation_tokens"].observe(self._tokens)
        if self._tokens > 1:
            per_token = (self._last - self._first) / (self._tokens - 1)
            hist["request_time_per_output_token_seconds"].observe(per_token)
        times = self._times
        if times is None or not times.scheduled or not times.first_token:
            return
        hist["request_queue_time_seconds"].observe(times.scheduled - times.arrival)
        hist["request_prefill_time_seconds"].observe(times.first_token - times.scheduled)
        hist["request_decode_time_seconds"].observe(times.last_token - times.first_token)
        hist["request_inference_time_seconds"].observe(times.last_token - times.scheduled)
