"""What ``LLM``'s calls have in common: their prompts, and the bar that shows how far they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lmjax.types import ParameterError, RequestUpdate

Prompt = str | Sequence[int]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, dict) or not isinstance(prompts, Sequence | np.ndarray):
        raise ParameterError("prompts", f"got {prompts!r}, must be a text, a list of token ids, or a list of these")
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@contextlib.contextmanager
def progress_bar(count: int, enabled: bool) -> Iterator[Callable[[RequestUpdate], None]]:
    from tqdm import tqdm

    tokens, begin = 0, time.monotonic()
    with tqdm(total=count, disable=not enabled, unit="req", dynamic_ncols=True) as bar:

        def advance(update: RequestUpdate) -> None:
            nonlocal tokens
            tokens += sum(len(delta.token_ids) for delta in update.deltas)
            if update.finished:
                bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):.1f} tok/s", refresh=False)
                bar.update()

        yield advance
