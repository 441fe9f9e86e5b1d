"""Open-loop load on any OpenAI server: requests arrive by a Poisson process whether or not earlier ones are done.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --rate 4 --requests 100

Prints time to first token, time per output token, inter-token latency and end-to-end latency (mean, percentiles),
request and token throughput; ``--output`` writes them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

WORDS = [
    "river",
    "stone",
    "cloud",
    "engine",
    "paper",
    "window",
    "garden",
    "number",
    "silver",
    "market",
    "winter",
    "letter",
]


@dataclass
class Sample:
    """One request; times in seconds of ``time.perf_counter()``. ``error`` is set if it failed."""

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)  # arrival times of chunks with text
    done: float = 0.0
    error: str | None = None


async def one(session: aiohttp.ClientSession, url: str, body: dict) -> Sample:
    sample = Sample(time.perf_counter())
    try:
        async with session.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                sample.error = f"{answer.status}: {(await answer.text())[:200]}"
                return sample
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = str(event["error"])[:200]
                    return sample
                if event.get("usage"):
                    sample.prompt_tokens = event["usage"]["prompt_tokens"]
                    sample.output_tokens = event["usage"]["completion_tokens"]
                if event["choices"] and event["choices"][0].get("text"):
                    sample.chunks.append(time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.done = time.perf_counter()
    return sample


def lengths(rng: random.Random, median: float, mean: float, most: int) -> int:
    """Log-normal: the mean over the median sets the spread."""
    from math import log, sqrt

    sigma = sqrt(2 * log(mean / median)) if mean > median else 0.0
    return max(1, min(most, round(rng.lognormvariate(log(median), sigma))))


async def load(args: argparse.Namespace) -> tuple[list[Sample], float]:
    rng = random.Random(args.seed)
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        async with session.get(args.url + "/v1/models") as answer:
            model = args.model or (await answer.json())["data"][0]["id"]
        tasks, start = [], time.perf_counter()
        for _ in range(args.requests):
            words = lengths(rng, args.prompt_median, args.prompt_mean, args.max_prompt)
            body = {
                "model": model,
                "prompt": " ".join(rng.choice(WORDS) for _ in range(words)),
                "max_tokens": lengths(rng, args.reply_median, args.reply_mean, args.max_reply),
                "temperature": args.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            tasks.append(asyncio.create_task(one(session, args.url, body)))
            if args.rate != float("inf"):
                await asyncio.sleep(rng.expovariate(args.rate))
        return list(await asyncio.gather(*tasks)), time.perf_counter() - start


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    values = sorted(values)

    def at(share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 4)

    return {"mean": round(sum(values) / len(values), 4), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def report(samples: list[Sample], seconds: float) -> dict:
    good = [s for s in samples if s.error is None]
    ttft = [s.chunks[0] - s.sent for s in good if s.chunks]
    several = [s for s in good if len(s.chunks) > 1 and s.output_tokens > 1]
    gaps = [b - a for s in several for a, b in zip(s.chunks, s.chunks[1:], strict=False)]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": sorted({s.error for s in samples if s.error})[:5],
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(sum(s.output_tokens for s in good) / seconds, 2),
        "prompt_tokens_per_second": round(sum(s.prompt_tokens for s in good) / seconds, 2),
        "ttft_seconds": percentiles(ttft),
        "tpot_seconds": percentiles([(s.chunks[-1] - s.chunks[0]) / (s.output_tokens - 1) for s in several]),
        "itl_seconds": percentiles(gaps),
        "e2e_seconds": percentiles([s.done - s.sent for s in good]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second (default: all at once)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-median", type=float, default=60, help="words")
    parser.add_argument("--prompt-mean", type=float, default=100)
    parser.add_argument("--max-prompt", type=int, default=1000)
    parser.add_argument("--reply-median", type=float, default=60, help="tokens")
    parser.add_argument("--reply-mean", type=float, default=90)
    parser.add_argument("--max-reply", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON file for the figures")
    args = parser.parse_args()
    samples, seconds = asyncio.run(load(args))
    result = report(samples, seconds)
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
