"""``LLM``: the engine in this process, for scripts. The caller's thread runs the loop while it waits for answers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmjax.config import ConfigError, EngineConfig, flag
from lmjax.engine.build import DEFAULT_EXECUTOR, build_engine, check_first_rank, load_front
from lmjax.engine.collect import Collector
from lmjax.engine.columns import add_request
from lmjax.engine.controls import LiveControls, interrupts_deferred
from lmjax.engine.embedding import PoolingCalls
from lmjax.engine.lora_calls import LoraCalls, Names
from lmjax.engine.mesh import from_mesh
from lmjax.engine.output import OutputProcessor, RequestState
from lmjax.engine.prompts import Prompt, progress_bar, prompt_list
from lmjax.engine.records import AbortRequest, StepRecord
from lmjax.engine.scoring import ScoreSink, TokenScores, score_requests, token_arrays
from lmjax.engine.validate import Checked, check_priority, check_request
from lmjax.protocol import EngineInfo, EngineStats
from lmjax.text.chat import render_chat
from lmjax.text.export import save_tokenizer
from lmjax.text.objects import NEEDS
from lmjax.types import EngineDeadError, ParameterError, RequestOutput, RequestUpdate, SamplingParams
from lmjax.weights.given import NOTHING, Given, from_memory

log = logging.getLogger("lmjax.engine")

_ASLEEP = "the engine sleeps: call wake_up() first"
_NO_WEIGHTS = "params: the engine's arrays were deleted, or donated to a program: give it others with set_params()"
_STUCK = 0.001  # seconds to wait when no step could be made

Message = dict[str, Any]


class LLM(LiveControls, LoraCalls, PoolingCalls):
    """Loads a model and answers prompts: ``LLM("smollm2", max_num_seqs=8).generate(["Hello"])``.

    The keyword arguments are ``EngineConfig``'s fields. ``progress(line)`` says what is being done at the start.
    Raises ``ConfigError`` for wrong settings, ``ValueError`` for a model that can't be loaded. With ``nnodes`` this is
    rank 0, and the process ends where another rank is lost (``docs/distributed.md``).

    In a JAX program (``docs/models.md``): ``params``, ``config`` instead of ``model``: weights in memory, as
    ``weights.trees.read_tree`` takes them with ``names``, and a config.json's content or a ``PretrainedConfig``.
    ``mesh``: the devices to run on, whose axes ``tensor_parallel_size`` and ``pipeline_parallel_size`` may name
    (``engine.mesh.from_mesh``). ``tokenizer``: also an object; with ``params`` there may be none: then prompts are
    token ids and texts are empty.
    """

    info: EngineInfo
    tokenizer: Any

    def __init__(
        self,
        model: str | None = None,
        *,
        params: Any = None,
        config: Any = None,
        names: Any = None,
        mesh: Any = None,
        tokenizer: Any = None,
        progress: Callable[[str], None] | None = None,
        executor: str = DEFAULT_EXECUTOR,
        **settings: Any,
    ):
        devices: tuple[Any, ...] = ()
        if mesh is not None:
            settings, devices = from_mesh(mesh, settings)
        if isinstance(tokenizer, str | Path):
            settings["tokenizer"], tokenizer = str(tokenizer), None
        self._config = _config("smollm2" if model is None else model, settings)
        check_first_rank(self._config)
        given = _given(self._config, model, params, config, names, devices)
        front = load_front(self._config, given, tokenizer)
        self.tokenizer = front.tokenizer
        self._records: list[StepRecord] = []
        say = progress or (lambda line: log.info("%s", line))
        publish: Any = self._records.append
        self._engine, info = build_engine(self._config, say, executor, publish, given)
        self.info = front.complete(info)
        self._outputs = OutputProcessor(self.tokenizer, self.info.eos_token_ids)
        self._context = self._engine.executor.context
        self._lock = threading.RLock()
        self._dead: str | None = None
        self._put_to_sleep_by = 0
        self._calls = deque()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors set (generation_config.json), unless ``generation_config="lmjax"``."""
        return SamplingParams(**self.info.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        lora: Names = None,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts (texts or lists of token ids; one or a list of them).

        ``priority``: lower runs first, with ``scheduling_policy="priority"``; one for all or one a prompt. ``lora``:
        the adapter to answer with (see ``load_lora``), None for the model itself; one for all or one a prompt.
        Raises ``ParameterError`` before anything runs if one of them can't. Ctrl-C aborts them all; the LLM can be
        used on.
        """
        listed = prompt_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        params = sampling_params or self.get_default_sampling_params()
        return self._generate(texts, [self._encode(prompt) for prompt in listed], params, use_tqdm, priority, lora)

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora: Names = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As ``generate``, but each answer comes as soon as it is whole, with the index of its prompt.

        Nothing runs before the first answer is asked for. Closing the iterator aborts what is left.
        """
        listed = prompt_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        params = sampling_params or self.get_default_sampling_params()
        checked, priorities, collectors = self._check(texts, [self._encode(p) for p in listed], params, priority)
        loras = self._lora_names(lora, len(checked))

        open_ones = dict(enumerate(collectors))  # what is finished is the caller's alone

        def answers() -> Generator[tuple[int, RequestOutput], None, None]:
            with contextlib.closing(self._run(checked, priorities, loras)) as updates:
                for index, update in updates:
                    open_ones[index].add(update)
                    if update.finished:
                        yield index, open_ones.pop(index).output()

        return answers()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        lora: Names = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The replies to one conversation or a list of them, in order.

        Without ``sampling_params`` a reply may take the rest of the context.
        """
        self._check_text()
        if not messages:
            raise ParameterError("messages", "is empty, must have at least one message")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        texts = [
            render_chat(
                self.tokenizer,
                list(conversation),  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        default = dataclasses.replace(self.get_default_sampling_params(), max_tokens=None)
        return self._generate(texts, encoded, sampling_params or default, use_tqdm, priority, lora)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt of a conversation; ``options`` as of ``lmjax.text.chat.render_chat``."""
        self._check_text()
        text = render_chat(self.tokenizer, list(messages), **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _check_text(self) -> None:
        if not self.tokenizer.vocab_size:
            raise ParameterError("messages", f"are text, but {NEEDS}")

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> Iterator[RequestUpdate]:
        """The updates of one request as they come. Closing the iterator aborts it."""
        params = sampling_params or self.get_default_sampling_params()
        checked = check_request(self._encode(prompt), params, self.info, self.tokenizer)
        return (update for _, update in self._run([checked], [0], self._lora_names(lora, 1)))

    def logprobs(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        top_k: int = 0,
        entropy: bool = False,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        use_tqdm: bool = False,
        lora: Names = None,
    ) -> TokenScores | list[TokenScores]:
        """Log-probabilities of one sequence's tokens, or of many: each given those before it, from the second on.

        token_ids: lists or integer arrays, of up to the context length. top_k: also the so many most likely tokens at
        each position. sampling_params: whose temperature, top_k, top_p and min_p apply, with
        ``logprobs_mode="processed_logprobs"`` only (default: temperature 1, no filters). lora: the adapter to compute
        with, one for all or one a sequence. Computed by the serving
        programs, batched and in chunks. Raises ``ParameterError`` before anything runs.
        """
        sequences, one = token_arrays(token_ids)
        check_priority(priority, self._config.scheduling_policy)
        asked = score_requests(sequences, top_k, entropy, sampling_params, self.info)
        names = self._lora_names(lora, len(sequences))
        loras = [name for name, checked in zip(names, asked, strict=True) if checked is not None]
        wanted = [checked for checked in asked if checked is not None]
        with (
            progress_bar(len(wanted), use_tqdm) as bar,
            contextlib.closing(self._run(wanted, [priority] * len(wanted), loras)) as updates,
        ):
            for _, update in updates:
                bar(update)
        sinks = [
            ScoreSink(ids, top_k, entropy) if c is None else c.sink for ids, c in zip(sequences, asked, strict=True)
        ]
        found = [sink.scores() for sink in sinks]
        return found[0] if one else found

    def save_pretrained(self, directory: str | Path, max_shard_size: int = 5 * 10**9) -> None:
        """The model as a Hugging Face directory: weights in the engine's dtype, in safetensors files of at most
        ``max_shard_size`` bytes, config.json, and where they are known generation_config.json and the tokenizer's.

        Raises ``ValueError`` where the directory holds other weights.
        """
        from lmjax.weights.export import save_pretrained

        if self._dead is not None:
            raise EngineDeadError(self._dead)
        executor: Any = self._engine.executor
        if not executor.info.kv_specs:
            raise ParameterError("model", "is an encoder: only weights of decoders are written")
        if not executor.has_params:
            raise RuntimeError("the weights were freed (sleep level 2): call wake_up() first")
        with self._lock:
            params, model = executor.params, executor.model_info
            save_pretrained(params, model.config, directory, model.generation_config, max_shard_size)
        save_tokenizer(self.tokenizer, Path(directory))

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Frees the executor's memory. Idempotent."""
        if self._dead is None:
            self._dead = "the engine is closed"
            self._engine.executor.close()

    # --- the loop ---------------------------------------------------------------------------------------------

    def _generate(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool,
        priority: int | Sequence[int],
        lora: Names,
    ) -> list[RequestOutput]:
        checked, priorities, collectors = self._check(texts, prompts, sampling_params, priority)
        loras = self._lora_names(lora, len(checked))
        with (
            progress_bar(len(prompts), use_tqdm) as bar,
            contextlib.closing(self._run(checked, priorities, loras)) as updates,
        ):
            for index, update in updates:
                collectors[index].add(update)
                bar(update)
        return [collector.output() for collector in collectors]

    def _check(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        priority: int | Sequence[int],
    ) -> tuple[list[Checked], list[int], list[Collector]]:
        params = _list_of("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = _list_of("priority", priority, int, len(prompts))
        for value in priorities:
            check_priority(value, self._config.scheduling_policy)
        checked = [check_request(ids, p, self.info, self.tokenizer) for ids, p in zip(prompts, params, strict=True)]
        collectors = [
            Collector(self.tokenizer, text, c.prompt, c.params) for text, c in zip(texts, checked, strict=True)
        ]
        return checked, priorities, collectors

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, dict) or not isinstance(prompt, Iterable):
            raise ParameterError("prompt", f"got {prompt!r}, must be a text or a list of token ids")
        return list(prompt)

    def _run(
        self, checked: Sequence[Checked], priorities: Sequence[int], loras: Sequence[str | None]
    ) -> Generator[tuple[int, RequestUpdate], None, None]:
        """Updates with the index of their request. Other runs may go on at the same time: each steps for all."""
        ready: list[RequestState] = []
        requests: dict[int, tuple[int, RequestState]] = {}
        try:
            for index, (request, priority, lora) in enumerate(zip(checked, priorities, loras, strict=True)):
                state = self._add(request, priority, lora, ready)
                requests[state.handle] = (index, state)
            while requests:
                if not ready:
                    self._check_awake()
                    self._turn()
                while ready:
                    state = ready.pop()
                    update = state.take()
                    if update is None or state.handle not in requests:
                        continue
                    if state.error is not None:
                        raise state.error
                    if update.error is not None:
                        raise RuntimeError(update.error)
                    index = requests[state.handle][0]
                    if update.finished:
                        del requests[state.handle]
                    yield index, update
        finally:
            self._abort([state for _, state in requests.values()])

    def _add(self, checked: Checked, priority: int, lora: str | None, ready: list[RequestState]) -> RequestState:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self.is_sleeping:
            raise RuntimeError(_ASLEEP)  # else this thread might wait for ever
        now = time.monotonic()
        with interrupts_deferred(), self._lock:
            state = self._outputs.open(uuid.uuid4().hex, checked.prompt, checked.params, now, checked.sink)
            state.waiter = ready
            self._engine.handle(add_request(state.handle, checked, now, priority, lora=lora))
            if state.pending is not None:
                ready.append(state)
        return state

    def _turn(self) -> None:
        """One step for everybody. An interrupt in the middle of it would leave the scheduler and the device apart."""
        with interrupts_deferred(), self._lock:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            self._run_calls()
            if self._has_lost_params():
                raise RuntimeError(_NO_WEIGHTS)
            try:
                if not self._step():
                    time.sleep(_STUCK)
            except Exception as error:
                self._fail(error)
                raise
            records, self._records[:] = list(self._records), []
            for record in records:
                touched, aborts = self._outputs.process(record)
                for state in touched:
                    state.waiter.append(state)
                if aborts:
                    self._engine.handle(AbortRequest(aborts))

    def _step(self) -> bool:
        with self._context():
            return self._engine.step()

    def _check_awake(self) -> None:
        """Another thread may wake the engine, this one cannot while it waits."""
        if self.is_sleeping and self._put_to_sleep_by == threading.get_ident():
            raise RuntimeError(f"{_ASLEEP}; answers were still to come when this thread put it to sleep")

    def _has_lost_params(self) -> bool:
        return self._engine.executor.has_lost_params()

    def _fail(self, error: Exception) -> None:
        self._dead = f"the engine's loop failed: {type(error).__name__}: {error}"
        self._outputs.fail_all(self._dead)

    def _abort(self, states: list[RequestState]) -> None:
        if not states or self._dead is not None:
            return
        with interrupts_deferred(), self._lock:
            handles = [handle for state in states for handle in self._outputs.close(state)]
            self._engine.handle(AbortRequest(handles))
        for _ in range(2):  # what is in flight comes back, then its blocks are free
            if self._engine.busy and not self._has_lost_params():
                self._turn()


def _given(
    config: EngineConfig, model: str | None, params: Any, model_config: Any, names: Any, devices: tuple[Any, ...]
) -> Given:
    if params is None:
        for name, value in (("config", model_config), ("names", names)):
            if value is not None:
                raise ConfigError(f"{name}: is given without params, whose it would be")
        return Given(devices=devices) if devices else NOTHING
    if model is not None:
        raise ConfigError(f"model: got {model!r} beside params: give one of them")
    return dataclasses.replace(from_memory(params, model_config, names, config), devices=devices)


def _config(model: str, settings: dict[str, Any]) -> EngineConfig:
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name}: unknown setting; known are {', '.join(sorted(known))}")
    config = EngineConfig(model=model, **settings).validate()
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{flag(name)} turns away a server's clients; an LLM queues all that it is given")
    return config


def _list_of(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """One value for all, or a sequence with one each."""
    if isinstance(value, kind):
        return [value] * count
    if len(value) != count:
        raise ParameterError(name, f"got {len(value)} of them for {count} prompts, must be one or as many")
    return list(value)
