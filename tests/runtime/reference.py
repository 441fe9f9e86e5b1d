"""A dense float64 Llama in numpy, straight from the checkpoint's tensors: the oracle of the runtime's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class NumpyLlama:
    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: w.astype(np.float64) for name, w in load_file(path / "model.safetensors").items()}

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float64 [n, V]: of the token after each."""
        c, w = self.config, self.weights
        n, heads, kv_heads, dim = len(token_ids), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x = w["model.embed_tokens.weight"][token_ids]
        angle = np.arange(n)[:, None] * c["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        mask = np.where(np.tri(n, dtype=bool), 0.0, -np.inf)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self._norm(x, p + "input_layernorm")
            q = self._rope((h @ w[p + "self_attn.q_proj.weight"].T).reshape(n, heads, dim), cos, sin)
            k = self._rope((h @ w[p + "self_attn.k_proj.weight"].T).reshape(n, kv_heads, dim), cos, sin)
            v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(n, kv_heads, dim)
            k, v = (a.repeat(heads // kv_heads, axis=1) for a in (k, v))
            scores = np.einsum("qnh,knh->nqk", q, k) * dim**-0.5 + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            o = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v).reshape(n, -1)
            x = x + o @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, p + "post_attention_layernorm")
            gate, up = (h @ w[p + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
        return self._norm(x, "model.norm") @ w["lm_head.weight"].T

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        logits = self.logits(token_ids)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]

    @staticmethod
    def _rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
