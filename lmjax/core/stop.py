"""When a request ends: stop tokens and lengths."""

from __future__ import annotations

import numpy as np

from lmjax.core.request import Request
from lmjax.core.slots import SlotTable
from lmjax.types import FinishReason

End = tuple[FinishReason, int | None]


def ended_rows(table: SlotTable, slots: np.ndarray, token_ids: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Rows that may end with their new token; ``end_of`` decides.

    ``slots``: int [R]; ``token_ids``: int32 [R], the new tokens; ``lengths``: int32 [R], tokens with the new one.
    """
    ended = lengths >= table.limit[slots]
    for i in range(table.stop_width):
        ended |= table.stop_ids[i][slots] == token_ids
    if table.any_many_stops:
        ended |= table.many_stops[slots]
    return ended.nonzero()[0].tolist()


def end_of(request: Request, token_id: int, length: int) -> End | None:
    """How ``request`` ends with its newest token (it has ``length`` tokens now), if it does.

    Before ``min_tokens`` tokens a stop token does not end it (the device masks them there).
    """
    if token_id in request.stop_ids and length - 1 - request.num_prompt >= request.params.min_tokens:
        return "stop", token_id if token_id in request.params.stop_token_ids else None
    if length >= request.limit:
        return "length", None
    return None
