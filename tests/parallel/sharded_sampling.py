"""Runs on 8 CPU devices, in a process of its own: vocabulary-parallel sampling against one device, one case a line."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.models.registry import spec_from_hf
from lmjax.nn.env import ALONE
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.parallel.rules import ALL, LOGITS, REPLICATED
from lmjax.runtime.buckets import SampleKey
from lmjax.runtime.forward import PROMPT_LOGPROB_ROWS, prompt_logprobs
from lmjax.runtime.programs import Shapes, sample_program
from lmjax.sampling.logprobs import Logprobs
from lmjax.sampling.params import NUM_PARAMS, encode_params, encode_state, state_row_size
from lmjax.sampling.sampler import sample
from lmjax.sampling.share import WHOLE, Share
from pallas_kernels.platform import CPU
from tests.parallel.sharded_forward import COMMON, LLAMA
from tests.sampling.reference import make_load

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MAX_LEN, TOP, CANDIDATES = 64, 20, 64  # few candidates, so that many rows need the bisection


def ids_of(rng, vocab, count):
    return rng.choice(vocab, min(count, vocab), replace=False).tolist()


def load_of(rng, vocab, slot, level):
    """A request of at most this level; one in four has one feature alone, so that each is met in every kind of step."""
    history = rng.integers(0, vocab if rng.random() < 0.5 else min(vocab, 9), rng.integers(1, MAX_LEN)).tolist()
    choices = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 5.0, 1e-12], p=[0.1, 0.3, 0.3, 0.2, 0.1]),
        "top_k": int(rng.choice([1, 20, CANDIDATES + 1, 700, vocab - 1, vocab + 5])),
        "top_p": float(rng.choice([0.2, 0.9, 0.99, 0.9999])),
        "min_p": float(rng.choice([0.01, 0.3])),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": {t: float(rng.uniform(-9, 9)) for t in ids_of(rng, vocab, 90)},
        "allowed_token_ids": ids_of(rng, vocab, int(rng.choice([1, 3, 40]))),
        "min_tokens": int(rng.integers(1, 16)),
    }
    names = list(choices)[: {0: 0, 1: 1, 2: 4, 3: 10}[level]]
    chance = rng.choice([0.15, 0.5])
    params = {name: choices[name] for name in names if rng.random() < (0.85 if name == "temperature" else chance)}
    if level == 0:
        params = {"temperature": 0.0}
    bad = None
    if level == 3 and rng.random() < chance:
        bad = [
            [int(rng.integers(vocab))],
            history[-3:],
            [*history[-2:-1], vocab - 1],
            params.get("allowed_token_ids", [1])[:1],
        ]
    num_prompt = int(rng.integers(1, len(history) + 1))
    stop_ids = ids_of(rng, vocab, 2)
    return make_load(slot, history, num_prompt, seed=int(rng.integers(2**62)), stop_ids=stop_ids, bad=bad, **params)


def logits_of(rng, vocab, rows):
    """Columns of several kinds: plain, flat, ties within and across shards, few finite, one value, all -inf, NaN."""
    x = rng.normal(0, 3, (vocab, rows)).astype(np.float32)
    for column in range(rows):
        match rng.integers(8):
            case 0:
                x[:, column] *= 0.1
            case 1:
                x[:, column] = rng.integers(-3, 4, vocab)
            case 2:
                x[rng.random(vocab) < 0.99, column] = -np.inf
            case 3:
                x[:, column] += 300
            case 4 if rng.random() < 0.3:
                x[:, column] = rng.choice([1.5, -np.inf])
            case 5 if rng.random() < 0.2:
                x[rng.integers(vocab), column] = np.nan
    return x


def arguments(rng, vocab, rows, level):
    loads = [load_of(rng, vocab, slot, level) for slot in range(rows)]
    tokens = np.full((rows + 1, MAX_LEN), vocab - 1, np.int32)
    state = np.full((rows + 1, state_row_size(vocab)), 0x55555555, np.int32)
    for load in loads:
        tokens[load.slot, : len(load.history)] = load.history
        state[load.slot] = encode_state(load, vocab)
    params = np.stack([encode_params(load) for load in loads]).reshape(rows, NUM_PARAMS)
    positions = np.array([len(load.history) for load in loads], np.int32)
    return params, np.arange(rows, dtype=np.int32), positions, tokens, state


def spread_logits(logits, tp):
    multiple = tp * split.VOCAB_CHUNK
    return np.pad(logits, ((0, -len(logits) % multiple), (0, 0)), constant_values=-np.inf)


def together(function, tp, num_whole, out_specs=REPLICATED):
    """``function`` of one device's rows of the logits and ``num_whole`` whole arrays, jitted for all devices."""
    mesh = make_mesh(jax.devices()[:tp])
    in_specs = (LOGITS, *([REPLICATED] * num_whole))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def same(found, wanted, rows=slice(None)):
    """Ids and ranks equal, log-probabilities up to 1e-6 or two units in the last place; the worst error of those."""
    worst = 0.0
    for name, want in wanted._asdict().items():
        got = getattr(found, name)
        assert (got is None) == (want is None)
        if want is None:
            continue
        got, want = np.asarray(got)[rows], np.asarray(want)[rows]
        if want.dtype == np.float32:
            np.testing.assert_allclose(got, want, rtol=2.4e-7, atol=1e-6, err_msg=name)
            finite = np.isfinite(want)
            worst = max(worst, float(np.abs(got[finite] - want[finite]).max(initial=0)))
        else:
            np.testing.assert_array_equal(got, want, err_msg=name)
    return worst


def check_samples(vocab, rows, level, max_logprobs, degrees, repeats, branches=True, processed=False):
    """Random steps of one shape on one device, with branches, and on ``degrees``; the worst error of a
    log-probability."""
    static = {"level": level, "max_logprobs": max_logprobs, "num_candidates": CANDIDATES}
    static["processed_logprobs"] = processed
    alone = jax.jit(partial(sample, **static))
    shared = {
        tp: together(partial(sample, **static, share=Share(ALL, vocab), branches=branches), tp, 5) for tp in degrees
    }
    rng = np.random.default_rng([vocab, rows, level])
    worst = 0.0
    for _ in range(repeats):
        logits, rest = logits_of(rng, vocab, rows), arguments(rng, vocab, rows, level)
        wanted = alone(logits, *rest)
        clean = ~np.isnan(logits).any(axis=0)  # of NaN only some valid id and the peace of neighbours is promised
        for tp in degrees:
            found = shared[tp](spread_logits(logits, tp), *rest)
            token_ids = np.asarray(found.token_ids)
            assert (token_ids >= 0).all() and (token_ids < vocab).all()
            worst = max(worst, same(found, wanted, clean))
    return worst


def prompt_rows(logits, targets, span, k, share):
    """The forward program's loop over the tokens of prompts; a "hidden state" is the number of its column."""
    hidden = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    parts = {"target_ids": targets, "header": jnp.pad(span, (3, 0)), "entropy": jnp.ones(1, jnp.int32)}
    return prompt_logprobs(lambda columns: logits[:, columns[0]], hidden, parts, k, share, ALONE)


def check_prompt_logprobs(vocab, tp, k):
    """Of any targets, also of padding ones; ``k`` may be more than a share has, and than the vocabulary."""
    rng = np.random.default_rng(vocab)
    num_tokens = PROMPT_LOGPROB_ROWS + 30
    logits, span = logits_of(rng, vocab, num_tokens), np.array([3, num_tokens - 2], np.int32)
    targets = rng.integers(-1, vocab + 2, num_tokens).astype(np.int32)

    def unpacked(rows):
        rows = np.asarray(rows)
        entropies.append(rows[:, -1].copy().view(np.float32))
        rows = np.ascontiguousarray(rows[:, :-1])
        floats = rows[:, 3:].view(np.float32)[:, 1::2] if k else np.zeros((len(rows), 0), np.float32)
        return Logprobs(rows[:, 1].view(np.float32), rows[:, 2], rows[:, 3::2], floats)

    entropies: list[np.ndarray] = []
    wanted = jax.jit(partial(prompt_rows, k=k, share=WHOLE))(logits, targets, span)
    shared = together(partial(prompt_rows, k=k, share=Share(ALL, vocab)), tp, 2)
    clean = ~np.isnan(logits).any(axis=0)
    worst = same(unpacked(shared(spread_logits(logits, tp), targets, span)), unpacked(wanted), clean)
    np.testing.assert_allclose(entropies[0][clean], entropies[1][clean], rtol=1e-5, atol=1e-5)
    return worst


def program_text(tp, vocab, rows, level):
    """The optimized HLO of an engine's sample program."""
    spec = spec_from_hf({**COMMON, **LLAMA, "vocab_size": vocab}, None)
    placement = Placement(make_mesh(jax.devices()[:tp]))
    shapes = Shapes(
        spec=split.spread(spec, split.Degree(tp)),
        dtype="float32",
        kv_specs=(),
        num_blocks=(),
        block_size=16,
        max_num_seqs=rows,
        max_model_len=MAX_LEN,
        max_logprobs=TOP,
        env=placement.env(CPU),
        placement=placement,
    )
    program = sample_program(shapes, SampleKey(rows, level, True))
    return jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments).compile().as_text()


def main(cases):
    for case in cases:
        kind, *numbers = case.split(":")
        match kind:
            case "sample" | "branchless" | "processed":
                vocab, rows, level, max_logprobs, repeats = map(int, numbers[:5])
                degrees = [int(tp) for tp in numbers[5].split("+")]
                how = {"branches": kind != "branchless", "processed": kind == "processed"}
                print(case, check_samples(vocab, rows, level, max_logprobs, degrees, repeats, **how), flush=True)
            case "prompt":
                print(case, check_prompt_logprobs(*map(int, numbers)), flush=True)
            case "program":
                print(program_text(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
