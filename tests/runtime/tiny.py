"""One tiny random model, and executors for it that are built once a test session."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np

from lmjax.config import EngineConfig
from lmjax.core.plan import StepPlan
from lmjax.runtime.executor import JaxExecutor, build_executor
from tests.fixtures import make_model

VOCAB = 300
CONFIG = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@functools.cache
def tiny_model(layers: int = 2) -> Path:
    config = CONFIG | {"num_hidden_layers": layers}
    return make_model(Path(tempfile.mkdtemp(prefix="lmjax-tiny-")), hidden=64, seed=3, config=config)


def tiny_config(layers: int = 2, **changes) -> EngineConfig:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "block_size": 4,
        "num_gpu_blocks_override": 200,
        "max_logprobs": 5,
    }
    return EngineConfig(model=str(tiny_model(layers)), **(defaults | changes))


@functools.cache
def tiny_executor(**changes) -> JaxExecutor:
    """Shared: use slots and blocks as if they held anything."""
    return build_executor(tiny_config(**changes))


def make_plan(step_id: int = 0, *, decode=(), prefill=(), patches=(), targets=None, **fields) -> StepPlan:
    """decode: (slot, start) each; prefill: (slot, start, token ids, samples) each."""
    rows = [(slot, start, 1, True) for slot, start in decode]
    rows += [(slot, start, len(ids), samples) for slot, start, ids, samples in prefill]
    slots, starts, lengths = (np.array([row[i] for row in rows], np.int32) for i in range(3))
    return StepPlan(
        step_id=step_id,
        num_decode=len(decode),
        slots=slots,
        handles=slots.astype(np.int64) + 100,
        keys=slots.astype(np.int64) + 100,
        starts=starts,
        lengths=lengths,
        samples=np.array([row[3] for row in rows], bool),
        token_ids=np.array([t for _, _, ids, _ in prefill for t in ids], np.int32),
        target_ids=None if targets is None else np.array(targets, np.int32),
        patches=np.array(patches, np.int32).reshape(-1, 4),
        **fields,
    )
