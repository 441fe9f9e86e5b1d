"""Tiny random BERT-like checkpoints in the Hugging Face layout, with a WordPiece tokenizer; see ``tests/tiny.py``.

``scripts/make_goldens.py encoders`` runs transformers over the same directories -> ``tests/goldens/encoders.npz``.
"""

from __future__ import annotations

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LETTERS = string.ascii_lowercase
VOCAB = len(SPECIAL) + 2 * len(LETTERS)  # each letter as a word's first and as a later one
LENGTHS = (37, 2, 60)
MINILM_TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A monkey is playing drums.",
    "Straße, naïve café: 東京 is far!",
    "word " * 300,  # cut to 256 tokens
    "a",
)


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "hidden_act": "gelu",
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    } | changes


_ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 66, "layer_norm_eps": 1e-5}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
CASES: dict[str, dict[str, Any]] = {
    "bert": _config("bert", "BertModel"),
    "bert_old": _config("bert", "BertForMaskedLM", hidden_act="gelu_new"),  # gamma and beta, prefix, heads
    "bert_score": _config("bert", "BertForSequenceClassification", **_ONE_LABEL),
    "roberta_score": _config("roberta", "RobertaForSequenceClassification", **_ROBERTA, **_ONE_LABEL),
    "xlmr": _config("xlm-roberta", "XLMRobertaModel", **_ROBERTA),
}


def _rng(*words: str) -> np.random.Generator:
    return np.random.default_rng([b for word in words for b in hashlib.sha256(word.encode()).digest()[:8]])


def prompts(name: str) -> list[np.ndarray]:
    rng = _rng(name, "prompts")
    return [rng.integers(len(SPECIAL), VOCAB, length).astype(np.int32) for length in LENGTHS]


def splits(name: str) -> list[int]:
    """Where the second text begins, for models that tell."""
    return [20, 1, 31] if name == "bert_score" else [0, 0, 0]


def tensors(name: str) -> dict[str, np.ndarray]:
    config, rng = CASES[name], _rng(name, "weights")
    hidden, ffn, out = config["hidden_size"], config["intermediate_size"], {}
    prefix = "" if config["architectures"][0].endswith("Model") else config["model_type"] + "."
    scale, shift = ("gamma", "beta") if name == "bert_old" else ("weight", "bias")

    def dense(where: str, rows: int, columns: int) -> None:
        out[f"{where}.weight"] = (1.5 * rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        out[f"{where}.bias"] = (0.3 * rng.standard_normal(rows)).astype(np.float32)

    def norm(where: str) -> None:
        out[f"{where}.{scale}"] = (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
        out[f"{where}.{shift}"] = (0.2 * rng.standard_normal(hidden)).astype(np.float32)

    sizes = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    for part, size in sizes.items():
        table = rng.standard_normal((config[size], hidden)).astype(np.float32)
        out[f"{prefix}embeddings.{part}_embeddings.weight"] = table
    norm(f"{prefix}embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{i}"
        for part in ("query", "key", "value"):
            dense(f"{layer}.attention.self.{part}", hidden, hidden)
        dense(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        dense(f"{layer}.intermediate.dense", ffn, hidden)
        dense(f"{layer}.output.dense", hidden, ffn)
        norm(f"{layer}.output.LayerNorm")
    if name == "roberta_score":
        dense("classifier.dense", hidden, hidden)
        dense("classifier.out_proj", 1, hidden)
    else:
        dense(f"{prefix}pooler.dense", hidden, hidden)
    if name == "bert_score":
        dense("classifier", 1, hidden)
    if name == "bert_old":
        out["cls.predictions.bias"] = np.zeros(VOCAB, np.float32)
        out["bert.embeddings.position_ids"] = np.arange(64, dtype=np.int64)[None]
    return out


def checksum(name: str) -> str:
    digest = hashlib.sha256()
    for tensor, values in sorted(tensors(name).items()):
        digest.update(tensor.encode() + values.tobytes())
    return digest.hexdigest()


def write(name: str, folder: str | Path, pooling: dict[str, Any] | None = None, **changes: Any) -> Path:
    """pooling: content of 1_Pooling/config.json, for a directory of sentence-transformers (texts of 48 tokens)."""
    path = Path(folder)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CASES[name] | changes))
    save_file(tensors(name), path / "model.safetensors")
    write_tokenizer(path)
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {"idx": i, "path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
            for i, k in enumerate(kinds)
        ]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "do_lower_case": false}')
    return path


def write_tokenizer(path: Path) -> None:
    """A letter is a token."""
    words = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS))
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "[UNK]"}))
