"""/metrics: names, labels, values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmjax.protocol import EngineReport, EngineStats
from lmjax.types import RequestUpdate
from server.state import STATE
from tests.fake_engine import FakeEngine, queue_full
from tests.server.helpers import Api, api, run_async

HISTOGRAMS = (
    "request_prompt_tokens request_generation_tokens iteration_tokens_total request_params_n request_params_max_tokens "
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds"
)
COUNTERS = (
    "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens prompt_tokens_cached "
    "request_success admission_rejections compiles steps padded_tokens scheduled_tokens step_host_seconds "
    "step_device_seconds pipeline_ticks pipeline_idle_ticks external_prefix_cache_queries "
    "external_prefix_cache_hits num_swaps_out num_swaps_in swapped_out_blocks swapped_in_blocks swapped_bytes"
)
GAUGES = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc cpu_cache_usage_perc engine_alive "
    "cache_config_info weights_info sleep_level"
)


async def scrape(server: Api) -> tuple[dict[str, str], dict[str, float]]:
    """Types by family, and samples: by name, and by name{label=value} for labels other than engine 0's."""
    async with server.http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    families = list(text_string_to_metric_families(text))
    samples: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            common = [("model_name", "fake"), ("engine", "0")]
            extra = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if (k, v) not in common)
            samples[sample.name + (f"{{{extra}}}" if extra else "")] = sample.value
    return {family.name: family.type for family in families}, samples


@pytest.mark.parametrize("prefix", ["lmjax", "vllm"])
@run_async
async def test_names(prefix: str) -> None:
    async with api(metrics_prefix=prefix) as server:
        await server.complete(max_tokens=4)
        types, _ = await scrape(server)
        expected = dict.fromkeys(HISTOGRAMS.split(), "histogram")
        expected |= dict.fromkeys(COUNTERS.split(), "counter") | dict.fromkeys(GAUGES.split(), "gauge")
        assert types == {f"{prefix}:{name}": kind for name, kind in expected.items()}


@run_async
async def test_values() -> None:
    async with api() as server:
        await server.complete(prompt="a" * 33, max_tokens=4)
        await server.complete(prompt="a" * 33, max_tokens=4, n=2)
        await server.stream_chat(max_tokens=20)
        _, samples = await scrape(server)
        assert samples["lmjax:num_requests_running"] == 0
        assert samples["lmjax:prompt_tokens_total"] == 33 + 33 + 21
        assert samples["lmjax:generation_tokens_total"] == 4 + 8 + 7
        assert samples["lmjax:prompt_tokens_cached_total"] == 32
        assert samples["lmjax:request_success_total{finished_reason=length}"] == 3
        assert samples["lmjax:request_success_total{finished_reason=stop}"] == 1
        assert samples["lmjax:steps_total"] == 4 + 4 + 7
        assert samples["lmjax:iteration_tokens_total_count"] == 15
        assert samples["lmjax:iteration_tokens_total_sum"] == 19
        assert samples["lmjax:request_params_n_sum"] == 4
        assert samples["lmjax:request_params_max_tokens_sum"] == 28
        assert samples["lmjax:time_to_first_token_seconds_count"] == 3
        assert samples["lmjax:inter_token_latency_seconds_count"] == 3 + 3 + 6
        assert samples["lmjax:request_generation_tokens_sum"] == 19
        assert samples["lmjax:e2e_request_latency_seconds_count"] == 3
        assert samples["lmjax:request_queue_time_seconds_count"] == 3
        key = "lmjax:cache_config_info{block_size=16,cache_dtype=float32,num_gpu_blocks=4096}"
        assert samples[key] == 1
        # a second scrape counts no step twice
        _, again = await scrape(server)
        assert again["lmjax:iteration_tokens_total_count"] == 15


@run_async
async def test_several_engines() -> None:
    """Each has series of its own, and the requests that it worked on; one that died shows."""
    async with api() as server:
        fake = server.engine
        report, generate = fake.reports()[0], fake.generate

        async def by_engine_1(*args: Any, **kwargs: Any) -> AsyncIterator[RequestUpdate]:
            async for update in generate(*args, **kwargs):
                update.engine = 1
                yield update

        other = EngineReport(replace(fake.info, num_kv_blocks=7), EngineStats(steps=5, iteration_tokens=[3]), True)
        server.app[STATE].metrics.attach("fake", lambda: {0: report._replace(alive=False), 1: other}, lambda: (7, 0))
        fake.generate = by_engine_1  # type: ignore[method-assign]
        await server.complete(max_tokens=4)
        _, samples = await scrape(server)
        assert samples["lmjax:engine_alive"] == 0 and samples["lmjax:engine_alive{engine=1}"] == 1
        assert samples["lmjax:cache_config_info{block_size=16,cache_dtype=float32,num_gpu_blocks=4096}"] == 1
        assert samples["lmjax:cache_config_info{block_size=16,cache_dtype=float32,engine=1,num_gpu_blocks=7}"] == 1
        assert samples["lmjax:steps_total{engine=1}"] == 5
        assert samples["lmjax:iteration_tokens_total_sum{engine=1}"] == 3
        assert samples["lmjax:request_success_total{engine=1,finished_reason=length}"] == 1
        assert samples["lmjax:request_params_n_sum{engine=1}"] == 1
        assert samples["lmjax:request_params_n_sum"] == 0


@run_async
async def test_requests_without_an_answer() -> None:
    """Aborted by the client, ended by the engine, refused: each counts where it belongs."""
    async with api(FakeEngine(script=False, step=0.01)) as server:
        body = {"model": "fake", "prompt": "x", "max_tokens": 900, "stream": True, "n": 2}
        async with server.http.post("/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await server.settled(lambda: server.engine.aborted == 1)
        server.engine.refuse = queue_full()
        await server.complete(429)
        server.engine.refuse, server.engine.fail_after = None, 2
        await server.complete(500, max_tokens=9)
        _, samples = await scrape(server)
        ended = {key: value for key, value in samples.items() if key.startswith("lmjax:request_success_total")}
        name = "lmjax:request_success_total{finished_reason=%s}"
        assert ended == {name % "abort": 2, name % "error": 1}
        assert samples["lmjax:admission_rejections_total{reason=queue_full}"] == 1


@run_async
async def test_buckets() -> None:
    async with api() as server:
        await server.complete()
        _, samples = await scrape(server)
        for name, first, last, count in (
            ("time_to_first_token_seconds", "0.001", "2560.0", 22),
            ("inter_token_latency_seconds", "0.01", "80.0", 19),
            ("e2e_request_latency_seconds", "0.3", "7680.0", 21),
        ):
            found = [key for key in samples if key.startswith(f"lmjax:{name}_bucket")]
            assert len(found) == count + 1
            assert f"lmjax:{name}_bucket{{le={first}}}" in found and f"lmjax:{name}_bucket{{le={last}}}" in found
