import pytest

from lmjax.text.tokenizer import Tokenizer, load_tokenizer
from tests.fixtures import model_dir
from tests.text import toy_tokenizers


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> dict[str, Tokenizer]:
    """A tokenizer of each decoder family."""
    root = tmp_path_factory.mktemp("toys")
    return {kind: load_tokenizer(toy_tokenizers.write(root / kind, kind)) for kind in toy_tokenizers.KINDS}


@pytest.fixture(scope="session")
def alpha() -> Tokenizer:
    return load_tokenizer(model_dir("ALPHA"))
