"""Prometheus metrics, with vLLM's names where the meaning is the same; the prefix is a setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lmjax.protocol import EngineReport, Pooled
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
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of started requests, those found in the cache included"),
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
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")  # as in vLLM
_GAUGES = (
    ("num_requests_running", "num_running", "Requests in the running batch"),
    ("num_requests_waiting", "num_waiting", "Requests that wait for a place"),
    ("cpu_cache_usage_perc", "host_usage", "Share of the host tier's KV blocks that hold something (0-1)"),
    ("kv_cache_usage_perc", "kv_usage", "Share of KV blocks in use (0-1); cached free blocks count as free"),
)


class ServerMetrics:
    """Made with the server; ``attach`` joins the engines when they are ready.

    The label ``engine`` is its number; what belongs to none (a request that was not admitted) counts as engine 0's.
    """

    def __init__(self, prefix: str):
        disable_created_metrics()
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self.model_name = ""
        self._reports: Callable[[], dict[int, EngineReport]] | None = None
        self._weights: Callable[[], tuple[int | str, int]] = lambda: (0, 0)
        self._steps_seen: dict[int, int] = {}
        self._latest: dict[int, EngineReport] = {}
        self._hist: dict[int, dict[str, Histogram]] = {}
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

    def attach(
        self,
        model_name: str,
        reports: Callable[[], dict[int, EngineReport]],
        weights: Callable[[], tuple[int | str, int]],
    ) -> None:
        """``weights``: their version, and the level of sleep."""
        self.model_name, self._reports, self._weights = model_name, reports, weights
        self.poll()

    def _labels(self, engine: int) -> tuple[str, str]:
        return self.model_name, str(engine)

    def hist(self, engine: int) -> dict[str, Histogram]:
        if engine not in self._hist:
            labels = self._labels(engine)
            self._hist[engine] = {name: family.labels(*labels) for name, family in self._families.items()}
        return self._hist[engine]

    def rejected(self, reason: str) -> None:
        self._rejections.labels(*self._labels(0), reason).inc()

    def ended(self, engine: int, reason: str, count: int = 1) -> None:
        self._success.labels(*self._labels(engine), reason).inc(count)

    def cached(self, engine: int, tokens: int) -> None:
        self._cached.labels(*self._labels(engine)).inc(tokens)

    def collect(self) -> Iterator[Any]:
        """The engines' own numbers of the latest poll (called by prometheus_client)."""
        if not self._latest:
            return
        names = ("model_name", "engine")
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for metric, attribute, text in table:
                family = kind(f"{self.prefix}:{metric}", text, labels=names)
                for engine, report in self._latest.items():
                    family.add_metric(self._labels(engine), getattr(report.stats, attribute))
                yield family
        yield from self._facts(names)

    def _facts(self, names: tuple[str, ...]) -> Iterator[Any]:
        """What is told of each engine beside its numbers."""
        version, level = self._weights()

        def gauge(name: str, text: str, *more: str) -> Any:
            return GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=(*names, *more))

        alive = gauge("engine_alive", "1: ready; 0: being started anew")
        cache = gauge("cache_config_info", "The KV cache", "block_size", "num_gpu_blocks", "cache_dtype")
        weights = gauge("weights_info", "The version of the weights", "weight_version")
        sleep = gauge("sleep_level", "0: awake; 1: no KV pool; 2: no weights either")
        adapters = gauge("lora_requests_info", "Adapters of requests; the time of the look", *_LORA_LABELS)
        for engine, (info, stats, is_alive) in self._latest.items():
            if info.max_loras:
                used = (stats.running_loras, stats.waiting_loras)
                about = (str(info.max_loras), *map(",".join, used))
                adapters.add_metric((*self._labels(engine), *about), time.time())
            labels = self._labels(engine)
            alive.add_metric(labels, is_alive)
            cache.add_metric((*labels, *map(str, (info.block_size, info.num_kv_blocks, info.dtype))), 1)
            weights.add_metric((*labels, str(version)), 1)
            sleep.add_metric(labels, level)
        yield from (alive, cache, weights, sleep)
        if adapters.samples:
            yield adapters

    def poll(self) -> None:
        """Takes the engines' snapshots; their lists of step sizes go into the histogram, each step once."""
        if self._reports is None:
            return
        self._latest = self._reports()
        for engine, report in self._latest.items():
            stats, observe = report.stats, self.hist(engine)["iteration_tokens_total"].observe
            new = stats.steps - self._steps_seen.get(engine, 0)
            self._steps_seen[engine] = stats.steps
            for tokens in stats.iteration_tokens[-new:] if new > 0 else ():
                observe(tokens)

    def describe(self) -> list[Any]:
        return []  # the names do not depend on the engine's state; nothing to check at registration

    def render(self) -> bytes:
        self.poll()
        return generate_latest(self.registry)


class RequestTimer:
    """The histograms of one prompt's request. ``update`` is called for each update, ``finish`` once."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams):
        self._metrics, self._params = metrics, params
        self._engine: int | None = None  # is known with the first update
        self._open = params.n  # choices
        self._arrival = time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0
        self._prompt_tokens = 0
        self._times: RequestMetrics | None = None
        self._done = False

    def update(self, update: RequestUpdate) -> None:
        new = 0
        if self._engine is None:
            self._begin(update.engine)
        for delta in update.deltas:
            new += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._open -= 1
                self._metrics.ended(update.engine, delta.finish_reason)
        if update.metrics is not None:
            self._times = update.metrics
        if not new:
            return
        now = time.monotonic()
        if not self._first:
            self._first = now
            self._prompt_tokens = update.num_prompt_tokens
            self._hist["time_to_first_token_seconds"].observe(now - self._arrival)
            self._metrics.cached(update.engine, update.num_cached_tokens)
        else:
            self._hist["inter_token_latency_seconds"].observe(now - self._last)
        self._last = now
        self._tokens += new

    def pooled(self, found: Pooled) -> None:
        """The end of a request that generates nothing."""
        self._metrics.ended(found.engine, "stop")
        self._metrics.cached(found.engine, found.num_cached_tokens)
        hist, times, self._done = self._metrics.hist(found.engine), found.metrics, True
        hist["e2e_request_latency_seconds"].observe(time.monotonic() - self._arrival)
        hist["request_prompt_tokens"].observe(found.num_prompt_tokens)
        if times.scheduled:
            hist["request_queue_time_seconds"].observe(times.scheduled - times.arrival)

    def _begin(self, engine: int) -> None:
        self._engine, self._hist = engine, self._metrics.hist(engine)
        self._hist["request_params_n"].observe(self._params.n)
        self._hist["request_params_max_tokens"].observe(self._params.max_tokens or 0)

    def finish(self, unfinished: str | None) -> None:
        """Also called when the request was aborted; then only what happened is observed.

        unfinished: what choices without an end count as, "abort" or "error"; None: they were never admitted.
        """
        if self._done:
            return
        self._done = True
        if unfinished is not None and self._open:
            self._metrics.ended(self._engine or 0, unfinished, self._open)
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
