"""Updates of one request -> its ``RequestOutput``."""

from __future__ import annotations

from typing import Any

from lmjax.types import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestOutput,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
)


class Collector:
    """``tokenizer`` gives the text of single tokens (``token_text``)."""

    def __init__(self, tokenizer: Any, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams):
        self._tokenizer, self._prompt, self._prompt_ids = tokenizer, prompt, prompt_token_ids
        self._deltas = [Delta(index) for index in range(params.n)]
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        self._last: RequestUpdate | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, update: RequestUpdate) -> None:
        for delta in update.deltas:
            self._texts[delta.index].append(delta.text)
            delta.text = ""  # joined once at the end
            self._deltas[delta.index].merge(delta)
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        self._last = update

    def output(self) -> RequestOutput:
        assert self._last is not None and self._last.finished
        prompt_logprobs = None
        if self._prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else self._map(entry) for entry in self._prompt_logprobs]
        return RequestOutput(
            request_id=self._last.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(delta) for delta in self._deltas],
            num_cached_tokens=self._last.num_cached_tokens,
            metrics=self._last.metrics,
        )

    def _completion(self, delta: Delta) -> CompletionOutput:
        entries = delta.logprobs
        return CompletionOutput(
            index=delta.index,
            text="".join(self._texts[delta.index]),
            token_ids=delta.token_ids,
            cumulative_logprob=None if entries is None else sum(entry.logprob for entry in entries),
            logprobs=None if entries is None else [self._map(entry) for entry in entries],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            weight_versions=delta.weight_versions,
        )

    def _map(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones by rank."""
        text = self._tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            found.setdefault(token, Logprob(logprob, rank, text(token)))
        return found
