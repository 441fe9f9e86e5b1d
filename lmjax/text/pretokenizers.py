"""How byte-level BPE vocabularies cut a text into words, by the name that GGUF files give (``tokenizer.ggml.pre``).

Each entry is a list of regular expressions, applied one after the other to the pieces that the one before left.
Where llama.cpp had to rewrite a model's expression for its own engine, the model's is used.
"""

from __future__ import annotations

from lmjax.text.errors import TokenizerError

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES


def _words(digits: str, suffix: str = _SUFFIX + "|") -> str:
    """The family of Llama 3 and Qwen 2."""
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|" + _TAIL


def _cased_words(digits: str, suffix: str, marks: str = r"\p{M}") -> str:
    """The family of GPT-4o and Tekken: a word ends where lower case meets upper case."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}{marks}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}{marks}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{upper}*{lower}+{suffix}|{head}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES


# Letters of cased alphabets, as DeepSeek's first models list them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_EXAONE_MOE = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|" + _SPACES
)
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + _SPACES
_QWEN35 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_TRIPLES = r"\p{N}{1,3}"

_FAMILIES: list[tuple[str, list[str]]] = [
    ("default", [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", [_GPT2]),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", [r"\p{N}", _GPT2]),
    ("falcon", [_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"]),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe", [_words(_TRIPLES)]),
    ("chatglm-bpe glm4 glm5", [_words(_TRIPLES)]),
    ("minicpm5", [_TRIPLES, _words(r"\p{N}+")]),
    ("qwen2 deepseek-r1-qwen kormo stablelm2 megrez hunyuan solar-open grok-2", [_words(r"\p{N}")]),
    ("qwen35", [_QWEN35]),
    ("ufakzeka", [_words(r"\p{N}", suffix="")]),
    ("laguna", [r"[^\n]+|[\n]+", _words(r"\p{N}")]),
    ("deepseek-llm", ["[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                      r"\s+$", _CJK, r"\p{N}+"]),
    ("deepseek-coder", ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"]),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", [_TRIPLES, _KANA, _DEEPSEEK3]),
    ("tekken", [_cased_words(r"\p{N}", "")]),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", [_cased_words(_TRIPLES, _SUFFIX + "?")]),
    ("tiny_aya cohere2moe", [r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(_TRIPLES, _SUFFIX + "?")]),
    ("bailingmoe bailingmoe2 llada-moe", [_BAILING]),
    ("seed-coder", [_SEED]),
    ("exaone-moe", [_EXAONE_MOE]),
    ("bloom poro-chat gpt3-finnish", [_BLOOM]),
    ("viking", [_BLOOM, r"\p{N}"]),
]  # fmt: skip
_PATTERNS = {name: patterns for names, patterns in _FAMILIES for name in names.split()}

_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
ADDS_BOS = frozenset([*_LLAMA3, "tekken"])
# A word that is a token itself is that token, whatever the merges say.
IGNORES_MERGES = frozenset([*_LLAMA3, "minicpm5", "glm4", "glm5", "tekken"])


def patterns_of(name: str) -> list[str]:
    """The expressions of a pre-tokenizer. Raises ``TokenizerError`` with the known names."""
    if name not in _PATTERNS:
        raise TokenizerError(f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known are {', '.join(_PATTERNS)}")
    return _PATTERNS[name]
