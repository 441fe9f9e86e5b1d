"""python -m tests.docs.run_python REPORT PAGE:LINE ...: runs Python blocks, each in a namespace of its own, those of
a page in a folder of their own below the current one.

A line of JSON a block goes to REPORT: {"block", "error", "seconds", "cpu"}. Tracebacks have the page's own lines.
"""

from __future__ import annotations

import gc
import json
import os
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
    here = Path.cwd()
    for name in names:
        folder = here / Path(known[name].page).stem
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        begin, cpu = time.monotonic(), time.process_time()
        error = run(known[name])
        gc.collect()  # an engine that the block has left open
        spent = {"seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu}
        entry = {"block": name, "error": error} | {key: round(value, 2) for key, value in spent.items()}
        with Path(report).open("a") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
