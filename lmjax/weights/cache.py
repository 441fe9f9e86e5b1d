"""Where lmjax keeps what it makes: ``LMJAX_CACHE``, or ``~/.cache/lmjax``. Only the user may read it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lmjax.weights.errors import WeightError


def cache_dir() -> Path:
    path = Path(os.environ.get("LMJAX_CACHE") or Path.home() / ".cache" / "lmjax")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WeightError(path, f"cannot be made ({error.strerror}): set LMJAX_CACHE to a folder of yours") from error
    return path


def make_once(target: Path, files: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """``target`` holding ``files``; ``make`` fills a temporary folder, which then takes the name in one step.

    Two processes that start together both succeed: the later one throws its copy away. A target with files missing
    (someone cleaned up) is replaced.
    """
    if all((target / name).is_file() for name in files):
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))  # mode 0700
    except OSError as error:
        raise WeightError(target.parent, f"cannot be written ({error.strerror}): set LMJAX_CACHE") from error
    try:
        make(work)
        _take_name(work, target, files)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _take_name(work: Path, target: Path, files: tuple[str, ...]) -> None:
    try:
        work.rename(target)
        return
    except OSError:
        if not target.is_dir():
            raise
    if all((target / name).is_file() for name in files):
        return  # another process was first
    for name in files:
        os.replace(work / name, target / name)
