"""Strict numerics for every test: no silent dtype or rank promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# XLA's GPU compiler takes stack traces that nobody sees; an installed llvm-symbolizer makes that 25 s a program
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def _compile_cache(tmp_path_factory):
    """One compile cache for a test session, so that equal tiny programs compile once."""
    path = os.environ.get("LMJAX_TEST_CACHE") or str(tmp_path_factory.mktemp("jax-cache"))
    os.environ["LMJAX_CACHE"] = path
    yield
