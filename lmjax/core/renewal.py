"""What a change of the weights, or the loss of the pool, means for blocks and requests.

The names of blocks cover the weights: a request's chain of names begins at a root that says how many changes there were
before it began. So a block of old weights cannot be found by a request that begins after the change.
"""

from __future__ import annotations

from lmjax.core.block_hash import extend_digests, root_digest
from lmjax.core.request import Request, State
from lmjax.core.state import EngineState


def change_weights(state: EngineState, recompute: bool) -> None:
    """The next plan runs with other weights. recompute: nothing that the old ones have computed is used any more, but
    the tokens; else requests that have begun keep their KV, wherever it is, and their root."""
    state.weights += 1
    if recompute:
        give_up_kv(state)
    for request in state.requests.values():
        if recompute or not _has_begun(request):
            request.root = root_digest(*request.origin, state.weights)
            request.digests = []
    if not recompute:
        _forget_all_but(state, _still_wanted(state))


def give_up_kv(state: EngineState) -> None:
    """Every running request waits and is computed anew, and neither tier has a block that can be found. Tokens on their
    way still count."""
    table = state.table
    for request in [request for request in table.requests if request is not None]:
        if table.planned[request.slot] == table.limit[request.slot]:
            state.park(request)
        else:
            state.preempt(request, save=False)
    for request in state.requests.values():
        state.forget_saved(request)
        if request.num_targets < request.all_targets:
            # prompt log-probabilities are given out when all are there: then all of them are from the same weights
            request.num_targets = min(request.num_targets, request.first_target)
            request.num_pooled, request.pooled_from = 0, request.epoch
    for pool in state.kv.pools:
        pool.forget_unused()
    if state.tier is not None:
        state.tier.clear()


def _has_begun(request: Request) -> bool:
    """Whether something of it, or of another choice of it, was computed."""
    return request.started or (request.group is not None and request.group.prompt_counted)


def _still_wanted(state: EngineState) -> set[bytes]:
    """Names that requests which have begun, and have no slot now, will look for."""
    names: set[bytes] = set()
    for request in state.requests.values():
        if request.state not in (State.WAITING, State.HELD) or not _has_begun(request):
            continue
        if state.caching:
            extend_digests(request.digests, request.root, request.history, state.info.block_size)
            names.update(request.digests)
        if request.saved is not None:
            names.update(request.saved.names)
    return names


def _forget_all_but(state: EngineState, names: set[bytes]) -> None:
    """Unused blocks of other names lose them: nobody can find them, so they need not wait for their eviction."""
    tiers = state.kv.pools + (state.tier.pools if state.tier is not None else [])
    for pool in tiers:
        pool.forget_unused(names)
