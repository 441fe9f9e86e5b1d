"""``lmjax verify`` in the terminal: how far what is served is from float32, layer by layer."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmjax.config import ConfigError, EngineConfig
from lmjax.types import ModelError

if TYPE_CHECKING:
    import jax

    from lmjax.runtime.layer_errors import Errors, Side
    from lmjax.runtime.resolve import Resolved
    from lmjax.weights.source import ModelSource

PROMPT = (
    "The ship left the harbour before dawn with 47 barrels of salt and 3 passengers; nobody on the quay could say "
    "where it was bound. def area(width, height): return width * height  # never negative. "
    "What is the capital of France?"
)
# the largest relative RMS of any row, about twice what rounding alone makes of SmolLM2-135M
BOUNDS = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
DECODED = 4  # tokens at the end of the prompt that come one by one, as generated ones do


@dataclass(frozen=True)
class Asked:
    """``token_ids``: instead of ``prompt``. ``reference``: another checkpoint to compare with, of the same shape."""

    prompt: str | None = None
    token_ids: str | None = None
    max_error: float | None = None
    reference: str | None = None
    json: bool = False


def verify(config: EngineConfig, asked: Asked) -> int:
    """Prints the table. Exit code: 0 within the bound, 1 beyond it."""
    if asked.max_error is not None and not asked.max_error >= 0:
        raise ConfigError(f"--max-error: got {asked.max_error}, must be at least 0")
    if asked.prompt is not None and asked.token_ids is not None:
        raise ConfigError("--prompt and --prompt-token-ids: give one of them")
    from lmjax.runtime.layer_errors import measure

    resolved, source = _resolve(config, asked)
    ids = _token_ids(config, asked, resolved)
    served, reference = _sides(resolved, source, len(ids))
    import jax

    with jax.default_matmul_precision("highest"):  # for what is float32; served types of half the size have but one
        errors = measure(served, reference, ids)
    bound = BOUNDS[resolved.dtype] if asked.max_error is None else asked.max_error
    beyond = [row for row in errors.rows if not row.relative_rms <= bound]  # NaN is beyond
    facts = {
        "model": config.model,
        "reference": asked.reference or config.model,
        "dtype": resolved.dtype,
        "kv_cache_dtype": served.kv_dtype,
        "platform": resolved.platform,
        "attention_backend": str(resolved.env.attention),
        "num_tokens": errors.num_tokens,
        "top1_agreement": errors.agreeing / errors.num_tokens,
        "max_error": bound,
        "within": not beyond,
    }
    sys.stdout.write(_to_json(facts, errors) if asked.json else _to_text(facts, errors))
    if beyond:
        print(
            f"lmjax verify: {beyond[0].name} is the first beyond --max-error {bound:g}: relative RMS "
            f"{beyond[0].relative_rms:.3g} ({len(beyond)} of {len(errors.rows)} rows are)",
            file=sys.stderr,
        )
    return 1 if beyond else 0


def _resolve(config: EngineConfig, asked: Asked) -> tuple[Resolved, ModelSource]:
    """What is served, and where the reference is."""
    from lmjax.nn.env import Env
    from lmjax.runtime.live import check_same
    from lmjax.runtime.platform import configure_jax, describe_platform, use_compilation_cache
    from lmjax.runtime.resolve import make_spec, resolve
    from lmjax.weights.packing import plain as unpacked
    from lmjax.weights.source import resolve_model

    configure_jax(config)
    use_compilation_cache(config)
    import jax

    from pallas_kernels.platform import device_target

    overrides = config.hf_overrides or None
    source = resolve_model(config.model, config.revision, config.download_dir, overrides)
    platform, _ = describe_platform()
    attention: Any = config.attention_backend
    resolved = resolve(config, source, platform, Env(device_target(jax.local_devices()[0]), attention))
    if asked.reference is None:
        return resolved, source
    other = resolve_model(asked.reference, None, config.download_dir, overrides)
    check_same(unpacked(resolved.spec), make_spec(other, config.max_model_len), asked.reference)
    return resolved, other


def _token_ids(config: EngineConfig, asked: Asked, resolved: Resolved) -> list[int]:
    flag = "--prompt" if asked.token_ids is None else "--prompt-token-ids"
    if asked.token_ids is not None:
        try:
            ids = [int(text) for text in asked.token_ids.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(f"{flag}: got {asked.token_ids!r}, must be integers") from None
    else:
        from lmjax.text.tokenizer import load_tokenizer

        text = PROMPT if asked.prompt is None else asked.prompt
        ids = load_tokenizer(config.tokenizer or resolved.source.path).encode(text)
        if asked.prompt is None:
            ids = ids[: resolved.spec.max_len]
    most = min(resolved.spec.max_len, resolved.num_batched)
    if not 1 <= len(ids) <= most:
        raise ConfigError(f"{flag}: has {len(ids)} tokens, must have 1 to {most}")
    vocab = resolved.spec.vocab
    if wrong := [i for i in ids if not 0 <= i < vocab]:
        message = f"has the token id {wrong[0]}, must be at least 0 and below {vocab}"
        if asked.token_ids is not None:
            raise ConfigError(f"{flag}: {message}")
        raise ModelError(f"{resolved.source.path}: the prompt {message}: the tokenizer is another model's")
    return ids


def _sides(resolved: Resolved, source: ModelSource, count: int) -> tuple[Side, Side]:
    """Served: by the engine's own loading, in two chunks and single tokens, on its device. Reference: float32, in one
    step, by the XLA forms on the CPU."""
    import jax

    from lmjax.nn.env import ALONE
    from lmjax.runtime.layer_errors import Side
    from lmjax.runtime.live import read_weights
    from lmjax.runtime.progress import loading_bar
    from lmjax.weights.packing import plain as unpacked

    config, spec = resolved.config, resolved.spec
    with loading_bar() as listen:
        params = read_weights(resolved, resolved.source, config.load_format, listen)
    served = Side(
        params=params,
        spec=spec,
        env=resolved.env,
        device=jax.local_devices()[0],
        kv_dtype=str(resolved.kv_specs[0].dtype),
        block_size=config.block_size,
        steps=_steps(count),
        widths=resolved.buckets(spec.max_len).token_buckets,
    )
    as_floats = config.replace(quantization=None, quantized_weights="dequantized")
    reference_spec = unpacked(spec)
    plain = replace(resolved, dtype="float32", source=source, config=as_floats, spec=reference_spec)
    device = _cpu()
    with loading_bar() as listen, jax.default_device(device):
        params = read_weights(plain, source, config.load_format, listen)
    reference = replace(
        served,
        params=params,
        spec=reference_spec,
        env=ALONE,
        device=device,
        kv_dtype="float32",
        steps=(count,),
        widths=(count,),
    )
    return served, reference


def _steps(count: int) -> tuple[int, ...]:
    decoded = min(DECODED, count - 1)
    first = (count - decoded + 1) // 2
    chunks = [first, count - decoded - first]
    return (*(n for n in chunks if n), *(1,) * decoded)


def _cpu() -> jax.Device:
    """The host, or where JAX was told to leave it out (JAX_PLATFORMS) the served device."""
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _to_text(facts: dict[str, Any], errors: Errors) -> str:
    against = "" if facts["reference"] == facts["model"] else f" of {facts['reference']}"
    lines = [
        f"{facts['model']}: {facts['dtype']} on {facts['platform']} (KV cache {facts['kv_cache_dtype']}, attention "
        f"{facts['attention_backend']}) against float32{against}, {errors.num_tokens} tokens",
        f"{'':<14}{'max abs error':>15}{'relative RMS':>15}",
        *(f"{row.name:<14}{row.max_abs_error:>15.3e}{row.relative_rms:>15.3e}" for row in errors.rows),
        f"most likely next token: {errors.agreeing} of {errors.num_tokens} equal ({facts['top1_agreement']:.1%})",
        f"largest relative RMS: {max(row.relative_rms for row in errors.rows):.3g}, --max-error {facts['max_error']:g}",
    ]
    return "\n".join(lines) + "\n"


def _to_json(facts: dict[str, Any], errors: Errors) -> str:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None  # JSON has no NaN

    rows = [
        {"name": r.name, "max_abs_error": number(r.max_abs_error), "relative_rms": number(r.relative_rms)}
        for r in errors.rows
    ]
    return json.dumps({**facts, "rows": rows}, indent=1) + "\n"
