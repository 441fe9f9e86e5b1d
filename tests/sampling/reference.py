"""The sampling pipeline in plain Python and float64 numpy, from docs/sampling.md, and a runner for the real one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.core.plan import SlotLoad
from lmjax.sampling.chunks import CHUNK
from lmjax.sampling.params import NUM_PARAMS, encode_params, encode_state, feature_level, state_row_size
from lmjax.sampling.sampler import SampleOut, sample
from lmjax.types import SamplingParams

STATIC = ("level", "max_logprobs", "num_candidates", "branches", "processed_logprobs")
sample_jit = jax.jit(sample, static_argnames=STATIC)


def make_load(slot=0, history=(), num_prompt=None, *, seed=0, index=0, stop_ids=(), bad=None, **params) -> SlotLoad:
    history = np.asarray(history, np.int32)
    num_prompt = len(history) if num_prompt is None else num_prompt
    return SlotLoad(slot, SamplingParams(**params), seed, index, history, num_prompt, tuple(stop_ids), bad)


def run(logits, loads, *, level=None, max_logprobs=0, max_len=64, num_rows=32, **kwargs) -> SampleOut:
    """Draw for each load the token after its history. ``logits`` [V, R]; up to ``num_rows`` it pads with zero rows
    (one shape for most tests, so that they compile once)."""
    vocab, count = logits.shape
    num_rows = max(num_rows, count)
    level = max(map(feature_level, loads)) if level is None else level
    num_slots = 32
    tokens = np.full((num_slots + 1, max_len), 7, np.int32)  # what lies behind a history must not matter
    state = np.full((num_slots + 1, state_row_size(vocab)), 0x55555555, np.int32)
    params = np.zeros((num_rows, NUM_PARAMS), np.int32)
    row_slots = np.full(num_rows, num_slots, np.int32)
    positions = np.zeros(num_rows, np.int32)
    wide = np.zeros((vocab, num_rows), np.float32)
    wide[:, :count] = logits
    for i, load in enumerate(loads):
        params[i] = encode_params(load)
        row_slots[i] = load.slot
        positions[i] = len(load.history)
        tokens[load.slot, : len(load.history)] = load.history
        if feature_level(load) == 3:
            state[load.slot] = encode_state(load, vocab)
    arrays = map(jnp.asarray, (wide, params, row_slots, positions, tokens, state))
    out = sample_jit(*arrays, level=level, max_logprobs=max_logprobs, **kwargs)
    return SampleOut(*(None if a is None else np.asarray(a)[:count] for a in out))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key, block):
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011), on Python integers."""
    mask = 0xFFFFFFFF
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (block[0] + keys[0]) & mask, (block[1] + keys[1]) & mask
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = (x + y) & mask
            y = ((y << rotation) | (y >> (32 - rotation))) & mask
            y ^= x
        x = (x + keys[(group + 1) % 3]) & mask
        y = (y + keys[(group + 2) % 3] + group + 1) & mask
    return x, y


@functools.cache
def reference_uniforms(seed: int, index: int, position: int) -> tuple[float, float]:
    seed %= 2**64
    key = threefry2x32((seed >> 32, seed & 0xFFFFFFFF), (0, index))
    first, second = threefry2x32(key, (0, position))
    return (first >> 8) / 2**24, (second >> 8) / 2**24


def processed(logits: np.ndarray, load: SlotLoad) -> np.ndarray:
    """float64 [V] -> float64 [V]: bias, penalties, masks."""
    p, history = load.params, [int(t) for t in load.history]
    output = history[load.num_prompt_tokens :]
    z = logits.astype(np.float64)
    for token, value in (p.logit_bias or {}).items():
        z[token] += value
    for token in set(history):
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(output):
        z[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if p.allowed_token_ids is not None:
        z[[t for t in range(len(z)) if t not in p.allowed_token_ids]] = -np.inf
    if len(output) < p.min_tokens:
        z[list(load.stop_ids)] = -np.inf
    for word in load.bad_words_ids or []:
        start = word[:-1]
        if not start or (len(output) >= len(start) and output[-len(start) :] == start):
            z[word[-1]] = -np.inf
    return z


def kept_tokens(z: np.ndarray, p: SamplingParams) -> tuple[np.ndarray, float]:
    """bool [V] and how close (in mass, relative) the top-p cut is to falling elsewhere."""
    probs = np.exp((z - z.max()) / p.temperature)
    kept = probs >= (p.min_p if p.min_p > 0 else -1.0)
    if p.top_k > 0 and p.top_k < len(z):
        kept &= z >= np.sort(z)[::-1][p.top_k - 1]
    margin = np.inf
    if p.top_p < 1.0:
        order = np.argsort(-z, kind="stable")
        mass = np.where(kept, probs, 0.0)[order]
        share = np.cumsum(mass) / mass.sum()
        last = int(np.argmax(share >= p.top_p)) if (share >= p.top_p).any() else len(z) - 1
        margin = float(np.abs(share - p.top_p).min())
        kept &= z >= z[order[last]]
    return kept, margin


def check_draw(logits: np.ndarray, load: SlotLoad, token: int, tolerance: float = 2e-6) -> None:
    """Asserts that ``token`` is what the float64 pipeline gives, up to rounding at the edges of its interval."""
    z = processed(logits, load)
    p = load.params
    if p.temperature == 0.0:
        assert z[token] >= z.max() - 1e-5 * max(1.0, abs(z.max())), (token, int(z.argmax()))
        return
    kept, margin = kept_tokens(z, p)
    if margin < 1e-5:
        return
    assert kept[token], (token, p)
    probs = np.where(kept, np.exp((z - z.max()) / p.temperature), 0.0)
    chunks = np.pad(probs, (0, -len(probs) % CHUNK)).reshape(-1, CHUNK)
    inside = chunks[token // CHUNK]
    uniforms = reference_uniforms(load.seed, load.sample_index, len(load.history))
    for weights, at, u in zip((chunks.sum(axis=1), inside), divmod(token, CHUNK), uniforms, strict=True):
        edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
        assert edges[at] - tolerance <= u <= edges[at + 1] + tolerance, (token, u, edges[at], edges[at + 1])
