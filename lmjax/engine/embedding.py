"""``LLM.embed`` and ``LLM.score``."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from lmjax.config import EngineConfig
from lmjax.engine.lora_calls import Names
from lmjax.engine.pooling import check_pooling, encode_input, pooling_of
from lmjax.engine.prompts import Prompt, progress_bar, prompt_list
from lmjax.engine.validate import Checked, check_priority
from lmjax.protocol import EngineInfo
from lmjax.types import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ParameterError,
    PoolingParams,
    RequestUpdate,
    ScoringOutput,
    ScoringRequestOutput,
)


class PoolingCalls:
    """Of ``LLM``."""

    info: EngineInfo
    tokenizer: Any
    _config: EngineConfig
    _run: Callable[..., Generator[tuple[int, RequestUpdate], None, None]]
    _lora_names: Callable[[Names, int], list[str | None]]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: int = 0,
        lora: Names = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings, in the order of the prompts (texts or lists of token ids; one or a list of them).

        Hidden states are pooled as the model's files say, or ``pooler_config``. ``truncate_prompt_tokens``: as the
        field of ``pooling_params``. ``lora``: the adapter to compute with (see ``load_lora``), one for all or one a
        prompt. Raises ``ParameterError`` before anything runs if one of them can't.
        """
        params = _params(pooling_params, truncate_prompt_tokens)
        if pooling_of(self.info).task != "embed":
            raise ParameterError("model", f"{self.info.model} is a cross-encoder: it scores pairs and embeds nothing")
        encoded = [encode_input(self.tokenizer, prompt, params, self.info)[0] for prompt in prompt_list(prompts)]
        found = self._pool([check_pooling(ids, params, self.info) for ids in encoded], use_tqdm, priority, lora)
        return [
            EmbeddingRequestOutput(uuid.uuid4().hex, EmbeddingOutput(values), ids, cached)
            for ids, (values, cached) in zip(encoded, found, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: int = 0,
        lora: Names = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of ``data_2`` fits that of ``data_1``: one text for all of them, or as many. ``lora``: the
        adapter to compute with, one for all or one a pair.

        A cross-encoder reads both together; of any other model it is the cosine of their embeddings.
        """
        params = _params(pooling_params, truncate_prompt_tokens)
        pairs = pairs_of(data_1, data_2)
        if pooling_of(self.info).task == "score":
            self._lora_names(lora, len(pairs))  # cross-encoders have none
            return self._score_pairs(pairs, params, use_tqdm, priority)
        names = self._lora_names(lora, len(pairs))
        texts = list(dict.fromkeys((text, name) for pair, name in zip(pairs, names, strict=True) for text in pair))
        outputs = self.embed(
            [text for text, _ in texts], params, use_tqdm=use_tqdm, priority=priority, lora=[name for _, name in texts]
        )
        found = dict(zip(texts, outputs, strict=True))
        return [
            self._cosine(found[first, name], found[second, name])
            for (first, second), name in zip(pairs, names, strict=True)
        ]

    def _score_pairs(
        self, pairs: list[tuple[str, str]], params: PoolingParams, use_tqdm: bool, priority: int
    ) -> list[ScoringRequestOutput]:
        encoded = [encode_input(self.tokenizer, first, params, self.info, second) for first, second in pairs]
        checked = [check_pooling(ids, params, self.info, split) for ids, split in encoded]
        return [
            ScoringRequestOutput(uuid.uuid4().hex, ScoringOutput(float(values[0])), ids, cached)
            for (ids, _), (values, cached) in zip(encoded, self._pool(checked, use_tqdm, priority, None), strict=True)
        ]

    def _cosine(self, first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
        a, b = (output.outputs.embedding.astype(np.float64) for output in (first, second))
        score = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
        ids = first.prompt_token_ids + second.prompt_token_ids
        cached = first.num_cached_tokens + second.num_cached_tokens
        return ScoringRequestOutput(uuid.uuid4().hex, ScoringOutput(score), ids, cached)

    def _pool(self, checked: list[Checked], use_tqdm: bool, priority: int, lora: Names) -> list[tuple[np.ndarray, int]]:
        """Values and cached tokens of each."""
        check_priority(priority, self._config.scheduling_policy)
        cached, names = [0] * len(checked), self._lora_names(lora, len(checked))
        with (
            progress_bar(len(checked), use_tqdm) as bar,
            contextlib.closing(self._run(checked, [priority] * len(checked), names)) as updates,
        ):
            for index, update in updates:
                cached[index] = update.num_cached_tokens
                bar(update)
        return [(c.sink.values(), n) for c, n in zip(checked, cached, strict=True)]


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    for name, texts in (("data_1", first), ("data_2", second)):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ParameterError(name, "must be a text or a list of texts, at least one")
    if len(first) not in (1, len(second)):
        raise ParameterError("data_1", f"got {len(first)} texts for {len(second)}, must be one or as many")
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _params(given: PoolingParams | None, truncate: int | None) -> PoolingParams:
    params = given or PoolingParams()
    if truncate is None:
        return params
    return PoolingParams(
        dimensions=params.dimensions, use_activation=params.use_activation, truncate_prompt_tokens=truncate
    )
