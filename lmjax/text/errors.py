"""The text layer's own errors."""

from __future__ import annotations

from lmjax.types import ModelError


class TokenizerError(ModelError):
    """A tokenizer's or template's files are missing, damaged or of a kind that is not supported. One line."""
