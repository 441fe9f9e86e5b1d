"""GRPO (Shao et al., 2024, "DeepSeekMath") in one process: the engine samples, flax nnx and optax train, both with the
same arrays. After each update ``LLM.set_params`` gives the engine the trainer's new buffers; nothing is copied.

    python -m examples.grpo [--steps 100] [--seed 0] [--shuffle-rewards]

The task is one that a CPU learns in a minute: the prompt is four symbols, the right answer its last and its first one.
A new model answers about 1 in 16 right. With ``--shuffle-rewards`` the answers get each other's rewards (the control:
nothing can be learnt). The engine runs with ``deterministic``, so the log-probabilities that it recorded while sampling
are those that the trainer's own forward has inside ``value_and_grad``; the largest difference seen is printed as gap.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lmjax import LLM, SamplingParams, functional

SYMBOLS, PROMPT, ANSWER = 4, 4, 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": SYMBOLS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
}


class Policy(nnx.Module):
    """The engine's own layout as nnx parameters; any nnx module with Hugging Face's names would do as well."""

    def __init__(self, spec: functional.DecoderSpec, seed: int):
        self.weights = nnx.data(jax.tree.map(nnx.Param, functional.init_params(spec, "float32", seed)))

    @property
    def params(self) -> functional.DecoderParams:
        return jax.tree.map(lambda p: p[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Param))


class Rollout(NamedTuple):
    tokens: np.ndarray  # int32 [P * G, PROMPT + ANSWER], the G answers to a prompt one after the other
    logprobs: np.ndarray  # float32 [P * G, ANSWER], as recorded when the tokens were drawn
    rewards: np.ndarray  # float32 [P * G]


def reward(prompt: np.ndarray, answer: Sequence[int]) -> float:
    return float(list(answer) == [prompt[-1], prompt[0]])


def roll_out(llm: LLM, rng: np.random.Generator, prompts: int, group: int) -> Rollout:
    asked = rng.integers(0, SYMBOLS, (prompts, PROMPT))
    params = [
        SamplingParams(n=group, max_tokens=ANSWER, ignore_eos=True, logprobs=0, seed=int(rng.integers(2**62)))
        for _ in range(prompts)
    ]
    tokens, logprobs, rewards = [], [], []
    for prompt, request in zip(asked, llm.generate(asked.tolist(), params, use_tqdm=False), strict=True):
        for out in request.outputs:
            assert out.logprobs is not None
            assert set(out.weight_versions) == {llm.weight_version}, "sampled by the weights that are being trained"
            tokens.append([*prompt, *out.token_ids])
            logprobs.append([at[token].logprob for at, token in zip(out.logprobs, out.token_ids, strict=True)])
            rewards.append(reward(prompt, out.token_ids))
    return Rollout(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(rewards, np.float32))


def advantages(rewards: np.ndarray, group: int) -> np.ndarray:
    """Each answer against the others to its prompt."""
    by_prompt = rewards.reshape(-1, group)
    return ((by_prompt - by_prompt.mean(1, keepdims=True)) / (by_prompt.std(1, keepdims=True) + 1e-4)).reshape(-1)


def loss(
    policy: Policy, tokens: jax.Array, recorded: jax.Array, advantage: jax.Array, model: dict[str, Any], clip: float
) -> tuple[jax.Array, jax.Array]:
    """The clipped objective of PPO, and the largest difference to what the sampler recorded."""
    logprobs = functional.logprobs(policy.params, tokens, **model)[:, PROMPT - 1 :]
    ratio = jnp.exp(logprobs - recorded)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -gain.mean(), jnp.abs(logprobs - recorded).max()


def make_step(model: dict[str, Any], clip: float) -> Any:
    objective = partial(loss, model=model, clip=clip)

    @nnx.jit
    def step(policy: Policy, optimizer: nnx.Optimizer[Policy], *batch: jax.Array) -> jax.Array:
        (_, gap), gradient = nnx.value_and_grad(objective, has_aux=True)(policy, *batch)
        optimizer.update(policy, gradient)
        return gap

    return step


class Result(NamedTuple):
    before: float  # success rates on new prompts
    after: float
    gap: float
    seconds: float


def train(
    steps: int, seed: int, *, prompts: int = 24, group: int = 8, rate: float = 2e-3, shuffle: bool = False
) -> Result:
    begin = time.perf_counter()
    rng = np.random.default_rng(seed)
    policy = Policy(functional.spec_from_hf(CONFIG, None), seed)
    optimizer = nnx.Optimizer(policy, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)), wrt=nnx.Param)
    settings: dict[str, Any] = {"deterministic": True, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    with LLM(params=policy.params, config=CONFIG, **settings) as llm:
        step, gap = make_step(llm.functional, clip=0.2), 0.0

        def success() -> float:
            return float(roll_out(llm, np.random.default_rng(seed + 1), 512, 1).rewards.mean())

        before = success()
        for i in range(steps):
            batch = roll_out(llm, rng, prompts, group)
            rewards = rng.permutation(batch.rewards) if shuffle else batch.rewards
            gap = max(gap, float(step(policy, optimizer, batch.tokens, batch.logprobs, advantages(rewards, group))))
            llm.set_params(policy.params)
            if (i + 1) % 25 == 0:
                print(f"step {i + 1}: success {batch.rewards.mean():.3f}, gap {gap:g}", flush=True)
        return Result(before, success(), gap, time.perf_counter() - begin)


def main(argv: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: rewards of other answers")
    args = parser.parse_args(argv)
    result = train(args.steps, args.seed, shuffle=args.shuffle_rewards)
    print(f"success {result.before:.3f} -> {result.after:.3f}, gap {result.gap:g}, {result.seconds:.0f} s")
    return result


if __name__ == "__main__":
    main()
