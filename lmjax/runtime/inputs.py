"""A step plan as packed int32 buffers. Pure numpy: the host's half of the two programs' calling convention.

``forward`` and ``sample`` take one buffer each; both sides cut it by the same ``Layout``. What is handed to a program
must not change while it may run (XLA:CPU aliases aligned numpy arguments), so buffers come from a ring and are used
again only after their step was collected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from lmjax.core.plan import SlotLoad, StepPlan
from lmjax.runtime.buckets import Buckets, ForwardKey, SampleKey
from lmjax.sampling.params import NUM_PARAMS, encode_params, feature_level, write_params
from lmjax.types import SamplingParams

MAX_IN_FLIGHT = 2
PATCH_BATCH = 512  # patches of one call of the overflow program
_WANTS_LOGPROBS = 1 << 3  # above the bits of the feature levels
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
    if key.prompt_logprobs or key.pooled:
        shapes["target_ids"] = (t,)
    if key.prompt_logprobs:
        shapes["entropy"] = (1,)  # whether entropies are wanted
    if key.adapters:
        shapes["adapters"] = (s,)  # slots of the rows' adapters, -1 for none
    if key.processed:
        shapes["params"] = (s, NUM_PARAMS)
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


class _Buffer(NamedTuple):
    whole: np.ndarray  # int32 [layout.size]
    parts: dict[str, np.ndarray]


T = TypeVar("T")


class Ring(Generic[T]):
    """``size`` of what ``make`` makes, given out in turn: one more than may be in use."""

    def __init__(self, make: Callable[[], T], size: int = MAX_IN_FLIGHT + 1):
        self._items = [make() for _ in range(size)]
        self._next = 0

    def take(self) -> T:
        item = self._items[self._next]
        self._next = (self._next + 1) % len(self._items)
        return item


def _ring(layout: Layout) -> Ring[_Buffer]:
    def make() -> _Buffer:
        whole = aligned_zeros(layout.size)
        return _Buffer(whole, layout.split(whole))

    return Ring(make)


class InputPacker:
    """Plans to buffers, with the host's tables of sampling parameters by slot. Slot ``max_num_seqs`` is the dummy.

    The cost of a step is the number of numpy calls, so rows are written where they belong and looked up once.
    """

    def __init__(self, buckets: Buckets, *, max_num_seqs: int, block_size: int, num_groups: int):
        self._buckets = buckets
        self._dummy = max_num_seqs
        nobody = SlotLoad(max_num_seqs, SamplingParams(temperature=0.0), 0, 0, np.zeros(0, np.int32), 0)
        self._params = np.tile(encode_params(nobody), (max_num_seqs + 1, 1))
        # bits of what a slot needs of its sample program, so that a union is what a step needs: one for each feature
        # level up to its own, and _WANTS_LOGPROBS
        self._needs = np.zeros(max_num_seqs + 1, np.uint8)
        keys = buckets.every_forward
        layouts = {key: forward_layout(key, num_groups, block_size) for key in keys}
        self._forward = {key: _ring(layout) for key, layout in layouts.items()}
        self._sample = {rows: _ring(sample_layout(rows)) for rows in buckets.row_buckets}
        self._iota = np.arange(max(key.num_tokens for key in keys), dtype=np.int32)
        most_patches = max(PATCH_BATCH, *(layout.shapes["patches"][0] for layout in layouts.values()))
        self._no_patches = np.tile(np.array([0, max_num_seqs, 0, 0], np.int32), (most_patches, 1))

    def load_slot(self, load: SlotLoad) -> None:
        write_params(load, self._params.data, load.slot)
        levels = (1 << feature_level(load)) - 1
        self._needs[load.slot] = levels if load.params.logprobs is None else levels | _WANTS_LOGPROBS

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan's buffers; they stay valid until ``MAX_IN_FLIGHT`` more plans were packed."""
        key = self._buckets.choose(plan)
        buffer, parts = self._forward[key].take()
        overflow = self.fill(plan, parts)
        sample_key, sample, wants_logprobs = self.pack_sample(plan, parts)
        return PackedStep(key, buffer, sample_key, sample, wants_logprobs, overflow)

    def fill(self, plan: StepPlan, parts: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Writes the parts of a forward program's buffer that has room for the plan. Returns the patches that it has
        none for, int32 [PATCH_BATCH, 4] each, to be applied before."""
        self._pack_rows(plan, parts)
        self._pack_tokens(plan, parts)
        if "target_ids" in parts:
            _pack_targets(plan, parts)
        if "entropy" in parts:
            parts["entropy"][0] = plan.entropy
        if "adapters" in parts:
            parts["adapters"][:] = -1
            if plan.adapters is not None:
                parts["adapters"][: plan.num_rows] = plan.adapters
        if "params" in parts:
            self._params.take(parts["slots"], axis=0, out=parts["params"], mode="clip")
        return self._pack_patches(plan.patches, parts["patches"])

    def _pack_rows(self, plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
        rows, lengths = plan.num_rows, plan.lengths
        ends = np.add.accumulate(lengths, dtype=np.int32)
        header = parts["header"]
        header[0], header[1], header[2] = plan.num_decode, rows, plan.num_tokens
        header[3:] = 0
        parts["slots"][:rows] = plan.slots
        parts["query_lens"][:rows] = lengths
        np.subtract(ends, lengths, out=parts["query_starts"][:rows])
        np.add(plan.starts, lengths, out=parts["context_lens"][:rows])
        np.subtract(ends, 1, out=parts["logit_tokens"][:rows])
        if rows < len(parts["slots"]):
            parts["slots"][rows:] = self._dummy
            for name in ("query_lens", "query_starts", "context_lens", "logit_tokens"):
                parts[name][rows:] = 0

    def _pack_tokens(self, plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
        rows, decode, tokens = plan.num_rows, plan.num_decode, plan.num_tokens
        token_rows, positions, token_ids = parts["token_rows"], parts["positions"], parts["token_ids"]
        token_rows[:decode] = self._iota[:decode]
        positions[:decode] = plan.starts[:decode]
        token_ids[:decode] = 0
        if rows > decode:
            lengths = plan.lengths[decode:]
            offsets = plan.starts[decode:] - parts["query_starts"][decode:rows]  # from a token's place to its position
            token_rows[decode:tokens] = self._iota[decode:rows].repeat(lengths)
            np.add(self._iota[decode:tokens], offsets.repeat(lengths), out=positions[decode:tokens])
            token_ids[decode:tokens] = plan.token_ids
        token_rows[tokens:] = 0
        positions[tokens:] = 0
        token_ids[tokens:] = 0

    def _pack_patches(self, patches: np.ndarray, out: np.ndarray) -> list[np.ndarray]:
        extra = max(len(patches) - len(out), 0)
        batches = []
        for start in range(0, extra, PATCH_BATCH):
            batch = aligned_zeros(PATCH_BATCH * 4).reshape(PATCH_BATCH, 4)
            self._fill_patches(batch, patches[start : min(start + PATCH_BATCH, extra)])
            batches.append(batch)
        self._fill_patches(out, patches[extra:])
        return batches

    def _fill_patches(self, out: np.ndarray, patches: np.ndarray) -> None:
        out[: len(patches)] = patches
        out[len(patches) :] = self._no_patches[len(patches) : len(out)]

    def pack_sample(
        self, plan: StepPlan, forward: dict[str, np.ndarray]
    ) -> tuple[SampleKey | None, np.ndarray | None, bool]:
        """``forward``: the parts that ``fill`` wrote. Returns the program (None: no row samples), its buffer, and
        whether some row that samples asked for log-probabilities."""
        drawn = np.count_nonzero(plan.samples)
        if not drawn:
            return None, None, False
        rows, num_rows = plan.num_rows, len(forward["slots"])
        buffer, parts = self._sample[num_rows].take()
        slots = parts["slots"]
        slots[:] = forward["slots"]
        parts["positions"][:] = forward["context_lens"]
        if drawn < rows:
            silent = ~plan.samples
            slots[:rows][silent] = self._dummy
            parts["positions"][:rows][silent] = 0
        index = slots.astype(np.intp)  # numpy looks up with it what it would otherwise convert each time
        self._params.take(index, axis=0, out=parts["params"], mode="clip")
        needs = int(np.bitwise_or.reduce(self._needs[index]))
        wants_logprobs = needs >= _WANTS_LOGPROBS
        level = (needs & (_WANTS_LOGPROBS - 1)).bit_length()
        return self._buckets.sample_key(num_rows, level, wants_logprobs), buffer, wants_logprobs


def _pack_targets(plan: StepPlan, parts: dict[str, np.ndarray]) -> None:
    targets = parts["target_ids"]
    if plan.target_ids is None:  # another step of the pipeline has some
        targets[:] = -1
        return
    targets[: plan.num_decode] = -1
    targets[plan.num_decode : plan.num_tokens] = plan.target_ids
    targets[plan.num_tokens :] = -1
    wanted = np.flatnonzero(plan.target_ids >= 0)
    if len(wanted):
        parts["header"][3:] = plan.num_decode + wanted[0], plan.num_decode + wanted[-1] + 1
