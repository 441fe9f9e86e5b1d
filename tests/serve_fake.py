"""``lmjax`` with an executor of tests/engine/factories.py: python -m tests.serve_fake FACTORY COMMAND FLAG..."""

import sys

from lmjax import cli
from lmjax.engine.async_engine import AsyncEngine
from lmjax.engine.llm import LLM

if __name__ == "__main__":
    executor = f"tests.engine.factories:{sys.argv[1]}"
    AsyncEngine.start.__func__.__kwdefaults__["executor"] = executor
    LLM.__init__.__kwdefaults__["executor"] = executor
    sys.exit(cli.main(sys.argv[2:]))
