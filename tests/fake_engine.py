"""``FakeEngine``: an ``EngineClient`` without a model. The next token depends on the whole history and the request's
seed; text, stops and the checks of a request are the real ones. It records what it was asked for."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmjax.core.output import PromptRows
from lmjax.engine.lora_names import check_new_lora, find_lora
from lmjax.engine.pooling import check_pooling, prepare
from lmjax.engine.validate import check_request
from lmjax.protocol import EngineInfo, EngineReport, EngineStats, Pooled
from lmjax.text.detokenizer import Detokenizer
from lmjax.text.tokenizer import Tokenizer, load_tokenizer
from lmjax.types import (
    Delta,
    EngineDeadError,
    LoraInfo,
    PoolingParams,
    QueueFullError,
    RequestMetrics,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
)
from tests.fixtures import ALPHA, EOS_ID, FIRST_PIECE, write_tokenizer

SCRIPT = [*range(FIRST_PIECE, FIRST_PIECE + len(ALPHA)), EOS_ID]  # "Say ABCDEFGHIJKL end"
TEXT = "Say ABCDEFGHIJKL end"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), ALPHA)
        return load_tokenizer(directory)


@dataclass
class Asked:
    """One call of ``generate``."""

    ids: list[int]
    params: SamplingParams
    request_id: str | None
    priority: int
    cache_salt: str | None
    lora: str | None = None


class FakeEngine:
    """``script=True``: greedy requests get ``TEXT`` and then random letters; else letters by hash of the history."""

    def __init__(self, *, max_model_len: int = 1024, script: bool = True, step: float = 0.0, **info: Any):
        self.tokenizer = byte_tokenizer()
        facts: dict[str, Any] = {
            "model": "fake",
            "model_type": "fake",
            "vocab_size": 512,
            "max_logprobs": 20,
            "block_size": 16,
            "num_kv_blocks": 4096,
            "max_num_seqs": 64,
            "dtype": "float32",
            "platform": "cpu",
            "device_count": 1,
            "eos_token_ids": (EOS_ID,),
        }
        self.info = EngineInfo(**(facts | {"max_model_len": max_model_len} | info))
        self.script, self.step = script, step
        self.asked: list[Asked] = []
        self.pooled: list[tuple[Any, ...]] = []
        self.running = 0
        self.aborted = 0
        self.yielded = 0  # updates
        self.refuse: Exception | None = None  # raised by the iterators
        self.fail_after: int | None = None  # tokens, then an update with an error
        self.ready = True
        self.dead: str | None = None
        self.lost: str | None = None  # why one of several engines died, with all requests that run
        self._stats = EngineStats()
        self._die = asyncio.Event()
        self.weight_version: int | str = 0
        self.sleep_level = 0
        self.orders: list[tuple[Any, ...]] = []
        self.refuse_orders: Exception | None = None
        self.loras: dict[str, LoraInfo] = {}

    # --- EngineClient -----------------------------------------------------------------------------------------

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        checked = check_request(prompt_token_ids, params, self.info, self.tokenizer)
        return checked.prompt, checked.params

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> AsyncIterator[RequestUpdate]:
        find_lora(lora, self.loras, self.info)
        checked = check_request(prompt_token_ids, params, self.info, self.tokenizer)
        self.asked.append(Asked(checked.prompt, checked.params, request_id, priority, cache_salt, lora))
        return self._stream(checked.prompt, checked.params, set(checked.stop_ids), request_id or "?", lora)

    def pooling_prompt(
        self,
        text: str | list[int],
        params: PoolingParams,
        second: str | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], int]:
        return prepare(self.tokenizer, self.info, text, params, second, add_special_tokens)

    async def pool(self, prompt_token_ids: list[int], params: PoolingParams, **rest: Any) -> Pooled:
        """The "hidden state" of a prompt: (its length, its first id, its last one, 1), or the length of a pair's
        second text."""
        find_lora(rest["lora"], self.loras, self.info)
        checked = check_pooling(prompt_token_ids, params, self.info, rest["split"])
        self.pooled.append((prompt_token_ids, params, rest))
        self.running += 1
        try:
            await self._pause()
            if self.refuse is not None:
                raise self.refuse
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        ids = checked.prompt
        assert self.info.pooling is not None
        state = [len(ids), ids[0], ids[-1], 1] if self.info.pooling.task == "embed" else [len(ids) - rest["split"]]
        checked.sink.add(PromptRows(0, 0, len(state), np.array(state, np.float32).tobytes()))
        now = time.monotonic()
        return Pooled(checked.sink.values().tobytes(), len(ids), 0, RequestMetrics(now, now))

    def stats(self) -> EngineStats:
        self._stats.num_running = self.running
        return self._stats

    def reports(self) -> dict[int, EngineReport]:
        return {0: EngineReport(self.info, self.stats(), self.ready)}

    async def load_weights(self, path: str, version: int | str | None = None, kv_cache: str = "keep") -> None:
        self._order("load", path, version, kv_cache)
        self.weight_version = version if version is not None else int(self.weight_version) + 1

    async def load_lora(self, name: str, path: str) -> None:
        check_new_lora(name, path, self.loras, self.info)
        self._order("load_lora", name, path)
        self.loras[name] = LoraInfo(name, path, 8)

    async def unload_lora(self, name: str) -> None:
        find_lora(name, self.loras, self.info)
        self._order("unload_lora", name)
        del self.loras[name]

    async def sleep(self, level: int = 1) -> None:
        self._order("sleep", level)
        self.sleep_level = level

    async def wake_up(self) -> None:
        self._order("wake")
        self.sleep_level = 0

    def _order(self, *order: Any) -> None:
        if self.refuse_orders is not None:
            raise self.refuse_orders
        self.orders.append(order)

    async def close(self) -> None:
        self.die("closed")

    # --- what tests do ----------------------------------------------------------------------------------------

    def die(self, reason: str) -> None:
        self.dead = self.dead or reason
        self._die.set()

    def lose(self, reason: str) -> None:
        self.lost = reason
        self._die.set()

    # --- inside -----------------------------------------------------------------------------------------------

    async def _stream(
        self, prompt: list[int], params: SamplingParams, stop_ids: set[int], request_id: str, lora: str | None
    ) -> AsyncIterator[RequestUpdate]:
        find_lora(lora, self.loras, self.info)  # it may have gone
        if self.refuse is not None:
            raise self.refuse
        self.running += 1
        finished = False
        try:
            choices = [_Choice(self, prompt, params, stop_ids, i, lora) for i in range(params.n)]
            times = RequestMetrics(arrival=time.monotonic(), scheduled=time.monotonic())
            cached = (len(prompt) - 1) // 16 * 16 if any(a.ids == prompt for a in self.asked[:-1]) else 0
            prompt_logprobs = choices[0].prompt_logprobs()
            self._stats.prompt_tokens += len(prompt)
            while not finished:
                await self._pause()
                if reason := self.dead or self.lost:
                    yield RequestUpdate(request_id, [], len(prompt), error=reason, finished=True)
                    raise EngineDeadError(reason, None if self.dead else 1)
                deltas = [choice.advance() for choice in choices if not choice.done]
                times.last_token = time.monotonic()
                times.first_token = times.first_token or times.last_token
                finished = all(choice.done for choice in choices)
                self._stats.steps += 1
                self._stats.generation_tokens += len(deltas)
                self._stats.iteration_tokens.append(len(deltas))
                self.yielded += 1
                error = None
                if self.fail_after is not None and choices[0].count >= self.fail_after:
                    error, finished = "the step failed", True
                yield RequestUpdate(
                    request_id, deltas, len(prompt), cached, prompt_logprobs, finished, error, metrics=times
                )
                prompt_logprobs = None
        finally:
            self.running -= 1
            if not finished:
                self.aborted += 1

    async def _pause(self) -> None:
        if not self.step:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(self.step):
                await self._die.wait()
        except TimeoutError:
            pass


class _Choice:
    def __init__(
        self,
        engine: FakeEngine,
        prompt: list[int],
        params: SamplingParams,
        stop_ids: set[int],
        index: int,
        lora: str | None,
    ):
        self._engine, self._prompt, self._params, self._stop_ids, self._index = engine, prompt, params, stop_ids, index
        self._scripted = engine.script and lora is None
        history = prompt if lora is None else (prompt, lora, engine.loras[lora].path)
        self._digest = hashlib.blake2b(repr(history).encode(), digest_size=8).digest()
        self._detokenizer = Detokenizer(engine.tokenizer, params)
        self.count = 0
        self.done = False

    def advance(self) -> Delta:
        params = self._params
        token = self._next()
        self._digest = hashlib.blake2b(self._digest + token.to_bytes(4), digest_size=8).digest()
        self.count += 1
        reason: Any = None
        stop_reason: int | str | None = None
        is_stop = token in self._stop_ids and self.count > params.min_tokens
        silent = is_stop and not params.include_stop_str_in_output
        result = self._detokenizer.push([] if silent else [token])
        text = result.text
        if is_stop:
            reason = "stop"
            stop_reason = None if token == EOS_ID and not params.ignore_eos else token
        elif result.stop is not None:
            reason, stop_reason = "stop", result.stop
        elif self.count >= (params.max_tokens or 0):
            reason = "length"
        if reason and result.stop is None:
            text += self._detokenizer.flush()
        self.done = reason is not None
        logprobs = [self._logprob(token, params.logprobs)] if params.logprobs is not None else None
        versions = [self._engine.weight_version]
        return Delta(self._index, text, [token], logprobs, reason, stop_reason, versions)

    def _next(self) -> int:
        params = self._params
        if params.greedy and self._scripted and self.count < len(SCRIPT):
            return SCRIPT[self.count]
        key = (self._digest, 0 if params.greedy else (params.seed, self._index))
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        allowed = params.allowed_token_ids or range(97, 123)
        return allowed[int.from_bytes(digest) % len(allowed)]

    def _logprob(self, token: int, k: int) -> TokenLogprobs:
        ranked = [token, *(t for t in range(65, 90) if t != token)][:k]
        return TokenLogprobs(token, -0.105, 1, tuple(ranked), tuple(-0.105 - 3.0 * i for i in range(k)))

    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        k = self._params.prompt_logprobs
        if k is None:
            return None
        return [None, *(self._logprob(token, k) for token in self._prompt[1:])]


def queue_full() -> QueueFullError:
    return QueueFullError("the queue is full (4 requests)", retry_after=7)
