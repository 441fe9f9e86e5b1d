"""LoRA adapters of the checkpoints of ``tests/tiny.py``, as PEFT directories. No torch needed.

``scripts/make_goldens.py`` runs transformers with peft over the same directories and stores what the merged weights
give in ``tests/goldens/loras.npz``. All values come from numpy's generator, seeded with the adapter's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import tiny

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION = LLAMA[:4]
_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


@dataclass(frozen=True)
class Adapter:
    """``case``: of ``tiny.CASES``. ``settings``: over those of adapter_config.json."""

    case: str
    modules: tuple[str, ...] = LLAMA
    rank: int = 16
    size: float = 0.5  # of what it adds, as a share of the weights
    settings: dict[str, Any] = field(default_factory=dict)


MODEL = "llama_gqa4_dim20"
GREEDY = 24  # tokens after a prompt
# eight of one model, for one batch
MANY = {f"many{i}": Adapter(MODEL) for i in range(8)}
# how a family's matrices lie in the decoder's, one each
FAMILIES = {
    "qwen2": Adapter("qwen2"),
    "qwen3_moe": Adapter("qwen3_moe", _ATTENTION),
    "phi3": Adapter("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt2": Adapter("gpt2", ("c_attn", "c_proj", "c_fc")),
    "gptj": Adapter("gptj", ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")),
    "gpt_neox": Adapter("gpt_neox", _FUSED),
    "falcon": Adapter("falcon", _FUSED),
    "bloom": Adapter("bloom", _FUSED),
    "mpt": Adapter("mpt", ("Wqkv", "out_proj", "up_proj", "down_proj")),
    "starcoder2": Adapter("starcoder2", ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj")),
    "gemma2": Adapter("gemma2"),
    "cohere": Adapter("cohere"),
    # what the settings can say
    "some": Adapter(MODEL, ("q_proj", "down_proj"), rank=5),
    "rslora": Adapter(MODEL, rank=7, settings={"use_rslora": True}),
    "patterns": Adapter(
        MODEL, rank=8, settings={"rank_pattern": {"1.mlp.up_proj": 3}, "alpha_pattern": {"^.*k_proj": 40.0}}
    ),
}
ADAPTERS = MANY | FAMILIES


def modules_of(adapter: Adapter) -> dict[str, tuple[int, int]]:
    """[out, in] of every module that it changes."""
    found = {}
    for name, tensor in tiny.tensors(adapter.case).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.ndim == 2 and module.rpartition(".")[2] in adapter.modules:
            rows, columns = tensor.shape
            found[module] = (columns, rows) if adapter.case == "gpt2" else (rows, columns)
    return found


def settings(name: str) -> dict[str, Any]:
    adapter = ADAPTERS[name]
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": 2 * adapter.rank,
        "lora_dropout": 0.1,
        "target_modules": list(adapter.modules),
        "bias": "none",
        "fan_in_fan_out": adapter.case == "gpt2",
    }
    return values | adapter.settings


def tensors(name: str) -> dict[str, np.ndarray]:
    adapter, rng = ADAPTERS[name], tiny._rng(name, "adapter")
    out = {}
    for module, (rows, columns) in modules_of(adapter).items():
        rank = adapter.rank
        for end, own in adapter.settings.get("rank_pattern", {}).items():
            rank = own if module.endswith(end) else rank
        a, b = rng.standard_normal((rank, columns)), rng.standard_normal((rows, rank))
        out[f"base_model.model.{module}.lora_A.weight"] = (a / columns**0.5).astype(np.float32)
        out[f"base_model.model.{module}.lora_B.weight"] = (b * adapter.size / rank**0.5).astype(np.float32)
    return out


def write(name: str, path: str | Path) -> Path:
    """The adapter as a directory."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings(name), indent=1))
    save_file(tensors(name), path / "adapter_model.safetensors")
    return path


def prompts(name: str, count: int = 2) -> list[list[int]]:
    rng = tiny._rng(name, "prompts of the adapter")
    return [rng.integers(0, tiny.VOCAB, length).tolist() for length in (13, 6, 24)[:count]]
