"""Step records -> updates of requests: detokenizing, stop strings, log-probabilities, choices.

It runs in the front end, so text costs the engine's loop nothing. A stop *string* ends a choice here: its handle is
to be aborted in the engine, and what the engine still sends for it is dropped, so such tokens are never counted.
Updates that the reader has not taken are merged: one ``pending`` update a request, however slow the reader is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lmjax.core.output import Finished, PromptRows
from lmjax.core.plan import row_width
from lmjax.engine.records import StepRecord
from lmjax.engine.scoring import ScoreSink
from lmjax.text.detokenizer import Detokenizer
from lmjax.text.stop import StopAutomaton
from lmjax.types import (
    Delta,
    EngineDeadError,
    FinishReason,
    QueueFullError,
    RequestMetrics,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
)


class Choice:
    """One of the ``n`` answers of a request; ``handle`` names it in the engine."""

    __slots__ = ("detokenizer", "handle", "index", "logprobs", "request", "tokens")

    def __init__(self, request: RequestState, index: int, detokenizer: Detokenizer):
        self.request, self.index, self.handle = request, index, request.handle + index
        self.detokenizer = detokenizer
        self.tokens: list[int] = []  # of the record at hand
        self.logprobs: list[TokenLogprobs] = []


class RequestState:
    """A request as its reader sees it. ``pending``: what is new since the reader last took something.

    ``error`` is raised to the reader once ``pending`` was taken.
    """

    def __init__(
        self,
        request_id: str,
        handle: int,
        prompt: Sequence[int],
        params: SamplingParams,
        arrival: float,
        sink: ScoreSink | None = None,
    ):
        self.sink = sink  # takes the prompt's log-probabilities as they come, instead of an update
        self.request_id, self.handle, self.params = request_id, handle, params
        self.prompt = prompt
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival=arrival)
        self.pending: RequestUpdate | None = None
        self.error: Exception | None = None
        self.finished = False
        self.waiter: Any = None  # the reader's asyncio future
        self.open_choices = params.n
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._missing_prompt_logprobs = 0
        if params.prompt_logprobs is not None and sink is None:
            self._prompt_logprobs = [None] * len(prompt)
            self._missing_prompt_logprobs = len(prompt) - 1
            if not self._missing_prompt_logprobs:
                self.update().prompt_logprobs = self._prompt_logprobs

    @property
    def handles(self) -> list[int]:
        return list(range(self.handle, self.handle + self.params.n))

    def update(self) -> RequestUpdate:
        """The pending update, made if there is none."""
        if self.pending is None:
            self.pending = RequestUpdate(self.request_id, [], len(self.prompt), metrics=self.metrics)
        self.pending.num_cached_tokens = self.num_cached_tokens
        return self.pending

    def take(self) -> RequestUpdate | None:
        update, self.pending = self.pending, None
        return update

    def add(self, delta: Delta) -> None:
        update = self.update()
        for known in update.deltas:
            if known.index == delta.index:
                known.merge(delta)
                break
        else:
            update.deltas.append(delta)
        if delta.finish_reason is not None:
            self.open_choices -= 1
            if self.open_choices == 0:
                self.finished = update.finished = True

    def fail(self, message: str | None, error: Exception | None) -> None:
        """Ends the request: an update with ``message``, if any; then ``error``, if any, is raised to the reader."""
        if message is not None:
            update = self.update()
            update.error, update.finished = message, True
        self.finished, self.error = True, error

    def add_prompt_logprobs(self, found: PromptRows) -> None:
        """Chunks come in any order, and again after a preemption."""
        if self.sink is not None:
            self.sink.add(found)
            return
        entries, k = self._prompt_logprobs, self.params.prompt_logprobs or 0
        for position, row in enumerate(_token_rows(found.rows, found.width), found.first):
            self._missing_prompt_logprobs -= entries[position] is None
            entries[position] = _logprobs(*row, k)
        if self._missing_prompt_logprobs == 0:
            self._missing_prompt_logprobs = -1  # given once
            self.update().prompt_logprobs = entries


class OutputProcessor:
    """All open requests of one engine. Not thread-safe: one owner calls it."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._choices: dict[int, Choice] = {}
        self._next_handle = 1

    def __len__(self) -> int:
        return len(self._choices)

    def open(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        arrival: float,
        sink: ScoreSink | None = None,
    ) -> RequestState:
        """Gives the request ``n`` handles that were never used before."""
        request = RequestState(request_id, self._next_handle, prompt, params, arrival, sink)
        self._next_handle += params.n
        automaton = StopAutomaton(params.stop) if params.stop else None
        for index in range(params.n):
            detokenizer = Detokenizer(self._tokenizer, params, automaton, after=prompt)
            self._choices[request.handle + index] = Choice(request, index, detokenizer)
        return request

    def close(self, request: RequestState) -> list[int]:
        """Forgets the request; returns those of its handles that the engine still works on, to be aborted."""
        return [handle for handle in request.handles if self._choices.pop(handle, None) is not None]

    def process(self, record: StepRecord) -> tuple[list[RequestState], list[int]]:
        """The requests that have news (each once), and the handles to abort."""
        choices, aborts, now = self._choices, [], time.monotonic()
        touched: dict[int, RequestState] = {}
        for started in record.started:
            if choice := choices.get(started.handle):
                metrics = choice.request.metrics
                if not metrics.scheduled:
                    metrics.scheduled = started.scheduled
                    choice.request.num_cached_tokens = started.num_cached_tokens
        for found in record.prompt_rows:
            if choice := choices.get(found.handle):
                choice.request.add_prompt_logprobs(found)
                if choice.request.pending is not None:
                    touched[choice.request.handle] = choice.request
        finished = {end.handle: end for end in record.finished}
        for choice in self._receive(record, finished):
            request = choice.request
            touched[request.handle] = request
            if choice.tokens:
                request.metrics.last_token = now
                if not request.metrics.first_token:
                    request.metrics.first_token = now
            end = finished.get(choice.handle)
            if end is not None and end.reason == "error":
                aborts += [handle for handle in self.close(request) if handle not in finished]
                _fail(request, end)
                continue
            if request.finished:  # another choice's error ended it in this very record
                continue
            delta = self._advance(choice, end)
            delta.weight_versions = [record.version] * len(delta.token_ids)  # a record is of one step
            request.add(delta)
            if delta.finish_reason is not None:
                choices.pop(choice.handle, None)
                if end is None:
                    aborts.append(choice.handle)
        return list(touched.values()), aborts

    def fail_all(self, message: str) -> list[RequestState]:
        """The engine is dead: every open request gets an error."""
        requests = {choice.request.handle: choice.request for choice in self._choices.values()}
        self._choices.clear()
        for request in requests.values():
            request.fail(message, EngineDeadError(message))
        return list(requests.values())

    def _receive(self, record: StepRecord, finished: dict[int, Finished]) -> list[Choice]:
        """Hands the record's tokens to their choices. Returns the choices with tokens or an end, each once."""
        choices, active = self._choices, []
        handles = np.frombuffer(record.handles, "<i8").tolist()
        for handle, (ints, floats) in zip(handles, _token_rows(record.rows, record.width), strict=True):
            choice = choices.get(handle)
            if choice is not None:
                if not choice.tokens:
                    active.append(choice)
                choice.tokens.append(ints[0])
                if (k := choice.request.params.logprobs) is not None:
                    choice.logprobs.append(_logprobs(ints, floats, k))
        for handle in finished:
            choice = choices.get(handle)
            if choice is not None and not choice.tokens:
                active.append(choice)
        return active

    def _advance(self, choice: Choice, end: Finished | None) -> Delta:
        """The choice's new tokens as a delta; finds the end, either the engine's or a stop string."""
        params = choice.request.params
        tokens, logprobs = choice.tokens, choice.logprobs
        choice.tokens, choice.logprobs = [], []
        # the text of a token that stops the request is no part of the answer, unless asked for
        silent = end is not None and end.reason == "stop" and not params.include_stop_str_in_output
        result = choice.detokenizer.push(tokens[:-1] if silent else tokens)
        text, reason = result.text, None
        stop_reason: int | str | None = None
        if result.stop is not None:
            reason, stop_reason = "stop", result.stop
            del tokens[result.consumed :], logprobs[result.consumed :]
        elif end is not None:
            text += choice.detokenizer.flush()
            reason, stop_reason = end.reason, self._stop_token(end, params)
        return Delta(
            choice.index, text, tokens, logprobs if params.logprobs is not None else None, _reason(reason), stop_reason
        )

    def _stop_token(self, end: Finished, params: SamplingParams) -> int | None:
        """As in vLLM: the token that stopped the answer, unless it is the model's end of sequence."""
        is_eos = end.stop_reason in self._eos and not params.ignore_eos
        return None if is_eos else end.stop_reason


def _token_rows(rows: bytes | memoryview, width: int) -> Iterator[tuple[list[int], list[float]]]:
    """Each token row (see core.plan.row_width) as integers, and the same bits as floats (of the columns that are)."""
    array = np.frombuffer(rows, "<i4").reshape(-1, width)
    ints = array.tolist()
    floats = array.view("<f4").tolist() if width > 1 else ints
    return zip(ints, floats, strict=True)


def _logprobs(ints: list[int], floats: list[float], k: int) -> TokenLogprobs:
    """A token row with the ``k`` most likely tokens at most."""
    end = row_width(k)
    return TokenLogprobs(ints[0], floats[1], ints[2], tuple(ints[3:end:2]), tuple(floats[4:end:2]))


def _fail(request: RequestState, end: Finished) -> None:
    message = end.message or "the engine ended the request with an error"
    if end.queue_full:
        request.fail(None, QueueFullError(message))
    else:
        request.fail(message, None)


def _reason(reason: str | None) -> FinishReason | None:
    return reason  # type: ignore[return-value]
