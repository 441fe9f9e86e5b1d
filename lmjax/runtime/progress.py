"""A bar while weights are read: in a terminal, nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_bar(shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Gives a listener to (bytes read, bytes in all). The bar is on standard error, and gone at the end.

    The engine's process has its parent's standard error, so ``lmjax serve`` in a terminal shows it, too.
    """
    from tqdm import tqdm

    with tqdm(
        desc="loading weights",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None if shown else True,  # None: unless it is a terminal
        leave=False,
        dynamic_ncols=True,
    ) as bar:

        def listen(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield listen
