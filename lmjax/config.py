"""Configuration: frozen groups and one ``validate``. Standard library only; the CLI's flags are made from these fields.

A field's metadata holds its help text (``help``), where only some values are allowed, ``choices``, and ``pairs`` where
a dict's flag takes ``name=value``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting is wrong; one line that names the flag, the value and what is allowed."""


FLOATS = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", *FLOATS, "int8", "fp8")
QUANTIZATIONS = ("int8", "fp8", "int4")
RUNNERS = ("auto", "generate", "pooling")
POOLINGS = ("last", "mean", "cls")
LORA_RANKS = (8, 16, 32, 64, 128, 256)
MAX_LORA_NAME = 256  # characters
BACKENDS = ("auto", "xla", "triton", "mosaic")


def _opt(default: Any, help: str, choices: tuple[str, ...] | None = None, pairs: bool = False) -> Any:
    metadata = {"help": help, "choices": choices, "pairs": pairs}
    if isinstance(default, list | dict):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. ``EngineConfig(model="smollm2", max_num_seqs=8)``; ``validate()`` raises ``ConfigError``."""

    # model
    model: str = _opt("smollm2", "Hugging Face directory, hub name, .gguf file, or 'smollm2' (the embedded model)")
    tokenizer: str | None = _opt(None, "directory of the tokenizer, if not the model's")
    revision: str | None = _opt(None, "revision of a hub model: branch, tag or commit")
    download_dir: str | None = _opt(None, "where hub models are kept (default: the hub's own cache)")
    load_format: str = _opt("auto", "how weights are read", ("auto", "safetensors", "gguf", "dummy"))
    dtype: str = _opt("auto", "weights' and activations' type; auto: float32 on a CPU", ("auto", *FLOATS))
    quantization: str | None = _opt(
        None, "quantise the layers' matrices while loading (a quantised checkpoint needs no flag)", QUANTIZATIONS
    )
    quantized_weights: str = _opt(
        "auto",
        "quantised matrices in memory: as they are, or as --dtype again; auto: packed on a GPU, dequantized on a CPU",
        ("auto", "packed", "dequantized"),
    )
    max_model_len: int | None = _opt(None, "longest prompt + reply in tokens (default: the model's own)")
    hf_overrides: dict[str, Any] = _opt({}, "JSON object merged over the model's config.json")
    generation_config: str = _opt(
        "auto", "whose sampling defaults apply: the model's generation_config.json or lmjax's own", ("auto", "lmjax")
    )
    chat_template: str | None = _opt(None, "a jinja file, or the template itself")
    runner: str = _opt(
        "auto",
        "generate answers (and embed), or pooling: embeddings and scores alone; auto: pooling for encoders and for "
        "directories of sentence-transformers",
        RUNNERS,
    )
    pooler_config: dict[str, Any] = _opt(
        {}, "JSON object with pooling_type (LAST, MEAN or CLS), use_activation (false: embeddings keep their length)"
    )
    seed: int = _opt(0, "seed of the dummy weights, and of requests that give none")
    # KV cache
    block_size: int = _opt(16, "tokens per KV block")
    kv_cache_dtype: str = _opt("auto", "type of the KV cache; int8 and fp8: with a scale a token and head", KV_DTYPES)
    gpu_memory_utilization: float = _opt(0.9, "share of a GPU's memory that lmjax may use")
    kv_cache_memory_bytes: int | None = _opt(None, "size of the KV pool in bytes (default: from free memory)")
    num_gpu_blocks_override: int | None = _opt(None, "number of usable KV blocks, instead of measuring")
    enable_prefix_caching: bool = _opt(True, "reuse the KV blocks of equal prompt prefixes")
    swap_space: float = _opt(0.0, "GiB of host memory that KV blocks go to when the pool is full (0: none)")
    # scheduler
    max_num_seqs: int | None = _opt(None, "most requests that run at once (default: 256, on a CPU 64)")
    max_num_batched_tokens: int | None = _opt(None, "token budget of a step (default: 2048, on a CPU 512)")
    enable_chunked_prefill: bool = _opt(True, "prefill long prompts in chunks, mixed with decode")
    long_prefill_token_threshold: int = _opt(0, "most prompt tokens of one request in a step (0: the budget)")
    scheduling_policy: str = _opt("fcfs", "order of waiting requests", ("fcfs", "priority"))
    preemption_mode: str = _opt(
        "auto",
        "a preempted request's KV: swap keeps it (--swap-space), recompute only what stays cached; auto: the cheaper",
        ("auto", "recompute", "swap"),
    )
    async_scheduling: bool = _opt(True, "plan the next step while the device runs the current one")
    max_num_queued_reqs: int | None = _opt(None, "most waiting requests; more get 429")
    max_num_queued_tokens: int | None = _opt(None, "most prompt tokens waiting; more get 429")
    # adapters
    enable_lora: bool = _opt(False, "serve LoRA adapters beside the model, chosen by a request's model name")
    max_loras: int = _opt(8, "adapters on the device at once, and so in one step (--enable-lora)")
    max_lora_rank: int = _opt(16, f"highest rank of an adapter: {', '.join(map(str, LORA_RANKS))} (--enable-lora)")
    max_cpu_loras: int | None = _opt(
        None, "adapters that may be loaded, all of them in host memory (default: --max-loras, at least 32)"
    )
    lora_modules: dict[str, str] = _opt(
        {}, "adapters to load at the start: name=directory, or JSON objects with name and path", pairs=True
    )
    # devices
    tensor_parallel_size: int = _opt(1, "number of devices that each layer is spread over")
    pipeline_parallel_size: int = _opt(1, "number of stages that the layers are cut into, each with its own devices")
    enable_expert_parallel: bool = _opt(False, "spread whole experts over the devices, not a share of each")
    # hosts
    nnodes: int = _opt(1, "number of processes, one a host, that the devices of the model are spread over")
    node_rank: int | None = _opt(None, "which of them this is: 0 has the HTTP server and tells the others what to run")
    master_addr: str | None = _opt(None, "address of the host of rank 0, where it listens for the others")
    master_port: int = _opt(29500, "port on which rank 0 listens for the others")
    # programs
    compilation_cache_dir: str | None = _opt(None, "persistent compile cache (default: under LMJAX_CACHE or ~/.cache)")
    attention_backend: str = _opt(
        "auto", "kernels of attention; auto: Triton on a card of capability 8.0 or above, XLA elsewhere", BACKENDS
    )
    deterministic: bool = _opt(False, "a request's tokens and log-probabilities, to the bit, whatever runs beside it")
    step_timeout: float | None = _opt(
        None,
        "seconds after which an unfinished step is hung and ends the engine; 0: never (default: 60, on GPUs of several "
        "hosts 25, on a CPU 600)",
    )
    bundle: str | None = _opt(None, "directory of executables to start from (made by lmjax compile)")
    require_warm: bool = _opt(False, "refuse to compile anything after the engine is ready")
    max_logprobs: int = _opt(20, "most log-probabilities a request may ask for")
    logprobs_mode: str = _opt(
        "raw_logprobs",
        "log-probabilities of the model's own distribution, or of the one drawn from (after temperature, filters, ...)",
        ("raw_logprobs", "processed_logprobs"),
    )

    @property
    def num_devices(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_cpu_loras(self) -> int:
        """``max_cpu_loras`` or its default."""
        return max(self.max_loras, 32) if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def rank_label(self) -> str:
        """Begins the lines of a rank; empty where there is only one."""
        return f"rank {self.node_rank}: " if self.nnodes > 1 else ""

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)

    def validate(self) -> EngineConfig:
        """Checks what can be checked without the model. Returns self."""
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices and not (value is None and f.default is None):
                raise ConfigError(f"{flag(f.name)}: got {value!r}, must be one of {', '.join(choices)}")
        positive = (
            "block_size max_model_len kv_cache_memory_bytes num_gpu_blocks_override max_num_seqs "
            "max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens tensor_parallel_size "
            "pipeline_parallel_size nnodes max_loras max_cpu_loras"
        )
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{flag(name)}: got {value!r}, must be an integer of at least 1")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"--block-size: got {self.block_size}, must be a power of two up to 256")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization: got {self.gpu_memory_utilization}, must be in (0, 1]")
        space = self.swap_space
        if isinstance(space, bool) or not isinstance(space, int | float) or not 0 <= space < 2**20:
            raise ConfigError(f"--swap-space: got {space!r}, must be a number of GiB, 0 or more")
        if self.preemption_mode == "swap" and not space:
            raise ConfigError("--preemption-mode: swap needs host memory: give --swap-space")
        timeout = self.step_timeout
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
            raise ConfigError(f"--step-timeout: got {timeout!r}, must be a number of seconds, 0 or more")
        if not 0 <= self.max_logprobs <= 1024:
            raise ConfigError(f"--max-logprobs: got {self.max_logprobs}, must be between 0 and 1024")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"--long-prefill-token-threshold: got {self.long_prefill_token_threshold}, must be 0 or more"
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError("--long-prefill-token-threshold needs chunked prefill, which is switched off")
        if self.deterministic and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "--deterministic: got --pipeline-parallel-size "
                f"{self.pipeline_parallel_size}, must be 1: a tick computes steps of several sizes in one program"
            )
        if not self.enable_chunked_prefill and self.pipeline_parallel_size > 1:
            raise ConfigError("--pipeline-parallel-size needs chunked prefill, which is switched off")
        self._validate_pooling()
        self._validate_loras()
        self._validate_hosts()
        return self

    def _validate_pooling(self) -> None:
        allowed = {"pooling_type": POOLINGS, "use_activation": (True, False)}
        for name, value in self.pooler_config.items():
            if name not in allowed:
                raise ConfigError(f"--pooler-config: got the field {name!r}, must be one of {', '.join(allowed)}")
            if name == "pooling_type" and not (isinstance(value, str) and value.lower() in POOLINGS):
                raise ConfigError(f"--pooler-config: pooling_type: got {value!r}, must be LAST, MEAN or CLS")
            if name == "use_activation" and not isinstance(value, bool):
                raise ConfigError(f"--pooler-config: use_activation: got {value!r}, must be true or false")
        if self.runner == "pooling" and self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--runner: got pooling, must be generate with --pipeline-parallel-size {self.pipeline_parallel_size}"
            )

    def _validate_loras(self) -> None:
        if not self.enable_lora:
            for f in fields(self):
                if "lora" in f.name and getattr(self, f.name) != (f.default if f.name != "lora_modules" else {}):
                    raise ConfigError(f"{flag(f.name)}: got {getattr(self, f.name)!r}, but needs --enable-lora")
            return
        for name in ("pipeline_parallel_size", "nnodes"):
            if getattr(self, name) > 1:
                raise ConfigError(f"--enable-lora: got {flag(name)} {getattr(self, name)}, must be 1")
        if self.max_lora_rank not in LORA_RANKS or isinstance(self.max_lora_rank, bool):
            raise ConfigError(
                f"--max-lora-rank: got {self.max_lora_rank!r}, must be one of {', '.join(map(str, LORA_RANKS))}"
            )
        if self.num_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras: got {self.max_cpu_loras}, must be at least --max-loras ({self.max_loras}): every "
                "adapter is in host memory"
            )
        for name, path in self.lora_modules.items():
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_LORA_NAME or not name.isprintable():
                raise ConfigError(
                    f"--lora-modules: got the name {name!r:.300}, must be 1 to {MAX_LORA_NAME} printable characters"
                )
            if not isinstance(path, str) or not path:
                raise ConfigError(f"--lora-modules: {name}: got {path!r}, must be the path of a directory")
        if len(self.lora_modules) > self.num_cpu_loras:
            raise ConfigError(
                f"--lora-modules: got {len(self.lora_modules)} adapters, at most {self.num_cpu_loras} may be loaded "
                "(--max-cpu-loras)"
            )

    def _validate_hosts(self) -> None:
        nnodes, rank = self.nnodes, self.node_rank
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"--master-port: got {self.master_port}, must be between 1 and 65535")
        if nnodes == 1:
            if rank:
                raise ConfigError(f"--node-rank: got {rank}, must be below --nnodes ({nnodes})")
            return
        for name in ("node_rank", "master_addr"):
            if getattr(self, name) is None:
                raise ConfigError(f"{flag(name)}: is missing; --nnodes {nnodes} needs it")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nnodes:
            raise ConfigError(f"--node-rank: got {rank}, must be between 0 and {nnodes - 1} (--nnodes {nnodes})")
        if self.num_devices % nnodes:
            tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
            if tensor > 1 and pipeline > 1:
                got = f"--tensor-parallel-size x --pipeline-parallel-size: got {tensor} x {pipeline}"
            elif pipeline > 1:
                got = f"--pipeline-parallel-size: got {pipeline}"
            else:
                got = f"--tensor-parallel-size: got {tensor}"
            raise ConfigError(f"{got}, must be a multiple of --nnodes ({nnodes}): it counts the devices of all hosts")
        if self.bundle is not None:
            raise ConfigError("--bundle: is for one host; several compile, and keep what they compiled in their caches")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler goes by: an EngineConfig with its defaults resolved. All values are set."""

    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    seed: int = 0


def flag(name: str) -> str:
    """The command line flag of a field: ``max_num_seqs`` -> ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")
