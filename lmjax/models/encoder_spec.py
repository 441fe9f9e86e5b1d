"""What an encoder is, as data: from a config.json, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmjax.models.common import ACTIVATIONS
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import Activation

# model type -> architectures that are a bare encoder, and the one with a score as its head
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "bert": (("BertModel", "BertForMaskedLM", "BertForPreTraining"), "BertForSequenceClassification"),
    "roberta": (("RobertaModel", "RobertaForMaskedLM"), "RobertaForSequenceClassification"),
    "xlm-roberta": (("XLMRobertaModel", "XLMRobertaForMaskedLM"), "XLMRobertaForSequenceClassification"),
}


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    model_type: str
    hidden: int  # D
    heads: int  # N
    layers: int  # L
    ffn: int  # F
    vocab: int  # V
    num_positions: int  # rows of the table
    first_position: int  # of them, that of a sequence's first token
    num_types: int
    norm_eps: float
    activation: Activation
    max_len: int  # longest sequence to serve
    scores: bool = False  # a cross-encoder
    sigmoid: bool = True  # its scores go through one


def encoder_from_hf(config: dict[str, Any], max_model_len: int | None) -> EncoderSpec:
    """ValueError names the field, its value and what is allowed where the config asks for what is not built."""
    hf = HfConfig(config)
    bare, scoring = hf.choice("model_type", None, FAMILIES)
    named = (hf.get("architectures") or [bare[0]])[0]
    if named not in (*bare, scoring):
        raise hf.error("architectures", named, f"one of {', '.join((*bare, scoring))}")
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise hf.error("position_embedding_type", config["position_embedding_type"], "absolute")
    for name in ("is_decoder", "add_cross_attention", "quantization_config", "embedding_size"):
        if hf.get(name) not in (None, False):
            raise hf.error(name, config[name], "absent or null: not supported for encoders")
    scores = named == scoring
    if scores and (labels := _num_labels(hf)) != 1:
        raise hf.error("num_labels", labels, "1 (id2label with one entry): classes are not served, scores are")
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    if hidden % heads:
        raise hf.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
    rows = hf.integer("max_position_embeddings")
    # RoBERTa counts positions from the padding token's id on
    first = 0 if hf.get("model_type") == "bert" else int(hf.get("pad_token_id", 1)) + 1
    longest = rows - first
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(f"max_model_len: got {max_model_len}, must be at most {longest}, the model's positions")
    return EncoderSpec(
        model_type=hf.get("model_type"),
        hidden=hidden,
        heads=heads,
        layers=hf.integer("num_hidden_layers"),
        ffn=hf.integer("intermediate_size"),
        vocab=hf.integer("vocab_size"),
        num_positions=rows,
        first_position=first,
        num_types=hf.integer("type_vocab_size", 2 if first == 0 else 1),
        norm_eps=hf.number("layer_norm_eps", 1e-12),
        activation=hf.choice("hidden_act", "gelu", ACTIVATIONS),
        max_len=max_model_len or longest,
        scores=scores,
        sigmoid=_sigmoid(config),
    )


def _num_labels(hf: HfConfig) -> int:
    labels = hf.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(hf.get("num_labels", 2))


def _sigmoid(config: dict[str, Any]) -> bool:
    """sentence-transformers puts a sigmoid on a single score unless the config names another function."""
    own = config.get("sentence_transformers") or {}
    name = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rsplit(".", 1)[-1]
    if kind not in ("Sigmoid", "Identity"):
        raise ValueError(f"activation_fn: got {name!r}, must be torch.nn.modules.activation.Sigmoid or Identity")
    return kind == "Sigmoid"


Names = dict[str, tuple[str, ...]]  # parameter (dotted path) -> the tensors that are stacked in it, one or three

_LAYER = {
    "o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def encoder_names(spec: EncoderSpec) -> Names:
    """As a checkpoint of the bare model has them; one with a head has ``bert.`` or ``roberta.`` before."""
    names: Names = {
        "embed": ("embeddings.word_embeddings.weight",),
        "positions": ("embeddings.position_embeddings.weight",),
        "types": ("embeddings.token_type_embeddings.weight",),
        **_norm("norm", "embeddings.LayerNorm"),
    }
    for i in range(spec.layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        for kind in ("weight", "bias"):
            parts = ("query", "key", "value")
            names[f"{ours}.qkv.{kind}"] = tuple(f"{theirs}.attention.self.{part}.{kind}" for part in parts)
        for name, tensor in _LAYER.items():
            names |= (_norm if name.endswith("norm") else _dense)(f"{ours}.{name}", f"{theirs}.{tensor}")
    if spec.scores:
        roberta = spec.model_type != "bert"
        names |= _dense("head", "classifier.dense" if roberta else "pooler.dense")
        names |= _dense("score", "classifier.out_proj" if roberta else "classifier")
    return names


def harmless(name: str, spec: EncoderSpec) -> bool:
    """Tensors of the checkpoint that nothing here reads: heads of the pre-training, and the first token's pooler."""
    heads = ("cls.", "lm_head.") + (() if spec.scores else ("pooler.",))
    return name.startswith(heads) or name.endswith((".position_ids", ".token_type_ids")) or name == "position_ids"


def _dense(ours: str, theirs: str) -> Names:
    return {f"{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}


def _norm(ours: str, theirs: str) -> Names:
    return {f"{ours}.scale": (f"{theirs}.weight",), f"{ours}.bias": (f"{theirs}.bias",)}
