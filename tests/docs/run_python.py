"""python run_python.py REPORT PAGE:LINE ...: runs Python blocks, each in a namespace of its own.

A line of JSON a block goes to REPORT: {"block", "error", "seconds"}. Tracebacks have the page's own lines.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path

from tests.docs.blocks import ALL, ROOT, Block


def run(block: Block) -> str | None:
    """The error, if there is one."""
    source = "\n" * (block.line - 1) + block.text
    try:
        exec(compile(source, str(ROOT / block.page), "exec"), {"__name__": "__main__"})
    except (Exception, SystemExit):
        return traceback.format_exc()
    return None


def main(report: str, names: list[str]) -> None:
    known = {str(block): block for block in ALL}
    for name in names:
        begin, cpu = time.monotonic(), time.process_time()
        error = run(known[name])
        gc.collect()  # an engine that the block has left open
        entry = {"block": name, "error": error, "seconds": round(time.monotonic() - begin, 2), "cpu": round(time.process_time() - cpu, 2)}
        with Path(report).open("a") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
