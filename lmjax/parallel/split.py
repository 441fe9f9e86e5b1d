"""A decoder's spec for a number of devices: what is padded or repeated so that it divides, and one device's share."""

from __future__ import annotations

from dataclasses import replace

from lmjax.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec

# Tokens of a chunk of the sampler (sampling.chunks.CHUNK): shares of whole chunks give the sums that one device has.
VOCAB_CHUNK = 128


class SplitError(ValueError):
    """The model cannot be spread over so many devices; the message names what does not divide."""


def spread(spec: DecoderSpec, tp: int, expert_parallel: bool = False) -> DecoderSpec:
    """The model's spec with all that ``tp`` devices hold together.

    With fewer KV heads than devices each is held by tp / K of them, so the pool stores max(K, tp) heads. The
    vocabulary's rows are padded so that each device has whole chunks of the sampler. Raises ``SplitError`` for what
    does not divide, with the degrees that would.
    """
    if tp == 1:
        return spec
    _check(spec, tp, expert_parallel)
    layers = []
    for layer in spec.layers:
        a = layer.attention
        layers.append(replace(layer, attention=replace(a, kv_heads=max(a.kv_heads, tp))))
    multiple = tp * VOCAB_CHUNK
    return replace(spec, layers=tuple(layers), vocab_rows=-(-spec.vocab // multiple) * multiple)


def share(spec: DecoderSpec, tp: int, expert_parallel: bool = False) -> DecoderSpec:
    """What one of ``tp`` devices holds of a spec that ``spread`` made. ``vocab`` stays the whole vocabulary's."""
    if tp == 1:
        return spec

    def attention(a: AttentionSpec) -> AttentionSpec:
        return replace(a, heads=a.heads // tp, kv_heads=a.kv_heads // tp)

    def mlp(m: MlpSpec | MoeSpec) -> MlpSpec | MoeSpec:
        if isinstance(m, MlpSpec):
            return replace(m, ffn=m.ffn // tp)
        shared = None if m.shared_ffn is None else m.shared_ffn // tp
        # experts stay those that the router knows; how many are here is read off the weights
        return replace(m, ffn=m.ffn if expert_parallel else m.ffn // tp, shared_ffn=shared)

    layers = tuple(replace(x, attention=attention(x.attention), mlp=mlp(x.mlp)) for x in spec.layers)
    return replace(spec, layers=layers, vocab_rows=spec.num_vocab_rows // tp)


def degrees(spec: DecoderSpec, expert_parallel: bool = False, most: int = 64) -> list[int]:
    """The numbers of devices up to ``most`` that the model can be spread over."""
    return [tp for tp in range(1, most + 1) if not _problems(spec, tp, expert_parallel)]


def _check(spec: DecoderSpec, tp: int, expert_parallel: bool) -> None:
    problems = _problems(spec, tp, expert_parallel)
    if problems:
        possible = ", ".join(str(n) for n in degrees(spec, expert_parallel))
        raise SplitError(f"got {tp}, but {problems[0]}; degrees that divide this model: {possible}")


def _problems(spec: DecoderSpec, tp: int, expert_parallel: bool) -> list[str]:
    found = []

    def divides(name: str, n: int | None) -> None:
        if n is not None and n % tp:
            found.append(f"it has {n} {name}")

    for layer in dict.fromkeys((x.attention.heads, x.attention.kv_heads, x.mlp) for x in spec.layers):
        heads, kv_heads, mlp = layer
        divides("query heads", heads)
        if kv_heads % tp and tp % kv_heads:
            found.append(f"it has {kv_heads} KV heads")
        if isinstance(mlp, MlpSpec):
            divides("ffn features", mlp.ffn)
        else:
            divides("features in a shared expert", mlp.shared_ffn)
            if expert_parallel:
                divides("experts", mlp.experts)
            else:
                divides("ffn features in an expert", mlp.ffn)
    return found
