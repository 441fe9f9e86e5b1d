"""The fenced blocks of README.md and docs/*.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^ {0,3}(```+)(.*)$")


@dataclass(frozen=True)
class Block:
    page: str  # path from the repository's root
    line: int  # of the first line within the fence, from 1
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0].strip()

    @property
    def key(self) -> tuple[str, str]:
        """What lists name it by: lines move."""
        return self.page, self.first

    @property
    def commands(self) -> list[str]:
        """Of shell blocks: logical lines; in a console block those after the prompt ``$``."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """Raises ``ValueError`` for a fence that is not closed."""
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None  # line, fence, language
    inside: list[str] = []
    page = path.relative_to(ROOT).as_posix()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, inside = (number + 1, fence[1], fence[2].strip()), []
        elif fence and fence[1] == opened[1] and not fence[2].strip():
            found.append(Block(page, opened[0], opened[2], "\n".join(inside) + "\n"))
            opened = None
        else:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is not closed")
    return found


ALL = [block for path in PAGES for block in blocks_of(path)]
