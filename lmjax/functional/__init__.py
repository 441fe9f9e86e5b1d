"""Pure functions over ``params`` in the engine's layout, for use inside other JAX programs (docs/functional.md)."""

from lmjax.functional.cache import Cache, make_cache
from lmjax.functional.generation import Generated, decode, generate, prefill
from lmjax.functional.sampling import Sampled, row_seeds, sample, seeds
from lmjax.functional.scoring import Scores, logprobs, scores
from lmjax.models.params import DecoderParams, abstract_params, init_params
from lmjax.models.registry import spec_from_hf
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env

__all__ = [
    "Cache",
    "DecoderParams",
    "DecoderSpec",
    "Env",
    "Generated",
    "Sampled",
    "Scores",
    "abstract_params",
    "decode",
    "generate",
    "init_params",
    "logprobs",
    "make_cache",
    "prefill",
    "row_seeds",
    "sample",
    "scores",
    "seeds",
    "spec_from_hf",
]
