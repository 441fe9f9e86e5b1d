"""The metadata of a GGUF file, without its tensors. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmjax.text.errors import TokenizerError

# value type -> struct format of one value
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 100_000


class _Reader:
    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if size > len(self.data) - self.at:
            raise ValueError("a string goes past the end of the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"unknown value type {kind}")

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data) - self.at:
            raise ValueError("an array goes past the end of the file")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        form = _SCALARS[kind]
        size = struct.calcsize("<" + form) * count
        raw = self.data[self.at : self.at + size]
        if len(raw) < size:
            raise ValueError("an array goes past the end of the file")
        self.at += size
        return list(struct.unpack(f"<{count}{form}", raw)) if form in "?Qq" else array(form, raw).tolist()


def read_metadata(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """The key-value pairs whose key is ``wanted``. Raises ``TokenizerError`` naming the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data, wanted)
    except (OSError, ValueError, struct.error) as error:
        raise TokenizerError(f"{path} is not a readable GGUF file: {error}") from None


def _read(data: mmap.mmap, wanted: Callable[[str], bool]) -> dict[str, Any]:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    reader = _Reader(data)
    reader.at = 4
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} (as little-endian), supported are 2 and 3")
    reader.scalar("Q")  # tensors
    count = reader.scalar("Q")
    if count > _MOST_KEYS:
        raise ValueError(f"it claims to have {count} keys")
    pairs = {}
    for _ in range(count):
        key = reader.string()
        value = reader.value(reader.scalar("I"))
        if wanted(key):
            pairs[key] = value
    return pairs
