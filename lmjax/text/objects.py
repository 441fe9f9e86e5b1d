"""A tokenizer from an object in memory, or none at all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from lmjax.text.errors import TokenizerError
from lmjax.text.tokenizer import Tokenizer, TokenizerSettings, load_tokenizer
from lmjax.types import ParameterError

NEEDS = "this engine has no tokenizer: give token ids, or start it with tokenizer=..."


class NoTokenizer(Tokenizer):
    """Of an engine that takes and gives token ids: no id has a text, and no text has ids."""

    def __init__(self) -> None:
        super().__init__(Backend(WordLevel({}, unk_token="")), TokenizerSettings("nothing"))

    def encode(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        raise ParameterError("prompt", f"is a text, but {NEEDS}")

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> NoReturn:
        self.encode("")


def tokenizer_from(given: Any, chat_template: str | None = None) -> Tokenizer:
    """given: a tokenizer of lmjax, of transformers (a fast one) or of tokenizers, or None.

    Raises ``TokenizerError`` for anything else, and for a chat template without a tokenizer.
    """
    if given is None:
        if chat_template is not None:
            raise TokenizerError("a chat template (--chat-template) is of no use without a tokenizer")
        return NoTokenizer()
    if isinstance(given, Tokenizer):
        found = given
    elif isinstance(given, Backend):
        found = Tokenizer(Backend.from_str(given.to_str()), TokenizerSettings("a tokenizers.Tokenizer"))
    elif isinstance(getattr(given, "backend_tokenizer", None), Backend):
        with tempfile.TemporaryDirectory() as directory:  # its files say all there is to say
            given.save_pretrained(directory)
            found = load_tokenizer(Path(directory))
    else:
        raise TokenizerError(
            f"tokenizer: got {type(given).__name__}, must be a path, a fast tokenizer of transformers, a "
            "tokenizers.Tokenizer or a lmjax.text.tokenizer.Tokenizer"
        )
    if chat_template is not None:
        from lmjax.text.templates import read_template

        found.chat_template = read_template(chat_template)
    return found
