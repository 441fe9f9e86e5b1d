"""Log-probabilities of given tokens: requests whose answer nobody wants, and what the engine sends for their prompts.

Everything stays numpy: the token rows of a step are copied into one array a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from lmjax.core.output import PromptRows
from lmjax.core.plan import row_width, unpack_rows
from lmjax.engine.validate import Checked, check_filters, check_prompt
from lmjax.protocol import EngineInfo
from lmjax.types import ParameterError, SamplingParams


@dataclass(slots=True, frozen=True, eq=False)
class TokenScores:
    """Of the tokens 1 .. n - 1 of one sequence of n, each given those before it. Logarithms are natural ones."""

    logprobs: np.ndarray  # float32 [n - 1]
    ranks: np.ndarray  # int32 [n - 1], from 1
    top_ids: np.ndarray  # int32 [n - 1, k], the most likely tokens, best first
    top_logprobs: np.ndarray  # float32 [n - 1, k]
    entropies: np.ndarray | None = None  # float32 [n - 1], of the distributions; None: not asked for


class ScoreSink:
    """Where a request's rows are put as they come: in any order, and again after a preemption."""

    def __init__(self, token_ids: np.ndarray, top_k: int, entropy: bool):
        count = len(token_ids) - 1
        self.entropy = entropy
        self.after = int(token_ids[-1])  # the last token is no part of the prompt, so a whole context can be scored
        self._rows = np.zeros((count, row_width(top_k)), np.int32)
        self._entropies = np.full(count, np.nan, np.float32)

    def add(self, found: PromptRows) -> None:
        rows = np.frombuffer(found.rows, "<i4").reshape(-1, found.width)
        first, end = found.first - 1, found.first - 1 + len(rows)
        self._rows[first:end] = rows
        if self.entropy:
            self._entropies[first:end] = np.frombuffer(found.entropies, "<f4")

    def scores(self) -> TokenScores:
        columns = unpack_rows(self._rows)
        copy = np.ascontiguousarray
        return TokenScores(
            copy(columns.logprobs),
            copy(columns.ranks),
            copy(columns.top_ids),
            copy(columns.top_logprobs),
            self._entropies if self.entropy else None,
        )


def score_requests(
    sequences: Sequence[np.ndarray], top_k: int, entropy: bool, params: SamplingParams | None, info: EngineInfo
) -> list[Checked | None]:
    """A request for each sequence; None for one of a single token, which has nothing to score.

    Raises ``ParameterError``.
    """
    if not isinstance(entropy, bool):
        raise ParameterError("entropy", f"got {entropy!r}, must be True or False")
    if not isinstance(top_k, Integral) or isinstance(top_k, bool) or not 0 <= top_k <= info.max_logprobs:
        raise ParameterError(
            "top_k", f"got {top_k!r}, must be an integer from 0 to {info.max_logprobs} (--max-logprobs)"
        )
    how, top_k = _how_to_score(params, info), int(top_k)
    return [_request(ids, top_k, entropy, how, info) for ids in sequences]


def _how_to_score(params: SamplingParams | None, info: EngineInfo) -> dict[str, Any]:
    if params is None:
        return {"temperature": 1.0}
    if not isinstance(params, SamplingParams):
        raise ParameterError("sampling_params", f"got a {type(params).__name__}, must be SamplingParams")
    if info.logprobs_mode == "raw_logprobs":
        raise ParameterError(
            "sampling_params", "--logprobs-mode is raw_logprobs: they know no temperature and no filters"
        )
    check_filters("sampling_params", params)
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def _request(ids: np.ndarray, top_k: int, entropy: bool, how: dict[str, Any], info: EngineInfo) -> Checked | None:
    check_prompt(ids, info, "token_ids")
    limit = min(info.max_model_len, info.num_kv_blocks * info.block_size + 1)
    if len(ids) > limit:
        raise ParameterError(
            "token_ids", f"has {len(ids)} tokens, must be at most {limit} (context length, and what the KV cache holds)"
        )
    if len(ids) == 1:
        return None
    # one token has to be drawn: it ends the request
    params = SamplingParams(max_tokens=1, prompt_logprobs=top_k, ignore_eos=True, **how)
    ids = np.ascontiguousarray(ids, "<i4")
    prompt: Any = ids[:-1]  # of many sequences no lists are made
    return Checked(prompt, params, (), None, ScoreSink(ids, top_k, entropy))


def token_arrays(token_ids: Any) -> tuple[list[np.ndarray], bool]:
    """The sequences, and whether it was a single one. Raises ``ParameterError``."""
    if isinstance(token_ids, str) or not hasattr(token_ids, "__len__"):
        raise ParameterError("token_ids", f"got {token_ids!r}, must be token ids or a list of sequences of them")
    if len(token_ids) == 0:
        return [], False
    one = np.ndim(token_ids[0]) == 0
    return [_array(ids) for ids in ([token_ids] if one else token_ids)], one


def _array(ids: Any) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError, TypeError):
        array = np.zeros(())
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ParameterError("token_ids", "must be token ids (integers) or a list of sequences of them")
    return array
