"""One request's sampling parameters as fixed-size int32 rows (numpy only; the device side is ``rows.py``).

A request has one *parameter row* (``encode_params``, sent with every step or when it changes) and, only if it uses a
feature with vocabulary-sized or list-sized state, one *state row* of its slot (``encode_state``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import numpy as np

from lmjax.core.plan import SlotLoad
from lmjax.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, ParameterError

# A bad word has up to two token sequences: as the start of a text and after a space.
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS

GREEDY, RANDOM, FILTERED, FULL = 0, 1, 2, 3

FLAG_RANDOM = 1  # not set: greedy
FLAG_PENALTY = 2
FLAG_MASK = 4  # allowed_token_ids, or min_tokens with stop ids
FLAG_BIAS = 8
FLAG_BAD_WORDS = 16

# Order of a parameter row; rows.py reads the same. 'f' fields are float bits, 'I' fields unsigned.
# All zeros is a greedy row without features (for padding rows).
FIELDS = (
    ("flags", "i"),
    ("inv_temperature", "f"),
    ("top_k", "i"),  # 0: off
    ("top_p", "f"),  # 0 or 1: off
    ("min_p_gap", "f"),  # temperature * log(min_p): how far under the best logit a token may be; -inf: off
    ("seed_low", "I"),
    ("seed_high", "I"),
    ("sample_index", "i"),
    ("presence_penalty", "f"),
    ("frequency_penalty", "f"),
    ("repetition_penalty", "f"),
    ("prompt_len", "i"),
    ("min_until", "i"),  # positions below it may not draw a stop id
    ("num_bias", "i"),
    ("num_bad_words", "i"),
    ("reserved", "i"),
)
NUM_PARAMS = len(FIELDS)
ROW_BYTES = 4 * NUM_PARAMS
_PACK_INTO = struct.Struct("=" + "".join(kind for _, kind in FIELDS)).pack_into

# Below this a temperature is as good as greedy, and its inverse must stay finite in float32.
MIN_TEMPERATURE = 1e-20
MIN_TOP_P = 1e-30  # not 0 in float32; keeps the best token alone
_INT_MAX = 2**31 - 1


def _feature_flags(load: SlotLoad) -> int:
    """FLAG_* of what needs the full program: 0 for most requests."""
    p = load.params
    flags = 0
    if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0:
        flags |= FLAG_PENALTY
    if p.allowed_token_ids is not None or (p.min_tokens > 0 and load.stop_ids):
        flags |= FLAG_MASK
    if p.logit_bias:
        flags |= FLAG_BIAS
    if load.bad_words_ids:
        flags |= FLAG_BAD_WORDS
    return flags


def feature_level(load: SlotLoad) -> int:
    """The smallest program that serves the request: 0 greedy, 1 random, 2 filtered, 3 full."""
    p = load.params
    if _feature_flags(load):
        return FULL
    if p.temperature == 0.0:
        return GREEDY
    if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0:
        return FILTERED
    return RANDOM


def needs_slot_state(load: SlotLoad) -> bool:
    """Whether the slot's state row has to be loaded before the request's first sample."""
    return _feature_flags(load) != 0


def encode_params(load: SlotLoad) -> np.ndarray:
    """The parameter row, int32 [NUM_PARAMS] (see ``FIELDS``)."""
    row = np.empty(NUM_PARAMS, np.int32)
    write_params(load, row.data, 0)
    return row


def write_params(load: SlotLoad, rows: memoryview, index: int) -> None:
    """``encode_params`` into row ``index`` of ``rows`` (of int32 [n, NUM_PARAMS])."""
    p, prompt, seed = load.params, load.num_prompt_tokens, load.seed & 0xFFFFFFFFFFFFFFFF
    flags = _feature_flags(load)
    if p.temperature == 0.0:  # filters never change an argmax: off, so that the row can't cause a fall-back
        inv_temperature, top_k, top_p, min_p_gap = 1.0, 0, 0.0, -math.inf
    else:
        flags |= FLAG_RANDOM
        inv_temperature = 1.0 / max(p.temperature, MIN_TEMPERATURE)
        top_k = min(p.top_k, _INT_MAX) if p.top_k > 0 else 0
        top_p = max(p.top_p, MIN_TOP_P)
        min_p_gap = p.temperature * math.log(p.min_p) if p.min_p else -math.inf
    _PACK_INTO(
        rows,
        index * ROW_BYTES,
        flags,
        inv_temperature,
        top_k,
        top_p,
        min_p_gap,
        seed & 0xFFFFFFFF,
        seed >> 32,
        load.sample_index,
        p.presence_penalty,
        p.frequency_penalty,
        p.repetition_penalty,
        prompt,
        min(prompt + p.min_tokens, _INT_MAX),
        len(p.logit_bias) if p.logit_bias else 0,
        len(load.bad_words_ids) if load.bad_words_ids else 0,
        0,
    )


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def state_row_size(vocab_size: int) -> int:
    """int32 entries of a state row: two bitmasks, logit_bias ids and values, bad-word sequences."""
    return 2 * num_mask_words(vocab_size) + 2 * MAX_LOGIT_BIAS + MAX_BAD_SEQUENCES * MAX_BAD_WORD_TOKENS


def _pack_mask(allowed: np.ndarray) -> np.ndarray:
    """bool [V] -> int32 [ceil(V / 32)]; bit i of word w is token 32 w + i."""
    packed = np.zeros(num_mask_words(len(allowed)) * 4, np.uint8)
    bits = np.packbits(allowed, bitorder="little")
    packed[: len(bits)] = bits
    return packed.view("<u4").astype(np.uint32).view(np.int32)


def _checked_ids(name: str, ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.fromiter(ids, np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        bad = int(array.max() if array.max() >= vocab_size else array.min())
        raise ParameterError(name, f"got token id {bad}, must be in [0, {vocab_size})")
    return array


def _masks(load: SlotLoad, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed masks of the allowed tokens: always, and while fewer than min_tokens tokens were generated."""
    allowed = load.params.allowed_token_ids
    always = np.ones(vocab_size, bool)
    if allowed is not None:
        always[:] = False
        always[_checked_ids("allowed_token_ids", allowed, vocab_size)] = True
    early = always.copy()
    early[[i for i in load.stop_ids if 0 <= i < vocab_size]] = False
    # Only stop ids are allowed: then allowed_token_ids wins over min_tokens.
    return _pack_mask(always), _pack_mask(early if early.any() else always)


def _bad_words(sequences: list[list[int]] | None) -> np.ndarray:
    """int32 [MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS], right-aligned, padded with -1."""
    out = np.full((MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS), -1, np.int32)
    sequences = sequences or []
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise ParameterError("bad_words", f"got {len(sequences)} token sequences, at most {MAX_BAD_SEQUENCES} fit")
    for row, ids in zip(out, sequences, strict=False):
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise ParameterError("bad_words", f"got a word of {len(ids)} tokens, must be 1 to {MAX_BAD_WORD_TOKENS}")
        row[-len(ids) :] = ids
    return out


def encode_state(load: SlotLoad, vocab_size: int) -> np.ndarray:
    """The state row, int32 [state_row_size(vocab_size)]. ``ParameterError`` for ids outside the vocabulary."""
    bias = load.params.logit_bias or {}
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(bias)] = _checked_ids("logit_bias", bias, vocab_size)
    bias_values[: len(bias)] = list(bias.values())
    words = _bad_words(load.bad_words_ids)
    return np.concatenate([*_masks(load, vocab_size), bias_ids, bias_values.view(np.int32), words.ravel()])
