"""What a step's result means for its requests."""

from __future__ import annotations

import numpy as np

from lmjax.core.output import PromptRows, StepOutput, cut_rows
from lmjax.core.plan import PromptLogprobs, StepPlan, StepResult, row_key
from lmjax.core.request import Request
from lmjax.core.state import EngineState
from lmjax.core.stop import end_of, ended_rows


def read_result(state: EngineState, plan: StepPlan, result: StepResult) -> StepOutput:
    """Appends the new tokens, names blocks that are full now, ends what ends. Events stay in ``state``.

    Rows are matched by (handle, epoch): the token of a request that ended since is dropped; that of a request that
    lost its slot since is kept, but counts no computed tokens and names no block.
    """
    table = state.table
    prompt_rows = _prompt_rows(state, result) if result.prompt_logprobs else []
    slots = plan.slots
    current = table.keys[slots] == plan.keys
    live = current & plan.samples
    rows = live.nonzero()[0]
    if len(rows) < len(slots):
        slots = slots[rows]
    sent = _take(result.rows, rows)
    token_ids = sent[:, 0]
    lengths = table.append(slots, token_ids)
    if state.caching:
        # a block's name needs its tokens, its KV a step that is planned; program order does the rest
        there = np.minimum(lengths, table.computed[slots])
        full = (there >= table.next_named[slots]).nonzero()[0]
        if len(full):
            state.name_newest_blocks(slots[full], there[full])
    k = table.most_logprobs
    for row in ended_rows(table, slots, token_ids, lengths):
        _end_if_over(state, table.requests[slots[row]], int(token_ids[row]), int(lengths[row]))
    if np.count_nonzero(current) < len(current):
        late, their_k = _read_late_tokens(state, plan, result, (~current & plan.samples).nonzero()[0].tolist())
        if late:
            rows, k = np.sort(np.concatenate((rows, np.array(late, np.intp)))), max(k, their_k)
            sent = _take(result.rows, rows)
    state.stats.generation_tokens += len(rows)
    sent = cut_rows(sent, k if k >= 0 and sent.shape[1] > 1 else None)
    started, state.started = state.started, []
    finished, state.finished = state.finished, []
    return StepOutput(plan.handles.take(rows).data, sent.shape[1], sent.data, prompt_rows, started, finished)


def _take(token_rows: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return token_rows if len(rows) == len(token_rows) else token_rows.take(rows, axis=0)


def _prompt_rows(state: EngineState, result: StepResult) -> list[PromptRows]:
    reduced = []
    for entry in result.prompt_logprobs:
        request = state.requests.get(entry.handle)
        if request is None:
            continue
        if entry.pooled:
            reduced += _pooled(state, request, entry)
        elif request.params.prompt_logprobs is not None:
            rows = cut_rows(entry.rows, request.params.prompt_logprobs)
            found = entry.entropies.data if request.entropy and entry.entropies is not None else b""
            reduced.append(PromptRows(entry.handle, entry.first, rows.shape[1], rows.data, found))  # type: ignore[arg-type]
    return reduced


def _pooled(state: EngineState, request: Request, entry: PromptLogprobs) -> list[PromptRows]:
    """The sum, if it counts; with the last one the request ends."""
    if entry.key < row_key(request.handle, request.pooled_from):
        return []
    request.num_pooled += entry.pooled
    if request.num_pooled == request.all_targets - request.first_target:
        state.finish(request, "stop")
    return [PromptRows(entry.handle, entry.first, entry.rows.shape[1], entry.rows.data)]  # type: ignore[arg-type]


def _end_if_over(state: EngineState, request: Request | None, token_id: int, length: int) -> None:
    assert request is not None
    end = end_of(request, token_id, length)
    if end is not None:
        state.finish(request, *end)


def _read_late_tokens(state: EngineState, plan: StepPlan, result: StepResult, rows: list[int]) -> tuple[list[int], int]:
    """Tokens of requests that lost their slot while the step ran. Returns the plan rows that count, and the most
    log-probabilities that one of them asked for (-1: none at all)."""
    kept, k = [], -1
    for row in rows:
        request = state.requests.get(int(plan.handles[row]))
        if request is None or not request.pending or row_key(request.handle, request.epoch - 1) != plan.keys[row]:
            continue
        kept.append(row)
        if request.params.logprobs is not None:
            k = max(k, request.params.logprobs)
        token_id = int(result.rows[row, 0])
        _end_if_over(state, request, token_id, state.read_late_token(request, token_id))
    return kept, k
