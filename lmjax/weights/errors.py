"""The one error of this package."""

from __future__ import annotations

from pathlib import Path

from lmjax.types import ModelError


class WeightError(ModelError):
    """A model cannot be loaded. One line: the file (and tensor), the cause, and what would be right."""

    def __init__(self, where: str | Path, message: str):
        super().__init__(" ".join(f"{where}: {message}".splitlines()))
        self.where = str(where)
