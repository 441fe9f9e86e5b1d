"""A real tiny engine, built once a process, and the same model in plain flax."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
from safetensors.numpy import load_file

from lmjax import LLM
from tests.fixtures import model_dir
from tests.functional import plain

CONTEXT, BUDGET, TOP = 64, 16, 5


SIZES = {"max_num_seqs": 4, "max_model_len": CONTEXT, "max_num_batched_tokens": BUDGET}


@functools.cache
def small_llm(logprobs_mode: str = "raw_logprobs") -> LLM:
    """Steps of 16 tokens: a whole context takes four."""
    return LLM(str(model_dir("RAND")), max_logprobs=TOP, logprobs_mode=logprobs_mode, **SIZES)


@functools.cache
def _plain():
    path = model_dir("RAND")
    config = json.loads((path / "config.json").read_text())
    module = plain.Decoder(config, (None,) * config["num_hidden_layers"])
    return jax.jit(module.apply), plain.to_linen(load_file(path / "model.safetensors"))


def plain_logits(ids) -> np.ndarray:
    """float64 [n, V]; padded behind to one shape, so that it compiles once."""
    apply, variables = _plain()
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(apply(variables, tokens), np.float64)[0, : len(ids)]


def plain_hidden(ids) -> np.ndarray:
    """float64 [n, D], after the last norm."""
    apply, variables = _plain()
    head = {"kernel": np.eye(*variables["params"]["lm_head"]["kernel"].shape, dtype=np.float32)}
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, : len(ids)] = ids
    logits = apply({"params": {**variables["params"], "lm_head": head}}, tokens)
    return np.asarray(logits, np.float64)[0, : len(ids)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
