"""The text layer's own errors."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer's or template's files are missing, damaged or of a kind that is not supported. One line."""
