"""The tokenizer: text to ids and back, and the bytes of each token.

Built on the ``tokenizers`` library alone: neither transformers nor a tensor library is imported, so a front-end
process starts fast and stays small.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend

from lmjax.text.decoding import Decoding, decoding_from
from lmjax.text.errors import TokenizerError

# The library's encode holds the interpreter's lock (2 s for 1 MB), its batch form does not.
_LONG = 2000
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TokenizerSettings:
    """What goes with a vocabulary. ``special_tokens``: ``{"bos_token": "<s>", ...}``, visible to templates.

    ``chat_template``: the template, or named templates; ``source``: where it was read from, for messages;
    ``end_ids``: ids that end a turn or message besides ``eos_token``, where the files say so.
    """

    source: str
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    end_ids: tuple[int, ...] = ()


class Tokenizer:
    """Made by ``load_tokenizer``. Ids that it does not know stand for no text; none of the methods fails on them."""

    def __init__(self, backend: Backend, settings: TokenizerSettings):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.settings = settings
        self.chat_template = settings.chat_template
        self.decoding: Decoding = decoding_from(_decoder_description(backend))
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, text in self.added_tokens.items() if text in special)
        self.text_vocab_size: int = backend.get_vocab_size(with_added_tokens=False)  # without what was added
        self.vocab_size: int = max([self.text_vocab_size - 1, *added]) + 1
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self._bytes: dict[int, bytes] = {}

    def _named_id(self, name: str) -> int | None:
        text = self.settings.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are parsed; half surrogate pairs become U+FFFD.

        About 2 us a character: encode long texts in a thread. Only then may others go on meanwhile.
        """
        if len(text) > _LONG:
            return self.encode_batch([text], add_special_tokens)[0]
        return self.backend.encode(clean_text(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of many texts, on several threads."""
        encodings = self.backend.encode_batch_fast(
            [clean_text(text) for text in texts], add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own name in the vocabulary."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, not being its first; empty for ids without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._piece(token_id)
            if piece is None:
                return b""
            found = self._bytes[token_id] = self.decoding.rest(piece)
        return found

    def first_token_bytes(self, token_id: int) -> bytes:
        """As ``token_bytes``, of a text's first token: some vocabularies drop a space there."""
        piece = self._piece(token_id)
        return b"" if piece is None else self.decoding.first(piece)

    def _piece(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self.backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """One token decoded alone; bytes that are no text by themselves show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", self.decoding.errors)

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of some ids, exactly what a ``Detokenizer`` gives for them token by token.

        ``spaces_between_special_tokens=False``: a special token right after another one is shown without the space
        that some decoders put before it.
        """
        stream = TextStream(self, skip_special_tokens, spaces_between_special_tokens)
        return "".join([stream.push(i) for i in ids]) + stream.flush()


class TextStream:
    """Text of tokens as they come; the cost of a token does not depend on how many came before."""

    __slots__ = ("_bytes", "_decode", "_decoder", "_first", "_last_special", "_raw", "_skip", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.decoding.errors)
        self._decode = self._decoder.decode
        self._bytes = tokenizer._bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Two specials in a row can only be seen when they are shown.
        self._raw = not skip_special_tokens and not spaces_between_special_tokens
        self._last_special = False
        self._first = True
        self._strip = tokenizer.decoding.strip[1]

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if token_id in self._skip:
            return ""
        if self._first or self._raw:
            return self._push_slowly(token_id)
        data = self._bytes.get(token_id)
        text = self._decode(self._tokenizer.token_bytes(token_id) if data is None else data)
        return self._stripped(text) if self._strip else text

    def _push_slowly(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        special = token_id in tokenizer.added_tokens
        if self._raw and special and self._last_special:
            data = tokenizer.added_tokens[token_id].encode("utf-8", "replace")
        elif self._first:
            data = tokenizer.first_token_bytes(token_id)
        else:
            data = tokenizer.token_bytes(token_id)
        self._last_special = special
        # An id without a token never reaches the decoder, so it is not the text's first.
        if self._first and tokenizer._piece(token_id) is not None:
            self._first = False
        text = self._decode(data)
        return self._stripped(text) if self._strip else text

    def _stripped(self, text: str) -> str:
        char = self._tokenizer.decoding.strip[0]
        while self._strip and text:
            if not text.startswith(char):
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text

    def flush(self) -> str:
        """What the bytes held so far are worth; the stream is at its end."""
        text = self._decode(b"", True)
        return self._stripped(text) if self._strip else text


def clean_text(text: str) -> str:
    """``text`` with every half of a surrogate pair (it has no UTF-8 form) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def _decoder_description(backend: Backend) -> dict | None:
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Read a tokenizer from a Hugging Face directory, a tokenizer.json or a .gguf file.

    ``chat_template``: a jinja file or the template itself, instead of the model's own. Raises ``TokenizerError``.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from lmjax.text.gguf_tokenizer import load_gguf_tokenizer as load
    else:
        from lmjax.text.hf_files import load_hf_tokenizer as load
    if not path.exists():
        raise TokenizerError(f"there is no tokenizer at {path}: no such file or directory")
    try:
        tokenizer = load(path)
    except TokenizerError:
        raise
    except Exception as error:  # damaged data fails in many ways, in the library with bare Exceptions
        raise TokenizerError(f"the tokenizer at {path} is damaged: {type(error).__name__}: {error}") from error
    if chat_template is not None:
        from lmjax.text.templates import read_template

        tokenizer.chat_template = read_template(chat_template)
    return tokenizer
