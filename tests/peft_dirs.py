"""LoRA adapters as PEFT directories for the checkpoints of ``fixtures``, and those with an adapter merged in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.fixtures import Weights, llama_config, make_model

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear, by the end of its name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def make_adapter(
    path: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    size: float = 0.3,
    modules: Sequence[str] = ALL_LINEARS,
    model: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """``size``: of the change, relative to the weights of ``RAND``. ``model``: config.json's content, ``config``: is
    merged over adapter_config.json."""
    path, rng, tensors = Path(path), np.random.default_rng(seed), {}
    model = model or llama_config()
    for layer in range(model["num_hidden_layers"]):
        for name, (rows, columns) in _shapes(model).items():
            if name.split(".")[1] in modules:
                prefix = f"{_PREFIX}model.layers.{layer}.{name}"
                spread = size * 1.2 / columns**0.5 / (rank**0.5 * alpha / rank)
                tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 1, (rank, columns)).astype("float32")
                tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, spread, (rows, rank)).astype("float32")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(modules),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings | (config or {})))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def merged_model(path: str | Path, adapter: Path) -> Path:
    """``RAND`` with the adapter in its weights: W + alpha / r * B A."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(adapter / "adapter_model.safetensors")

    def merge(tensors: Weights) -> None:
        for name in [name for name in pairs if name.endswith(".lora_A.weight")]:
            a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
            target = name.removeprefix(_PREFIX).replace(".lora_A", "")
            tensors[target] = tensors[target] + np.float32(settings["lora_alpha"] / settings["r"]) * (b @ a)

    return make_model(path, edit=merge)
