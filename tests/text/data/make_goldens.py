"""Writes goldens.json: ids of the texts below by sentencepiece (Mistral) and transformers (other directories).

Needs sentencepiece. ``python make_goldens.py smollm2=DIR qwen3=DIR``
"""

import json
import sys
from pathlib import Path

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "Hello", " Hello", "  Hello", "Hello  ", "Hello world",
    " Hello world", "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～", "this is 🦙.cpp", "w048 7tuijk dsdfhu",
    "нещо на Български", "កាន់តែពិសេសអាចខលចេញ", "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅", "ied 4 ½ months",
    "Führer", "\n =", "' era", "I'll don't WE'RE she'd it'S", "3", "33", "333", "3333", "33333",
    "Cửa Việt", "a  1 and   22",
    "!!!!!!", "def f(x):\n    return  x\n\n\nclass A:\n\tpass", "e\u0301 \u00e9 \ufb01 \uff21", "\u200b\u00a0x\u3000y",
    "https://example.org/a?b=c&d=%20#e_f", "<s>not</s> special <|im_end|>?",
    "ＡＢＣ ｶﾀｶﾅ 中文 한국어 العربية हिन्दी ไทย",
]  # fmt: skip


def main() -> None:
    here = Path(__file__).parent
    goldens = {"texts": TEXTS, "mistral": _sentencepiece(here / "mistral.model")}
    for argument in sys.argv[1:]:
        name, _, directory = argument.partition("=")
        goldens[name] = _transformers(directory)
    rows = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in goldens.items()]
    (here / "goldens.json").write_text("{" + ",\n".join(rows) + "}\n")


def _sentencepiece(model: Path) -> list[list[int]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    # sentencepiece itself never parses special tokens in a text
    return [processor.encode(text) for text in TEXTS if "<s>" not in text]


def _transformers(directory: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


if __name__ == "__main__":
    main()
