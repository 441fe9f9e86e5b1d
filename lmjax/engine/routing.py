"""Which of several engines takes a request: the one that will have least to do for it, what it has cached included."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from lmjax.core.block_hash import extend_digests, root_digest

# What a running choice costs the others, in prompt tokens. A step takes one token of each, so a replica with many
# running answers more slowly; the exact rate does not matter for an even spread.
RUNNING_COST = 32


def block_names(prompt: list[int], cache_salt: str | None, block_size: int, lora: str | None = None) -> list[bytes]:
    """Names of the prompt's full blocks: two are equal where those in an engine's prefix cache are. The last token is
    always computed."""
    names: list[bytes] = []
    salt = cache_salt if lora is None else repr((lora, cache_salt))
    tokens = np.asarray(prompt[:-1], np.int32)
    extend_digests(names, root_digest(None, salt), tokens, block_size)
    return names


class Replica:
    """What the router knows of one engine: the prompts it was given lately, and what it still has to do."""

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # least recently used first, as the engine's pool
        self.work = 0  # prompt tokens not computed yet, and RUNNING_COST for each running choice

    def num_cached(self, names: list[bytes]) -> int:
        """How many leading blocks it probably has."""
        return next((i for i, name in enumerate(names) if name not in self._seen), len(names))

    def note(self, names: list[bytes]) -> None:
        for name in names:
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > self._num_blocks:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """It was started anew."""
        self._seen.clear()


def by_cost(
    replicas: dict[int, Replica], names: list[bytes], prompt_len: int, block_size: int
) -> list[tuple[int, int]]:
    """(replica, prompt tokens that it has to compute), the cheapest first: its work and the request's own."""
    found = [(index, prompt_len - block_size * r.num_cached(names)) for index, r in replicas.items()]
    return sorted(found, key=lambda pair: (replicas[pair[0]].work + pair[1], replicas[pair[0]].work, pair[0]))
