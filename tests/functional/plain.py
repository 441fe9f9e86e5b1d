"""A plain decoder in flax linen, as a trainer would write it: token-major, dense attention, Hugging Face's names."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """x [B, n, heads, H]"""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (np.arange(half, dtype=np.float32) / np.float32(half))
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nn.Module):
    config: Any
    window: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or c["hidden_size"] // heads
        qkv_bias, o_bias = (
            c["model_type"].startswith("qwen2") or c.get("attention_bias", False),
            c.get("attention_bias", False),
        )
        split = (*x.shape[:2], -1, dim)
        q = nn.Dense(heads * dim, use_bias=qkv_bias, name="q_proj")(x).reshape(split)
        k = nn.Dense(kv_heads * dim, use_bias=qkv_bias, name="k_proj")(x).reshape(split)
        v = nn.Dense(kv_heads * dim, use_bias=qkv_bias, name="v_proj")(x).reshape(split)
        if c["model_type"] == "qwen3":
            q = nn.RMSNorm(epsilon=c["rms_norm_eps"], name="q_norm")(q)
            k = nn.RMSNorm(epsilon=c["rms_norm_eps"], name="k_norm")(k)
        q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        k, v = (jnp.repeat(y, heads // kv_heads, axis=2) for y in (k, v))
        at = jnp.arange(x.shape[1])
        seen = at[None, :] <= at[:, None]
        if self.window is not None:
            seen = seen & (at[None, :] > at[:, None] - self.window)
        o = nn.dot_product_attention(q, k, v, mask=seen[None, None])
        return nn.Dense(c["hidden_size"], use_bias=o_bias, name="o_proj")(o.reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    ffn: int
    out: int
    bias: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.ffn, use_bias=self.bias, name=self.names[0])(x)
        up = nn.Dense(self.ffn, use_bias=self.bias, name=self.names[1])(x)
        return nn.Dense(self.out, use_bias=self.bias, name=self.names[2])(nn.silu(gate) * up)


class Experts(nn.Module):
    """Mixtral and Qwen2-MoE, each expert over all tokens."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, hidden = self.config, self.config["hidden_size"]
        count, ffn, names, normalise = c.get("num_local_experts"), c["intermediate_size"], ("w1", "w3", "w2"), True
        if count is None:
            count, ffn, names = c["num_experts"], c["moe_intermediate_size"], Mlp.names
            normalise = c["norm_topk_prob"]
        p = nn.softmax(nn.Dense(count, use_bias=False, name="gate")(x))
        best, ids = jax.lax.top_k(p, c["num_experts_per_tok"])
        if normalise:
            best = best / best.sum(-1, keepdims=True)
        y = jnp.zeros_like(x)
        for e in range(count):
            share = jnp.where(ids == e, best, 0.0).sum(-1, keepdims=True)
            y = y + share * Mlp(ffn, hidden, names=names, name=f"experts.{e}")(x)
        if shared := c.get("shared_expert_intermediate_size"):
            share = nn.sigmoid(nn.Dense(1, use_bias=False, name="shared_expert_gate")(x))
            y = y + share * Mlp(shared, hidden, name="shared_expert")(x)
        return y


class Decoder(nn.Module):
    config: Any
    windows: tuple[int | None, ...]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int32 [B, n] -> logits float32 [B, n, V]"""
        c = self.config
        embed = nn.Embed(c["vocab_size"], c["hidden_size"], name="embed_tokens")
        x = embed(tokens)
        for i, window in enumerate(self.windows):
            h = nn.RMSNorm(epsilon=c["rms_norm_eps"], name=f"layers_{i}.input_layernorm")(x)
            x = x + Attention(c, window, name=f"layers_{i}.self_attn")(h)
            h = nn.RMSNorm(epsilon=c["rms_norm_eps"], name=f"layers_{i}.post_attention_layernorm")(x)
            x = x + self.mlp(i)(h)
        x = nn.RMSNorm(epsilon=c["rms_norm_eps"], name="norm")(x)
        tied = c["tie_word_embeddings"]
        return embed.attend(x) if tied else nn.Dense(c["vocab_size"], use_bias=False, name="lm_head")(x)

    def mlp(self, i: int) -> nn.Module:
        c, name = self.config, f"layers_{i}.mlp"
        if c["model_type"] == "mixtral":
            return Experts(c, name=f"layers_{i}.block_sparse_moe")
        if c["model_type"].endswith("_moe") and i not in c.get("mlp_only_layers", []):
            return Experts(c, name=name)
        return Mlp(c["intermediate_size"], c["hidden_size"], c.get("mlp_bias", False), name=name)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32 [B, n - 1], of the tokens 1 .. n - 1."""
    every = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]


def windows_of(config: dict[str, Any]) -> tuple[int | None, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if "layer_types" in config:
        return tuple(window if kind == "sliding_attention" else None for kind in config["layer_types"])
    first = config.get("max_window_layers", 0)
    return tuple(window if i >= first else None for i in range(layers))


def _path(name: str) -> tuple[list[str], bool]:
    """A Hugging Face name -> the keys of the linen tree, and whether the matrix is transposed there."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers":
        parts = [f"layers_{parts[1]}.{parts[2]}", *parts[3:]]
    if "experts" in parts:
        at = parts.index("experts")
        parts[at : at + 2] = [".".join(parts[at : at + 2])]
    *modules, kind = parts
    norm = "norm" in modules[-1]
    leaf = {"bias": "bias", "weight": "scale" if norm else "embedding" if modules[-1] == "embed_tokens" else "kernel"}
    return [*modules, leaf[kind]], leaf[kind] == "kernel"


def to_linen(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        path, transposed = _path(name)
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = jnp.asarray(value.T if transposed else value)
    return {"params": tree}


def from_linen(variables: dict[str, Any], names: list[str]) -> dict[str, np.ndarray]:
    """The tree's leaves under their Hugging Face names and shapes: also those of a gradient."""
    out = {}
    for name in names:
        path, transposed = _path(name)
        leaf: Any = variables["params"]
        for key in path:
            leaf = leaf[key]
        out[name] = np.ascontiguousarray(np.asarray(leaf).T if transposed else np.asarray(leaf))
    return out
