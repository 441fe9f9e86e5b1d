"""One ``lmjax serve`` at a time, shared by the tests that want the same set-up."""

from collections.abc import Iterator

import pytest

from tests.server.live_server import Servers


@pytest.fixture(scope="session")
def servers(_compile_cache: None) -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()
