"""A server process on a FakeEngine: ``python -m tests.server.fake_server SETTINGS ENGINE``, both JSON objects.

ENGINE: FakeEngine's arguments, and ``load`` (seconds), ``fail`` (a message: loading fails), ``die_after`` (seconds).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from server.app import ServerSettings, run_server
from tests.fake_engine import FakeEngine


def main() -> int:
    settings, engine = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    load, fail, die_after = engine.pop("load", 0.0), engine.pop("fail", None), engine.pop("die_after", None)

    async def start() -> Any:
        print("loading", flush=True)
        await asyncio.sleep(load)
        if fail:
            raise ValueError(fail)
        fake = FakeEngine(**engine)
        if die_after is not None:
            asyncio.get_running_loop().call_later(die_after, fake.die, "the engine process was killed by signal 9")
        return fake

    return run_server(start, ServerSettings(**settings))


if __name__ == "__main__":
    sys.exit(main())
