"""JSON lines between compare.py and a system under test. Standard library only: it runs in foreign environments."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable


def serve(load: Callable[[dict], Callable[[list[list[int]], int], list[list[int]]]]) -> None:
    """Answers ``{"prompts": [[ids]], "max_tokens": n}`` with the ids of every reply and the seconds it took.

    The first line holds the settings for ``load``, which returns ``generate(prompts, max_tokens)``: greedy, end of
    sequence ignored. What libraries print goes to stderr, so that stdout carries only the protocol.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if generate is None:
                generate = load(message)
                reply: dict = {"ready": True}
            else:
                start = time.perf_counter()
                ids = generate(message["prompts"], message["max_tokens"])
                reply = {"seconds": time.perf_counter() - start, "ids": ids}
        except Exception as error:  # reported to the parent, which leaves this system out and says why
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
