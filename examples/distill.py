"""On-policy distillation (Agarwal et al., 2024, "GKD") in one process: the student's engine samples, the teacher's
scores what it said, flax nnx and optax train, and ``LLM.set_params`` gives the engine the new arrays without a copy.

    python -m examples.distill [--steps 100] [--objective forward]
    python -m examples.distill --teacher smollm2 --student DIRECTORY --prompts prompts.txt --output DIRECTORY

Without models it makes its own: a teacher that first learns a toy language, and a smaller student that knows nothing.
``reverse`` lowers KL(student | teacher) a token on the student's samples. It is estimated from the tokens drawn: the
gradient of log p(student), weighted with log p(student) - log p(teacher). ``forward``: on the teacher's samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lmjax import LLM, SamplingParams, functional
from lmjax.flags import Parser

SYMBOLS = 16
SHAPE = {"model_type": "llama", "vocab_size": SYMBOLS, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
MORE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
TEACHER, STUDENT = (SHAPE | dict(zip(MORE, sizes, strict=True)) for sizes in ((2, 64, 256, 4, 2), (1, 48, 128, 3, 1)))


class Model(nnx.Module):
    """The engine's own layout as nnx parameters."""

    def __init__(self, params: functional.DecoderParams):
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> functional.DecoderParams:
        return jax.tree.map(lambda p: p[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Param))


class Batch(NamedTuple):
    tokens: np.ndarray  # int32 [B, n]: prompt, answer, padding
    counts: np.ndarray  # float32 [B, n - 1]: 1 where the next token is one of the answer, else 0


class Result(NamedTuple):
    kl: tuple[float, ...]  # of the student from the teacher, nats a token of its own samples: before, after
    agreement: tuple[float, ...]  # share of those places where both find the same token the most likely one
    tokens_per_second: float  # sampled, scored and trained on, without compiling


def sample(llm: LLM, prompts: Sequence[list[int]], length: int, rng: np.random.Generator) -> Batch:
    """An answer to each, up to ``length`` tokens with the prompt."""
    params = [SamplingParams(max_tokens=length - len(ids), seed=int(rng.integers(2**62))) for ids in prompts]
    tokens, counts = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length - 1), np.float32)
    for row, (prompt, request) in enumerate(zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True)):
        ids = [*prompt, *request.outputs[0].token_ids]
        tokens[row, : len(ids)] = ids
        counts[row, len(prompt) - 1 : len(ids) - 1] = 1
    return Batch(tokens, counts)


def score(llm: LLM, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first its log-probability, and which one would be the most likely. [B, n - 1] each"""
    found: Any = llm.logprobs(batch.tokens.tolist(), top_k=1)
    return np.stack([row.logprobs for row in found]), np.stack([row.top_ids[:, 0] for row in found])


def loss(model: Model, tokens: Any, theirs: Any, counts: Any, how: dict[str, Any], forward: bool) -> jax.Array:
    """Its gradient is an estimate of the KL's. theirs: the teacher's log-probabilities float32 [B, n - 1]."""
    ours = functional.logprobs(model.params, tokens, **how)
    gap, mean = jax.lax.stop_gradient(ours) - theirs, partial(jnp.average, weights=counts)
    # less variance by a baseline, the mean: at every place the expected gradient of log p is 0
    return mean((-1 if forward else gap - mean(gap)) * ours)


def trainer(model: Model, rate: float, steps: int, how: dict[str, Any], forward: bool) -> Callable[..., jax.Array]:
    """step(tokens, theirs, counts) changes the model, the last of them hardly."""
    adam = optax.adam(optax.linear_schedule(rate, 0, steps))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adam), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer[Model], *batch: jax.Array) -> jax.Array:
        value, gradient = nnx.value_and_grad(partial(loss, how=how, forward=forward))(model, *batch)
        optimizer.update(model, gradient)
        return value

    return partial(step, model, optimizer)


def toy_teacher(steps: int, rng: np.random.Generator, rows: int = 64, length: int = 32) -> functional.DecoderParams:
    """Learns a language in which the last two symbols tell how likely each is to be the next one."""
    each = np.exp(rng.normal(0, 1.5, (SYMBOLS, 1, SYMBOLS)) + rng.normal(0, 1.5, (SYMBOLS, SYMBOLS)))
    below = (each / each.sum(-1, keepdims=True)).cumsum(-1)  # [V, V, V]
    spec = functional.spec_from_hf(TEACHER, None)
    model = Model(functional.init_params(spec, "float32", seed=1))
    step, none = trainer(model, 1e-2, steps, {"spec": spec}, True), np.zeros((rows, length - 1), np.float32)
    for _ in range(steps):
        tokens = rng.integers(0, SYMBOLS, (rows, length), np.int32)
        for i in range(2, length):
            passed = below[tokens[:, i - 2], tokens[:, i - 1]] < rng.random((rows, 1))
            tokens[:, i] = np.minimum(passed.sum(-1), SYMBOLS - 1)
        step(tokens, none, none + 1)
    return model.params


def models(args: argparse.Namespace, rng: np.random.Generator) -> tuple[LLM, LLM, list[list[int]]]:
    """Teacher, student, prompts. The engines are deterministic, so that a seed gives the same numbers every time."""
    size: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": args.length, "deterministic": True}
    if args.teacher is None:
        size["max_num_batched_tokens"] = 32  # tiny models: few programs to compile
        teacher = LLM(params=toy_teacher(args.teacher_steps, rng), config=TEACHER, **size)
        new = functional.init_params(functional.spec_from_hf(STUDENT, None), "float32", args.seed)
        return teacher, LLM(params=new, config=STUDENT, **size), rng.integers(0, SYMBOLS, (1024, 4)).tolist()
    teacher, student = LLM(args.teacher, **size), LLM(args.student, dtype="float32", **size)
    if (ours := student.info.vocab_size) != teacher.info.vocab_size:
        raise ValueError(f"--student: has {ours} tokens, must have the teacher's {teacher.info.vocab_size}")
    return teacher, student, [teacher.tokenizer.encode(line) for line in args.prompts.read_text().splitlines() if line]


def distill(teacher: LLM, student: LLM, prompts: list[list[int]], args: argparse.Namespace) -> Result:
    forward, rng = args.objective == "forward", np.random.default_rng(args.seed)
    model = Model(student.params)
    step = trainer(model, args.learning_rate, args.steps, student.functional, forward)

    def draw(llm: LLM, rng: np.random.Generator) -> Batch:
        return sample(llm, [prompts[i] for i in rng.integers(0, len(prompts), args.batch)], args.length, rng)

    def measure() -> tuple[float, float]:
        batch = draw(student, np.random.default_rng(args.seed + 1))
        (ours, our_best), (theirs, their_best) = score(student, batch), score(teacher, batch)
        mean = partial(np.average, weights=batch.counts)
        return float(mean(ours - theirs)), float(mean(our_best == their_best))

    before, tokens, seconds = measure(), 0.0, 1e-9
    for i in range(args.steps):
        begin, batch = time.perf_counter(), draw(teacher if forward else student, rng)
        step(batch.tokens, score(teacher, batch)[0], batch.counts).block_until_ready()
        student.set_params(model.params)
        if i:  # the first one compiles
            tokens, seconds = tokens + batch.counts.sum(), seconds + time.perf_counter() - begin
        if (i + 1) % 25 == 0:
            print("step {}: KL {:.3f}, agreement {:.3f}".format(i + 1, *measure()), flush=True)
    kl, agreement = zip(before, measure(), strict=True)
    return Result(kl, agreement, float(tokens / seconds))


def main(argv: Sequence[str] | None = None) -> Result:
    parser = Parser(prog="distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", metavar="MODEL", help="with --student, of the same vocabulary, and --prompts")
    parser.add_argument("--student", metavar="MODEL", help="it is trained in float32")
    for flag, what in (("--prompts", "a text file, a prompt a line"), ("--output", "directory for the student")):
        parser.add_argument(flag, type=Path, help=what)
    parser.add_argument("--objective", choices=("reverse", "forward"), default="reverse")
    for flag, default in (("--steps", 100), ("--teacher-steps", 100), ("--batch", 64), ("--length", 32), ("--seed", 0)):
        parser.add_argument(flag, type=int, default=default, help="[%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="[%(default)s]")
    args = parser.parse_args(argv)
    if len({args.teacher is None, args.student is None, args.prompts is None}) == 2:
        parser.error("--teacher, --student, --prompts: give all of them or none")
    teacher, student, prompts = models(args, np.random.default_rng(args.seed))
    with teacher, student:
        kl, agreement, speed = result = distill(teacher, student, prompts, args)
        if args.output:
            student.save_pretrained(args.output)
    print("KL {:.3f} -> {:.3f}, agreement {:.3f} -> {:.3f}, {:.0f} tokens/s".format(*kl, *agreement, speed))
    return result


if __name__ == "__main__":
    main()
