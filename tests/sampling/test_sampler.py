"""The whole pipeline against the float64 reference, and what a row's token must not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.sampling import sampler
from lmjax.sampling.params import encode_params, encode_state, feature_level, needs_slot_state, state_row_size
from lmjax.sampling.processors import process
from lmjax.sampling.rows import unpack_rows
from tests.sampling.reference import check_draw, kept_tokens, make_load, processed, run, sample_jit

VOCAB = 200  # no multiple of 32 or of the chunk
process_jit = jax.jit(process, static_argnames="branches")


def random_load(rng, slot, max_len=64):
    """Any mix of features; half of the rows use few."""
    few = rng.random() < 0.5

    def maybe(off, value):
        return off if rng.random() < (0.8 if few else 0.4) else value

    history = rng.integers(0, VOCAB if few else 12, rng.integers(1, max_len)).tolist()
    num_prompt = int(rng.integers(1, len(history) + 1))
    allowed = rng.choice(VOCAB, 40, replace=False).tolist()
    bad = [[int(rng.integers(12))], history[-3:], [*history[-2:-1], 3], [1, 2, 3, 4]]
    return make_load(
        slot,
        history,
        num_prompt,
        seed=int(rng.integers(-(2**63), 2**63)),
        index=int(rng.integers(0, 128)),
        stop_ids=(0, 3) if rng.random() < 0.7 else (),
        bad=maybe(None, bad),
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=maybe(0, int(rng.choice([1, 5, 50, 199, 1000]))),
        top_p=maybe(1.0, float(rng.choice([0.1, 0.7, 0.95]))),
        min_p=maybe(0.0, float(rng.choice([0.01, 0.2]))),
        presence_penalty=maybe(0.0, float(rng.uniform(-2, 2))),
        frequency_penalty=maybe(0.0, float(rng.uniform(-2, 2))),
        repetition_penalty=maybe(1.0, float(rng.uniform(0.5, 2))),
        logit_bias=maybe(None, {int(t): float(rng.uniform(-9, 9)) for t in rng.choice(VOCAB, 90, replace=False)}),
        allowed_token_ids=maybe(None, allowed),
        min_tokens=maybe(0, int(rng.integers(0, 16))),
    )


def random_logits(rng, rows, vocab=VOCAB):
    return rng.normal(0, 3, (vocab, rows)).astype(np.float32)


@pytest.mark.parametrize("seed", range(12))
def test_draws_equal_the_reference(seed):
    rng = np.random.default_rng(seed)
    loads = [random_load(rng, slot) for slot in rng.permutation(32).tolist()]
    logits = random_logits(rng, 32)
    out = run(logits, loads, **({"num_candidates": 16} if seed % 2 else {"branches": seed % 4 > 0}))
    for i, load in enumerate(loads):
        check_draw(logits[:, i], load, int(out.token_ids[i]))


def test_long_histories_are_counted_in_steps():
    """1,100 positions: three steps of the counting loop, the last of them over the end of the table."""
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 4)
    loads = []
    for slot, length in enumerate((1100, 513, 511, 3)):
        history = rng.integers(0, 60, length).tolist()
        penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.05, "presence_penalty": 0.3}
        loads.append(make_load(slot, history, length // 2, seed=slot, **penalties))
    out = run(logits, loads, max_len=1100)
    for i, load in enumerate(loads):
        check_draw(logits[:, i], load, int(out.token_ids[i]))


def rows_of_level(rng, level, count, first_slot=0):
    loads = []
    while len(loads) < count:
        load = random_load(rng, first_slot + len(loads))
        if feature_level(load) == level:
            loads.append(load)
    return loads


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_higher_level_draws_the_same(level):
    rng = np.random.default_rng(level)
    logits = random_logits(rng, 32)
    loads = rows_of_level(rng, level, 32)
    want = run(logits, loads, level=level).token_ids
    for higher in range(level + 1, 4):
        np.testing.assert_array_equal(run(logits, loads, level=higher).token_ids, want)


def test_neighbours_rows_and_padding_change_nothing():
    rng = np.random.default_rng(11)
    logits = random_logits(rng, 16)
    loads = [random_load(rng, slot) for slot in range(16)]
    together = run(logits, loads, level=3).token_ids
    for num_rows in (1, 3):
        alone = [run(logits[:, [i]], [loads[i]], level=3, num_rows=num_rows).token_ids[0] for i in range(16)]
        np.testing.assert_array_equal(alone, together)
    order = rng.permutation(16)
    shuffled = run(logits[:, order], [loads[i] for i in order], level=3).token_ids
    np.testing.assert_array_equal(shuffled, together[order])
    np.testing.assert_array_equal(run(logits, loads, level=3, num_rows=16).token_ids, together)


def test_processors_without_branches_give_the_same_bits():
    """Of every logit: those of all kinds, of rows with any features and of rows without, alone and side by side."""
    rng = np.random.default_rng(13)
    loads = [random_load(rng, slot) for slot in range(24)] + [make_load(slot, [5, 5], 1) for slot in range(24, 32)]
    plain = [not needs_slot_state(load) for load in loads]
    logits = random_logits(rng, 32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = -0.0
    logits[:, 25] = -np.inf
    for some in (loads, loads[24:]):
        first = some[0].slot
        here = logits[:, first:]
        skipping, always = (process_bits(here, some, branches) for branches in (True, False))
        np.testing.assert_array_equal(always, skipping)
        unused = np.flatnonzero(plain[first:])
        assert len(unused) >= 8
        np.testing.assert_array_equal(always[:, unused], here.view(np.int32)[:, unused])


def process_bits(logits, loads, branches):
    rows = unpack_rows(jnp.asarray(np.stack([encode_params(load) for load in loads])))
    tokens = np.full((len(loads), 64), 7, np.int32)
    for line, load in zip(tokens, loads, strict=True):
        line[: len(load.history)] = load.history
    state = np.stack([encode_state(load, VOCAB) for load in loads])
    positions = jnp.asarray([len(load.history) for load in loads], jnp.int32)
    slots = jnp.arange(len(loads), dtype=jnp.int32)
    out = process_jit(jnp.asarray(logits), rows, slots, positions, tokens, state, branches=branches)
    return np.asarray(out).view(np.int32)


@pytest.mark.parametrize("branches", [True, False])
def test_nan_and_inf_stay_in_their_row(branches):
    rng = np.random.default_rng(12)
    logits = random_logits(rng, 6)
    loads = [make_load(slot, [1], seed=slot, top_p=0.9, presence_penalty=0.1) for slot in range(6)]
    clean = run(logits, loads, branches=branches).token_ids
    logits[:, 1] = np.nan
    logits[9, 2] = np.inf
    logits[:, 4] = -np.inf
    broken = run(logits, loads, branches=branches).token_ids
    np.testing.assert_array_equal(broken[[0, 3, 5]], clean[[0, 3, 5]])
    assert ((broken >= 0) & (broken < VOCAB)).all() and broken[2] == 9


@pytest.mark.parametrize("branches", [True, False])
def test_everything_masked_gives_the_models_best_token(branches):
    logits = random_logits(np.random.default_rng(3), 2)
    loads = [make_load(0, [1], allowed_token_ids=[4], bad=[[4]]), make_load(1, [1], temperature=0.0, min_tokens=1)]
    assert run(logits, loads, branches=branches).token_ids.tolist() == logits.argmax(axis=0).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-3])
def test_tiny_temperatures_draw_the_best_token(temperature):
    rng = np.random.default_rng(4)
    logits = (random_logits(rng, 8) * 1e4).astype(np.float32)
    for extra in ({}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}):
        loads = [make_load(slot, [1], seed=slot, temperature=temperature, **extra) for slot in range(8)]
        np.testing.assert_array_equal(run(logits, loads).token_ids, logits.argmax(axis=0))


def test_huge_temperature_is_nearly_uniform():
    rows = 4000
    logits = np.repeat(random_logits(np.random.default_rng(5), 1, vocab=4), rows, axis=1)
    loads = [make_load(0, [], seed=s, temperature=1e6) for s in range(rows)]
    counts = np.bincount(run(logits, loads).token_ids, minlength=4)
    assert (np.abs(counts - rows / 4) < 5 * np.sqrt(rows / 4)).all()


CASES = {
    "plain": {"temperature": 0.8},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "temperature": 1.5},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.0, "logit_bias": {3: 2.0}},
}


@pytest.mark.parametrize(
    ("name", "vary"), [*((name, "seed") for name in CASES), ("plain", "index"), ("plain", "position")]
)
def test_draws_follow_the_distribution(name, vary):
    """Chi-square over 8,000 draws with fixed keys, 300 tokens (three chunks)."""
    rows, vocab = 8000, 300
    logits = np.random.default_rng(6).normal(0, 2, (vocab, 1)).astype(np.float32)
    params = CASES[name]
    history = [1, 2, 3]
    keys = {
        "seed": lambda i: {"seed": i},
        "index": lambda i: {"seed": 9, "index": i},
        "position": lambda i: {"seed": 10},
    }[vary]
    loads = [make_load(0, history, **keys(i), **params) for i in range(rows)]
    z = processed(logits[:, 0], loads[0])
    if vary == "position":
        token_ids = draw_at_positions(logits, loads[0], rows)
    else:
        token_ids = run(np.repeat(logits, rows, axis=1), loads).token_ids
    kept, _ = kept_tokens(z, loads[0].params)
    probs = np.where(kept, np.exp((z - z.max()) / loads[0].params.temperature), 0.0)
    probs /= probs.sum()
    counts = np.bincount(token_ids, minlength=vocab)
    assert counts[~kept].sum() == 0
    expected = probs * rows
    big = expected >= 5
    cells = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    cells = [c[cells[1] > 0] for c in cells]
    chi2 = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    freedom = max(len(cells[0]) - 1, 1)
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 4, (chi2, freedom)


def draw_at_positions(logits, load, rows):
    """One plain request's draws at positions 3 .. rows + 2 (level 1 reads neither tokens nor state)."""
    vocab = logits.shape[0]
    out = sample_jit(
        jnp.asarray(np.repeat(logits, rows, axis=1)),
        jnp.asarray(np.repeat(encode_params(load)[None], rows, axis=0)),
        jnp.zeros(rows, jnp.int32),
        jnp.arange(3, rows + 3, dtype=jnp.int32),
        jnp.zeros((33, 64), jnp.int32),
        jnp.zeros((33, state_row_size(vocab)), jnp.int32),
        level=1,
        max_logprobs=0,
    )
    return np.asarray(out.token_ids)


def test_the_ends_of_the_unit_interval_draw_tokens_with_weight():
    """u = 0 and the largest u below 1, where the first and last tokens (and whole chunks) have no weight."""
    scores = np.full((640, 2), -np.inf, np.float32)
    scores[[130, 200, 390]] = [[0.0], [1.0], [-1.0]]
    chunked = jnp.asarray(scores).reshape(5, 128, 2)
    one = jnp.ones(2, jnp.float32)
    draw_jit = jax.jit(sampler._draw)
    ends = jnp.asarray([0.0, 1 - 2.0**-24], jnp.float32)
    draw = draw_jit(chunked, one, one, -jnp.inf * one, (ends, ends))
    assert draw.tolist() == [130, 390]
    draw = draw_jit(chunked, one, one, 0.5 * one, jnp.asarray([0.0, 1 - 2.0**-24], jnp.float32))
    assert draw.tolist() == [200, 200]


@pytest.mark.parametrize(("vocab", "branches"), [(1, True), (31, True), (640, True), (31, False)])
def test_small_and_odd_vocabularies(vocab, branches):
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 6, vocab)
    params = [
        {},
        {"top_k": 20},
        {"top_p": 0.5},
        {"allowed_token_ids": [0]},
        {"temperature": 0.0},
        {"min_p": 0.1},
    ]
    loads = [make_load(slot, [0], seed=slot, **p) for slot, p in enumerate(params)]
    out = run(logits, loads, branches=branches)
    for i, load in enumerate(loads):
        check_draw(logits[:, i], load, int(out.token_ids[i]))


def test_bad_word_prefixes_are_generated_tokens_only():
    """As in vLLM: [5, 6] is banned after a generated 5, not after a 5 of the prompt."""
    logits = np.zeros((VOCAB, 2), np.float32)
    logits[6] = 9.0
    logits[8] = 5.0
    loads = [
        make_load(0, [1, 5], 1, temperature=0.0, bad=[[5, 6]]),
        make_load(1, [1, 5], 2, temperature=0.0, bad=[[5, 6]]),
    ]
    assert run(logits, loads).token_ids.tolist() == [8, 6]


def test_min_tokens_ends_on_time():
    logits = np.zeros((VOCAB, 3), np.float32)
    logits[3] = 9.0
    logits[8] = 5.0
    loads = [make_load(slot, [1] * (4 + slot), 4, temperature=0.0, min_tokens=2, stop_ids=(3,)) for slot in range(3)]
    assert run(logits, loads).token_ids.tolist() == [8, 8, 3]
