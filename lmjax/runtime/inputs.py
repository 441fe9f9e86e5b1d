"""A step plan as packed int32 buffers. Pure numpy: the host's half of the two programs' calling convention.

``forward`` and ``sample`` take one buffer each; both sides cut it by the same ``Layout``. What is handed to a program
must not change while it may run (XLA:CPU aliases aligned numpy arguments), so buffers come from a ring and are used
again only after their step was collected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmjax.core.plan import SlotLoad, StepPlan
from lmjax.runtime.buckets import Buckets, ForwardKey, SampleKey
from lmjax.sampling.params import NUM_PARAMS, encode_params, feature_level
from lmjax.types import SamplingParams

MAX_IN_FLIGHT = 2
PATCH_BATCH = 512  # patches of one call of the overflow program
ALIGN_BYTES = 64  # XLA:CPU takes such a numpy array as it is and copies any other


class Layout:
    """Named parts of one int32 buffer, in order. ``split`` works on numpy and on traced arrays alike."""

    def __init__(self, **shapes: tuple[int, ...]):
        self.shapes = shapes
        self.offsets = {}
        self.size = 0
        for name, shape in shapes.items():
            self.offsets[name] = self.size
            self.size += math.prod(shape)

    def split(self, buffer: Any) -> dict[str, Any]:
        """buffer: int32 [size] -> its parts by name (views, where it is a numpy array)."""
        at = self.offsets
        return {
            name: buffer[at[name] : at[name] + math.prod(shape)].reshape(shape) for name, shape in self.shapes.items()
        }


def forward_layout(key: ForwardKey, num_groups: int, block_size: int) -> Layout:
    """Header: num_decode, num_rows, num_tokens, then the range of tokens with a prompt log-probability [first, end).

    Decode tokens have their ids on the device, so ``token_ids`` holds those of prefill rows only. ``patches`` has
    room for what decode growth and a full prefill chunk need (plus as many freed blocks of window groups).
    """
    t, s = key.num_tokens, key.num_rows
    shapes: dict[str, tuple[int, ...]] = {
        "header": (5,),
        "token_ids": (t,),
        "token_rows": (t,),
        "positions": (t,),
        "slots": (s,),
        "query_starts": (s,),
        "query_lens": (s,),
        "context_lens": (s,),
        "logit_tokens": (s,),
        "patches": (num_groups * (s + t // block_size) + 8, 4),
    }
    if key.prompt_logprobs:
        shapes["target_ids"] = (t,)
    return Layout(**shapes)


def sample_layout(num_rows: int) -> Layout:
    """``slots``: the dummy slot for rows that do not sample; ``positions``: where the drawn token goes."""
    return Layout(slots=(num_rows,), positions=(num_rows,), params=(num_rows, NUM_PARAMS))


@dataclass(slots=True)
class PackedStep:
    forward_key: ForwardKey
    forward: np.ndarray  # int32 [forward_layout.size]
    sample_key: SampleKey | None  # None: no row samples
    sample: np.ndarray | None  # int32 [sample_layout.size]
    wants_logprobs: bool  # some row that samples asked; the program may give them all the same
    overflow: list[np.ndarray]  # int32 [PATCH_BATCH, 4] each: patches to apply before the forward


def aligned_zeros(size: int) -> np.ndarray:
    """int32 [size] of zeros at a 64 byte boundary."""
    raw = np.zeros(size * 4 + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size * 4].view(np.int32)


class _Ring:
    """``MAX_IN_FLIGHT + 1`` buffers of one layout with their parts, given out in turn."""

    def __init__(self, layout: Layout):
        self._buffers = [aligned_zeros(layout.size) for _ in range(MAX_IN_FLIGHT + 1)]
        self._parts = [layout.split(buffer) for buffer in self._buffers]
        self._next = 0

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        i = self._next
        self._next = (i + 1) % len(self._buffers)
        return self._buffers[i], self._parts[i]


class InputPacker:
    """Plans to buffers, with the host's tables of sampling parameters by slot. Slot ``max_num_seqs`` is the dummy."""

    def __init__(self, buckets: Buckets, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int):
        self._buckets = buckets
        self._dummy = max_num_seqs
        self._table_width = -(-max_model_len // block_size)
        nobody = SlotLoad(max_num_seqs, SamplingParams(temperature=0.0), 0, 0, np.zeros(0, np.int32), 0)
        self._params = np.tile(encode_params(nobody), (max_num_seqs + 1, 1))
        self._levels = np.zeros(max_num_seqs + 1, np.int32)
        self._logprobs = np.zeros(max_num_seqs + 1, bool)
        keys = (*buckets.forward, buckets.prompt_logprobs)
        self._forward = {key: _Ring(forward_layout(key, num_groups, block_size)) for key in keys}
        self._sample = {rows: _Ring(sample_layout(rows)) for rows in buckets.row_buckets}
        self._iota = np.arange(max(key.num_tokens for key in keys), dtype=np.int32)

    def load_slot(self, load: SlotLoad) -> None:
        self._params[load.slot] = encode_params(load)
        self._levels[load.slot] = feature_level(load)
        self._logprobs[load.slot] = load.params.logprobs is not None

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan's buffers; they stay valid until ``MAX_IN_FLIGHT`` more plans were packed."""
        key = self._buckets.choose(plan)
        buffer, parts = self._forward[key].take()
        self._pack_rows(plan, parts)
        overflow = self._pack_patches(plan.patches, parts["patches"])
        if key.prompt_logprobs:
            _pack_targets(plan, parts)
        sample_key, sample, wants_logprobs = self._pack_sample(plan, key)
        return PackedStep(key, buffer, sample_key, sample, wants_logprobs, overflow)

    def _pack_rows(self, plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
        rows, decode, tokens = plan.num_rows, plan.num_decode, plan.num_tokens
        lengths, ends = plan.lengths, np.cumsum(plan.lengths, dtype=np.int32)
        first = ends - lengths
        parts["header"][:] = (decode, rows, tokens, 0, 0)
        _fill(parts["slots"], plan.slots, self._dummy)
        _fill(parts["query_starts"], first)
        _fill(parts["query_lens"], lengths)
        _fill(parts["context_lens"], plan.starts + lengths)
        _fill(parts["logit_tokens"], ends - 1)
        token_rows, positions, token_ids = parts["token_rows"], parts["positions"], parts["token_ids"]
        token_rows[:decode] = self._iota[:decode]
        positions[:decode] = plan.starts[:decode]
        token_ids[:decode] = 0
        if rows > decode:
            of = np.repeat(self._iota[decode:rows], lengths[decode:])
            token_rows[decode:tokens] = of
            positions[decode:tokens] = self._iota[decode:tokens] + (plan.starts - first)[of]
            token_ids[decode:tokens] = plan.token_ids
        token_rows[tokens:] = 0
        positions[tokens:] = 0
        token_ids[tokens:] = 0

    def _pack_patches(self, patches: np.ndarray, out: np.ndarray) -> list[np.ndarray]:
        patches = self._last_writes(patches)
        extra = len(patches) - len(out)
        batches = []
        for start in range(0, max(extra, 0), PATCH_BATCH):
            batch = aligned_zeros(PATCH_BATCH * 4).reshape(PATCH_BATCH, 4)
            self._fill_patches(batch, patches[start : min(start + PATCH_BATCH, extra)])
            batches.append(batch)
        self._fill_patches(out, patches[max(extra, 0) :])
        return batches

    def _fill_patches(self, out: np.ndarray, patches: np.ndarray) -> None:
        out[: len(patches)] = patches
        out[len(patches) :] = (0, self._dummy, 0, 0)

    def _last_writes(self, patches: np.ndarray) -> np.ndarray:
        """Without patches that a later one of the same place overrides: a scatter has no order."""
        if len(patches) < 2:
            return patches
        place = patches[:, 0].astype(np.int64)
        place = (place * (self._dummy + 1) + patches[:, 1]) * self._table_width + patches[:, 2]
        _, last = np.unique(place[::-1], return_index=True)
        return patches if len(last) == len(patches) else patches[len(patches) - 1 - last]

    def _pack_sample(self, plan: StepPlan, key: ForwardKey) -> tuple[SampleKey | None, np.ndarray | None, bool]:
        samples = plan.samples
        if not samples.any():
            return None, None, False
        slots = np.where(samples, plan.slots, np.int32(self._dummy))
        buffer, parts = self._sample[key.num_rows].take()
        _fill(parts["slots"], slots, self._dummy)
        _fill(parts["positions"], (plan.starts + plan.lengths) * samples)
        np.take(self._params, parts["slots"], axis=0, out=parts["params"], mode="clip")
        level = int(self._levels[slots].max())
        wants_logprobs = bool(self._logprobs[slots].any())
        return Buckets.sample_key(key.num_rows, level, wants_logprobs), buffer, wants_logprobs


def _fill(out: np.ndarray, values: np.ndarray, padding: int = 0) -> None:
    out[: len(values)] = values
    out[len(values) :] = padding


def _pack_targets(plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
    assert plan.target_ids is not None
    targets = parts["target_ids"]
    targets[: plan.num_decode] = -1
    targets[plan.num_decode : plan.num_tokens] = plan.target_ids
    targets[plan.num_tokens :] = -1
    wanted = np.flatnonzero(plan.target_ids >= 0)
    if len(wanted):
        parts["header"][3:] = plan.num_decode + wanted[0], plan.num_decode + wanted[-1] + 1
