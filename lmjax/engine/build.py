"""From a config to the parts of an engine: what the front end needs (text), and the loop with its executor."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmjax.config import ConfigError, EngineConfig, SchedulerConfig
from lmjax.protocol import EngineInfo, PoolingInfo
from lmjax.text.objects import tokenizer_from
from lmjax.text.tokenizer import Tokenizer, load_tokenizer
from lmjax.types import AdapterError, ModelError
from lmjax.weights.generation import eos_token_ids, sampling_defaults
from lmjax.weights.given import NOTHING, Given
from lmjax.weights.pooling import Pooling, read_pooling
from lmjax.weights.source import resolve_model

if TYPE_CHECKING:
    from lmjax.core.plan import ExecutorInfo
    from lmjax.engine.engine import Engine
    from lmjax.engine.records import ControlReply, StepRecord

DEFAULT_EXECUTOR = "lmjax.runtime.executor:build_executor"


class Front(NamedTuple):
    """What the front end knows of a model from its small files."""

    model: str
    model_type: str
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    pooling: Pooling

    def complete(self, info: EngineInfo) -> EngineInfo:
        """``info`` of the engine's side with what only this side knows."""
        return dataclasses.replace(
            info,
            model=self.model,
            model_type=self.model_type,
            eos_token_ids=tuple(token for token in self.eos_token_ids if token < info.vocab_size),
            default_sampling=self.default_sampling,
            pooling=self._pooling(info.pooling),
        )

    def _pooling(self, info: PoolingInfo | None) -> PoolingInfo | None:
        """The engine's side knows the width, and whether it is a cross-encoder."""
        if info is None or info.task == "score":
            return info and dataclasses.replace(info, lower=self.pooling.lower)
        own = self.pooling
        return PoolingInfo("embed", own.kind, own.normalize, info.width, own.dimensions, own.lower)


def check_first_rank(config: EngineConfig) -> None:
    """Requests go to rank 0; the others have no front end. Raises ``ConfigError``."""
    if config.node_rank:
        raise ConfigError(
            f"--node-rank: got {config.node_rank}, must be 0 here; start the other ranks with lmjax serve --node-rank"
        )


def load_front(config: EngineConfig, given: Given = NOTHING, tokenizer: Any = None) -> Front:
    """Finds (or fetches) the model and loads its tokenizer. Raises ``ValueError``, one line, if either fails.

    tokenizer: an object in its place (``text.objects``). Weights in memory come with none: then there is no text.
    """
    source = given.source or resolve_model(config.model, config.revision, config.download_dir, config.hf_overrides)
    if tokenizer is not None or (given.source and config.tokenizer is None):
        tokenizer = tokenizer_from(tokenizer, config.chat_template)
    else:
        tokenizer = load_tokenizer(config.tokenizer or source.path, chat_template=config.chat_template)
    check_vocabulary(tokenizer, source.config.get("vocab_size"), source.config_file)
    ends = list(eos_token_ids(source.config, source.generation_config, source.path))
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    auto = config.generation_config == "auto"
    defaults = sampling_defaults(source.generation_config, source.path) if auto else {}
    model_type = str(source.config.get("model_type", "unknown"))
    model = str(source.path) if given.source else config.model
    return Front(model, model_type, tokenizer, tuple(dict.fromkeys(ends)), defaults, read_pooling(source, config))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: Any, file: Path) -> None:
    """Raises ``ModelError`` where texts would become ids that the embedding has no row for: the tokenizer is another
    model's. Tokens that were added to it may be beyond (Gemma 3 has one for images): a request with them is refused."""
    if type(vocab_size) is not int:  # the spec will say so
        return
    ids = tokenizer.text_vocab_size
    if ids > vocab_size:
        raise ModelError(
            f"{file}: vocab_size is {vocab_size}, too small for the {ids} tokens of the tokenizer in "
            f"{tokenizer.settings.source}: they are of different models"
        )


def build_engine(
    config: EngineConfig,
    progress: Callable[[str], None],
    executor: str,
    publish: Callable[[StepRecord | ControlReply], None],
    given: Given = NOTHING,
) -> tuple[Engine, EngineInfo]:
    """Loads the model and compiles its programs. ``executor``: "module:function" that makes the executor; ``given``:
    weights and devices of the caller.

    Raises ``ValueError`` (``ConfigError`` among them) when the settings or the model's files are at fault.
    """
    from lmjax.core.scheduler import Scheduler
    from lmjax.core.whole import WholeScheduler
    from lmjax.engine.engine import Engine

    module, _, function = executor.partition(":")
    more = {} if given is NOTHING else {"given": given}
    device = getattr(importlib.import_module(module), function)(config, progress, **more)
    kind = Scheduler if device.info.kv_specs else WholeScheduler  # an encoder keeps nothing between steps
    scheduler: Any = kind(_scheduler_config(config, device.info), device.info)
    engine = Engine(
        scheduler,
        device,
        publish,
        overlap=config.async_scheduling,
        most_loras=config.num_cpu_loras,
    )
    _load_adapters(engine, config, progress)
    return engine, _engine_info(device)


def _load_adapters(engine: Engine, config: EngineConfig, progress: Callable[[str], None]) -> None:
    """Those of the settings. Raises ``ConfigError``."""
    for name, path in config.lora_modules.items():
        progress(f"loading the adapter {name}")
        try:
            engine.loras.add(name, path, engine.executor.read_adapter(path))
        except AdapterError as error:
            raise ConfigError(f"--lora-modules: {name}: {error}") from error


def _scheduler_config(config: EngineConfig, info: ExecutorInfo) -> SchedulerConfig:
    """The executor has resolved the budget: it is its largest bucket."""
    same = {f.name for f in dataclasses.fields(SchedulerConfig)} - {"max_num_batched_tokens"}
    values = {name: getattr(config, name) for name in same}
    return SchedulerConfig(max_num_batched_tokens=info.token_buckets[-1], **values)


def _engine_info(device: Any) -> EngineInfo:
    info: ExecutorInfo = device.info
    facts = device.model_info
    return EngineInfo(
        model="",
        model_type="",
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_logprobs=info.max_logprobs,
        block_size=info.block_size,
        num_kv_blocks=min(info.num_blocks, default=1) - 1,
        max_num_seqs=info.max_num_seqs,
        dtype=facts.dtype,
        platform=facts.platform,
        device_count=facts.device_count,
        logprobs_mode=info.logprobs_mode,
        generates=info.generates,
        pooling=_pooling_info(info),
        max_loras=info.max_loras,
    )


def _pooling_info(info: ExecutorInfo) -> PoolingInfo | None:
    if not info.pooled_width:
        return None
    if info.scores:
        return PoolingInfo("score", "cls", info.sigmoid, info.pooled_width)
    return PoolingInfo("embed", "last", True, info.pooled_width)
