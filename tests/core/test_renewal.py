"""Weights that change while requests run: which ones computed what a token was drawn from, and who finds what."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmjax.config import SchedulerConfig
from lmjax.core.block_hash import root_digest
from tests.fake_hash import hash_of_context
from tests.fake_pipeline import FakePipeline
from tests.fakes import Driver, FakeExecutor, fake_info, full_spec, host_info, request, window_spec

GROUPS = {"full": (full_spec(),), "full+window": (full_spec(), window_spec(12)), "window": (window_spec(12, (0,)),)}
VOCAB = 1000


def expected_token(specs, tokens, weights):
    """The greedy token after ``tokens``, each of whose KV was computed by ``weights`` (one, or one each)."""
    weights = np.broadcast_to(np.asarray(weights, np.int64), (len(tokens),))
    state = 0
    for group, spec in enumerate(specs):
        first = 0 if spec.window is None else max(0, len(tokens) - spec.window)
        state ^= hash_of_context(tokens[first:], first, weights[first:], group)
    return state % VOCAB


def driver(specs=GROUPS["full"], *, overlap=True, stages=1, check=True, mode="auto", caching=True, **sizes):
    info = fake_info(specs=specs, stages=stages, vocab_size=VOCAB, **({"block_size": 4, "max_model_len": 96} | sizes))
    config = SchedulerConfig(
        max_num_batched_tokens=sizes.get("max_num_seqs", 16) * 4, enable_prefix_caching=caching, preemption_mode=mode
    )
    made = Driver(config, FakePipeline(info) if stages > 1 else FakeExecutor(info), overlap, check)
    made.prompt_logprobs_may_come_again = True
    return made


def greedy(handle, prompt, **params):
    return request(handle, prompt, **({"temperature": 0.0, "max_tokens": 20} | params))


def test_names_cover_the_weights():
    assert root_digest(None, None) == root_digest(None, None, 0)
    roots = {root_digest(adapter, None, n) for adapter in (None, 1) for n in range(4)}
    assert len(roots) == 8


def test_keep_goes_on_with_the_old_kv_and_nobody_else_finds_it():
    run = driver()
    prompt = list(range(30))
    run.add(greedy(0, prompt))
    for _ in range(6):
        run.step()
    run.change_weights()
    run.add(greedy(1, prompt, max_tokens=3))
    for _ in range(4):
        run.step()
    run.add(greedy(2, prompt, max_tokens=3))  # finds what request 1 has computed
    run.run()
    old, new, hit = (run.answers[handle] for handle in range(3))
    assert old.weights == sorted(old.weights) and 0 < sum(old.weights) < 20
    # position p was computed by the step that drew the token after it; the prompt by the first step
    by_position = [0] * len(prompt) + old.weights[1:]
    for i, token in enumerate(old.token_ids):
        tokens = prompt + old.token_ids[:i]
        assert token == expected_token(GROUPS["full"], tokens, by_position[: len(tokens)])
    assert (new.num_cached, hit.num_cached) == (0, 28)
    for answer in (new, hit):
        assert answer.weights == [1, 1, 1]
        assert answer.token_ids[0] == expected_token(GROUPS["full"], prompt, 1)


def test_recompute_is_a_fresh_engine():
    """Also in the middle of a prompt: its log-probabilities are all from the same weights."""
    run = driver(max_num_seqs=2)  # chunks of 8
    prompt = list(range(30))
    run.add(greedy(0, prompt, prompt_logprobs=0))
    run.step(), run.step()
    assert run.scheduler.state.requests[0].num_targets == 16
    run.change_weights(recompute=True)
    assert run.scheduler.state.requests[0].num_targets == 0
    for _ in range(8):
        run.step()
    run.change_weights(recompute=True)
    assert run.scheduler.state.requests[0].num_targets == 29  # all were given: they are not asked for again
    run.run()
    answer = run.answers[0]
    assert set(answer.weights) == {1, 2} and len(answer.token_ids) == 20 and len(answer.prompt_logprobs) == 29
    for i, (token, weights) in enumerate(zip(answer.token_ids, answer.weights, strict=True)):
        assert token == expected_token(GROUPS["full"], prompt + answer.token_ids[:i], weights)


def test_a_change_leaves_only_blocks_that_somebody_will_look_for():
    run = driver(num_blocks=64)
    run.add(greedy(0, range(40), max_tokens=2))
    run.run()
    [pool] = run.scheduler.state.kv.pools
    assert len(pool.by_digest) == 10
    run.add(greedy(1, range(50, 90)))
    for _ in range(4):
        run.step()
    running = run.scheduler.state.requests[1]
    run.scheduler.state.preempt(running)
    assert len(pool.by_digest) == 20
    run.change_weights()
    assert len(pool.by_digest) == 10
    pool.check_integrity()
    run.run()
    assert run.executor.steps < 40 and not run.executor.errors
    assert run.answers[1].weights.count(0) == 4


def test_a_choice_that_forks_late_shares_its_leaders_weights():
    """The choices of one request are one request: under ``keep`` they all go on from the old prompt."""
    run = driver(max_num_seqs=2)
    prompt = list(range(30))
    run.add(greedy(0, prompt, n=3, max_tokens=6, temperature=1.0))
    for _ in range(6):
        run.step()
    state = run.scheduler.state
    waiting = [r for r in state.requests.values() if not r.started]
    assert waiting, "some choice must not have begun"
    root = waiting[0].root
    run.change_weights()
    assert all(r.root == root for r in state.requests.values())
    run.run()
    assert not run.executor.errors
    run.add(greedy(9, prompt, n=2))  # nothing of it has begun: both are new
    run.change_weights()
    assert {r.root for r in state.requests.values()} == {root_digest(None, None, 2)}
    run.run()
    assert run.answers[9].num_cached == 0


TOTALS = {"changes": 0, "preemptions": 0, "swaps": 0, "mixed": 0, "hits": 0, "exact": 0}


def contexts_of(executor):
    """By handle, of each of its tokens in turn, by which weights the positions before it were computed last: by the
    plans alone."""
    latest, contexts, submit = {}, defaultdict(list), executor.submit

    def noting(plan):
        for row, handle in enumerate(plan.handles.tolist()):
            start, end = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            latest[handle] = latest.get(handle, [])[:start] + [executor.weights] * (end - start)
            if plan.samples[row]:
                contexts[handle].append(latest[handle])
        return submit(plan)

    executor.submit = noting
    return contexts


def run_random(specs, seed, overlap, stages, caching, mode, policy):
    """policy: ``keep``, ``recompute`` or ``both`` in turns; with ``sleep`` the pool is lost now and then, too."""
    rng = np.random.default_rng(seed)
    host = host_info(tuple(rng.integers(2, 50, len(specs)).tolist()), 10.0 ** -rng.integers(1, 6)) if mode else None
    run = driver(
        specs,
        overlap=overlap,
        stages=stages,
        mode=mode or "auto",
        caching=caching,
        num_blocks=int(rng.integers(16, 40)),
        max_num_seqs=6,
        max_model_len=64,
        host=host,
    )
    born, seen = {}, {}
    # without hits and forks it is known which step has computed what
    exact = policy == "keep" and not caching and mode is None
    contexts = contexts_of(run.executor) if exact and stages == 1 else None

    def on_read(handle, group, samples, weights):
        mine = born.setdefault(families[handle], run.weights)
        assert weights.min() >= mine, "a request reads KV of weights from before it began"
        if policy == "recompute":
            assert (weights == run.weights).all(), "a request reads KV of old weights"
        seen[handle] = max(seen.get(handle, 0), int(weights.max() - weights.min()))

    for stage in run.executor.stages if stages > 1 else [run.executor]:
        stage.on_read = on_read
    prefix, handle, prompts, families = rng.integers(0, VOCAB, 24), 0, {}, {}
    for _ in range(60):
        for _ in range(int(rng.poisson(0.5))):
            prompt = np.concatenate((prefix[: rng.integers(0, 24)], rng.integers(0, VOCAB, int(rng.integers(1, 16)))))
            n = 1 if exact else int(rng.choice([1, 1, 2, 3]))
            asked, salt = [None, None, 1][rng.integers(3)], [None, "salt"][rng.integers(2)]
            tokens = int(rng.integers(1, 26))
            run.add(greedy(handle, prompt, n=n, prompt_logprobs=asked, max_tokens=tokens, cache_salt=salt))
            for choice in range(handle, handle + n):
                prompts[choice], families[choice] = prompt.tolist(), handle
            handle += n
        if rng.random() < 0.1:
            recompute = policy == "recompute" or (policy == "both" and rng.random() < 0.5)
            run.change_weights(recompute)
            if recompute:
                for family in born:
                    born[family] = run.weights
            TOTALS["changes"] += 1
        elif policy == "recompute" and stages == 1 and rng.random() < 0.05:
            run.lose_the_pool()
        if rng.random() < 0.1 and handle:
            run.scheduler.abort(rng.integers(0, handle, 2).tolist())
        run.step()
    run.run(most_steps=3000)
    assert not run.executor.errors, run.executor.errors[:3]
    if stages > 1:
        assert run.executor.held_at_a_change == 0, "a step was computed by two weights"
    stats = run.scheduler.stats()
    TOTALS["preemptions"] += stats.preemptions
    TOTALS["swaps"] += stats.swaps_in
    TOTALS["hits"] += stats.prefix_hits > 0
    TOTALS["mixed"] += sum(spread > 0 for spread in seen.values())
    for choice, answer in run.answers.items():
        assert answer.reason is not None and answer.weights == sorted(answer.weights)
        computed_by = answer.weights if policy == "recompute" else contexts[choice] if contexts else []
        for i, (token, weights) in enumerate(zip(answer.token_ids, computed_by, strict=False)):
            assert token == expected_token(specs, prompts[choice] + answer.token_ids[:i], weights), (choice, i)
        TOTALS["exact"] += len(computed_by)


@pytest.mark.parametrize("policy", ["keep", "recompute", "both"])
@pytest.mark.parametrize("groups", GROUPS)
def test_random_changes(groups, policy):
    """Under ``recompute`` every token is that of an engine that had its weights from the start; under ``keep`` nothing
    is read that is older than the request. Preemption, forks, the host tier and shared prefixes included."""
    TOTALS.update(dict.fromkeys(TOTALS, 0))

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        seed=st.integers(0, 2**32),
        overlap=st.booleans(),
        stages=st.sampled_from([1, 1, 2, 3]),
        caching=st.booleans(),
        mode=st.sampled_from([None, "swap", "auto"]),
    )
    def run(seed, overlap, stages, caching, mode):
        run_random(GROUPS[groups], seed, overlap, stages, caching, mode, policy)

    run()
    assert TOTALS["changes"] > 80 and TOTALS["preemptions"] > 25 and TOTALS["hits"] > 5, TOTALS
    assert (TOTALS["mixed"] == 0) == (policy == "recompute"), TOTALS
    if policy == "keep":
        assert TOTALS["swaps"] > 5, TOTALS
    assert TOTALS["exact"] > {"keep": 200, "recompute": 2000, "both": -1}[policy], TOTALS
