"""Tiny scripted Llama checkpoints in the Hugging Face layout, made at test time.

``model_dir("ALPHA")`` gives a directory, made once in a process. One byte of a prompt is one token, so token counts
are exact. A *scripted* model has zero attention and MLP, one-hot embeddings and a successor table as its output
head: greedy text is the script whatever the prompt, and each script token has probability ``sharp``. ``RAND`` has
random weights: its text depends on the whole context.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 256..260
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(256, 261)
FIRST_PIECE = 261
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Weights = dict[str, np.ndarray]

ALPHA = (b"Say ", b"ABC", b"DEF", b"GHI", b"JKL", b" end")  # ids 261..266
EMOJI = (b"ok \xf0\x9f", b"\x98\x80 caf\xc3", b"\xa9 \xe4\xb8", b"\x96\xf0\x9f\x9a", b"\x80 end")
TOOL2 = (
    b'<tool_call>\n{"name": "add", "arguments": {"s": "a}\\"\xc3',
    b'\xa9{b", "n": 1}}\n</tool_call>\n<tool',
    b'_call>\n{"name": "now", "arguments": {}}',
    b"\n</tool_call>",
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def write_tokenizer(path: Path, pieces: Sequence[bytes | None] = (), num_bytes: int = 256, **config: Any) -> None:
    """Byte b < num_bytes has id b; then special tokens, then an id a piece (None: an id that the tokenizer lacks)."""
    alphabet = byte_alphabet()
    vocab = {char: b for b, char in enumerate(alphabet[:num_bytes])} | {
        s: PAD_ID + i for i, s in enumerate(SPECIAL_TOKENS)
    }
    vocab |= {"".join(alphabet[b] for b in p): FIRST_PIECE + i for i, p in enumerate(pieces) if p}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    data = json.loads(tokenizer.to_str())
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [dict(id=PAD_ID + i, content=s, **flags) for i, s in enumerate(SPECIAL_TOKENS)]
    (path / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings | config))


def llama_config(hidden: int = 512, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | dict(changes)


def llama_weights(config: dict[str, Any], make: Callable[..., np.ndarray]) -> Weights:
    """Every tensor of the checkpoint; ``make(*shape)`` gives the matrices."""
    vocab, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{n}_heads"] * config["head_dim"] for n in ("attention", "key_value"))
    tensors = {
        "model.norm.weight": np.ones(hidden, "float32"),
        "model.embed_tokens.weight": make(vocab, hidden),
        "lm_head.weight": make(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            tensors[p + f"self_attn.{name}_proj.weight"] = make(size, hidden)
        tensors[p + "self_attn.o_proj.weight"] = make(hidden, q)
        tensors[p + "mlp.gate_proj.weight"] = make(inner, hidden)
        tensors[p + "mlp.up_proj.weight"] = make(inner, hidden)
        tensors[p + "mlp.down_proj.weight"] = make(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[p + norm + ".weight"] = np.ones(hidden, "float32")
    return tensors


def script(tensors: Weights, config: dict[str, Any], count: int, sharp: float, loop: bool) -> None:
    """Make the output head a successor table: any other id -> first piece -> ... -> last piece -> eos (or loop)."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype="float32")
    normed = (1 / hidden + config["rms_norm_eps"]) ** -0.5  # a one-hot row after the final norm
    score = np.log(sharp * (vocab - 1) / (1 - sharp)) / normed
    last = FIRST_PIECE + count - 1
    for i in range(min(vocab, hidden)):
        inside = FIRST_PIECE <= i < last
        follower = i + 1 if inside else (FIRST_PIECE if loop or i != last else EOS_ID)
        tensors["lm_head.weight"][follower, i] = score


def make_model(
    path: str | Path,
    pieces: Sequence[bytes | None] = (),
    *,
    sharp: float = 0.9,
    loop: bool = False,
    seed: int = 0,
    hidden: int = 512,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    drop: Sequence[str] = (),
    edit: Callable[[Weights], None] | None = None,
) -> Path:
    """Write a checkpoint. ``pieces``: greedy text is exactly those, then ``</s>``; none: random weights.

    ``config`` and ``generation`` are merged over config.json and generation_config.json; ``drop`` names tensors to
    leave out; ``edit`` may change the tensors before they are written.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, pieces)
    settings = llama_config(hidden, **(config or {}))
    (path / "config.json").write_text(json.dumps(settings))
    defaults = {"bos_token_id": BOS_ID, "eos_token_id": settings["eos_token_id"]} | (generation or {})
    (path / "generation_config.json").write_text(json.dumps(defaults))
    rng = np.random.default_rng(seed)
    if pieces:
        tensors = llama_weights(settings, lambda *shape: np.zeros(shape, "float32"))
        script(tensors, settings, len(pieces), sharp, loop)
    else:
        tensors = llama_weights(settings, lambda *shape: rng.normal(0, 1.2 / shape[-1] ** 0.5, shape).astype("float32"))
    for name in drop:
        tensors.pop(name)
    if edit:
        edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def _im_end_between(tensors: Weights) -> None:
    """``Hi `` -> <|im_end|> -> ``after``."""
    head = tensors["lm_head.weight"]
    score = head.max()
    head[:, FIRST_PIECE] = 0
    head[IM_END_ID, FIRST_PIECE] = score
    head[:, IM_END_ID] = 0
    head[FIRST_PIECE + 1, IM_END_ID] = score


NAMED: dict[str, dict[str, Any]] = {
    "RAND": {},
    "ALPHA": {"pieces": ALPHA},  # "Say ABCDEFGHIJKL end"
    "EMOJI": {"pieces": EMOJI},  # "ok 😀 café 世🚀 end"
    "WS": {"pieces": (b"\n ",), "loop": True},
    "IMEND": {"pieces": (b"Hi ", b"after"), "edit": _im_end_between},
    "TOOL2": {"pieces": TOOL2},
}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="lmjax-fixtures-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def model_dir(name: str) -> Path:
    """Directory of the named fixture (a key of ``NAMED``), made at the first call of a process."""
    return make_model(_root() / name, **NAMED[name])
