"""A decoder's spec for a number of devices: what is padded or repeated so that it divides, and one device's share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmjax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# Tokens of a chunk of the sampler (sampling.chunks.CHUNK): shares of whole chunks give the sums that one device has.
VOCAB_CHUNK = 128


class SplitError(ValueError):
    """The model cannot be spread like this. The message says what does not divide and which degrees would.

    ``axis``: "tensor" or "pipeline".
    """

    def __init__(self, axis: str, message: str):
        super().__init__(message)
        self.axis = axis


@dataclass(frozen=True, slots=True)
class Degree:
    """``pp`` pipeline stages of ``tp`` devices each."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp


def spread(spec: DecoderSpec, degree: Degree) -> DecoderSpec:
    """The model's spec with all that the devices hold together.

    With fewer KV heads than devices of a stage each is held by tp / K of them, so the pool stores max(K, tp) heads. The
    vocabulary's rows are padded so that each device has whole chunks of the sampler. Stages have equally many layers:
    where that does not divide, the last stage ends with some whose weights are zeros, which leave their input as it
    is. Raises ``SplitError``.
    """
    if degree.devices == 1:
        return spec
    _check(spec, degree)
    layers = []
    for layer in spec.layers[: _per_stage(spec, degree.pp)]:
        a = layer.attention
        layers.append(replace(layer, attention=replace(a, kv_heads=max(a.kv_heads, degree.tp))))
    multiple = degree.devices * VOCAB_CHUNK
    rows = -(-spec.vocab // multiple) * multiple
    return replace(spec, layers=tuple(layers), vocab_rows=rows, stages=degree.pp)


def share(spec: DecoderSpec, degree: Degree) -> DecoderSpec:
    """What one device holds of a spec that ``spread`` made. ``vocab`` stays the whole vocabulary's."""
    if degree.devices == 1:
        return spec
    tp = degree.tp

    def attention(a: AttentionSpec) -> AttentionSpec:
        return replace(a, heads=a.heads // tp, kv_heads=a.kv_heads // tp)

    def mlp(m: MlpSpec | MoeSpec) -> MlpSpec | MoeSpec:
        if isinstance(m, MlpSpec):
            return replace(m, ffn=m.ffn // tp)
        shared = None if m.shared_ffn is None else m.shared_ffn // tp
        # experts stay those that the router knows; how many are here is read off the weights
        return replace(m, ffn=m.ffn if degree.expert_parallel else m.ffn // tp, shared_ffn=shared)

    layers = tuple(replace(x, attention=attention(x.attention), mlp=mlp(x.mlp)) for x in spec.layers)
    return replace(spec, layers=layers, vocab_rows=spec.num_vocab_rows // degree.devices, stages=1)


def degrees(spec: DecoderSpec, expert_parallel: bool = False, most: int = 64) -> list[int]:
    """The tensor-parallel degrees up to ``most`` that divide the model."""
    return [tp for tp in range(1, most + 1) if not _problems(spec, tp, expert_parallel)]


def stage_degrees(spec: DecoderSpec) -> list[int]:
    """The numbers of pipeline stages that the model's layers can be cut into."""
    return [pp for pp in range(1, len(spec.layers) + 1) if _stage_problem(spec, pp) is None]


def _check(spec: DecoderSpec, degree: Degree) -> None:
    problem = _stage_problem(spec, degree.pp)
    if problem:
        possible = ", ".join(str(n) for n in stage_degrees(spec))
        raise SplitError("pipeline", f"got {degree.pp}, but {problem}; degrees that do for this model: {possible}")
    problems = _problems(spec, degree.tp, degree.expert_parallel)
    if problems:
        possible = ", ".join(str(n) for n in degrees(spec, degree.expert_parallel))
        raise SplitError("tensor", f"got {degree.tp}, but {problems[0]}; degrees that divide this model: {possible}")


def _per_stage(spec: DecoderSpec, pp: int) -> int:
    return -(-len(spec.layers) // pp)


def _stage_problem(spec: DecoderSpec, pp: int) -> str | None:
    """All stages run one program, so their layers must be of the same kinds in the same order."""
    count = _per_stage(spec, pp)
    if count * (pp - 1) >= len(spec.layers):
        return f"of {len(spec.layers)} layers at {count} a stage none would be left for the last"
    for i, first in enumerate(spec.layers[:count]):
        for j in range(i + count, len(spec.layers), count):
            if spec.layers[j].kind != first.kind:
                return f"layer {j} is of another kind than layer {i}, whose place it would have in its stage"
    return None


def _problems(spec: DecoderSpec, tp: int, expert_parallel: bool) -> list[str]:
    found = []

    def divides(name: str, n: int | None) -> None:
        if n is not None and n % tp:
            found.append(f"the model has {n} {name}")

    def kind(layer: LayerSpec) -> tuple[int, int, bool, MlpSpec | MoeSpec]:
        a = layer.attention
        return a.heads, a.kv_heads, a.qk_norm is not None and a.qk_norm_over == "own", layer.mlp

    for heads, kv_heads, own_norms, mlp in dict.fromkeys(map(kind, spec.layers)):
        divides("query heads", heads)
        if own_norms and tp > kv_heads:
            found.append(f"the model has {kv_heads} KV heads, which have norms of their own and are not repeated")
        if kv_heads % tp and tp % kv_heads:
            found.append(f"the model has {kv_heads} KV heads")
        if isinstance(mlp, MlpSpec):
            divides("ffn features", mlp.ffn)
        else:
            divides("features in a shared expert", mlp.shared_ffn)
            if expert_parallel:
                divides("experts", mlp.experts)
            else:
                divides("ffn features in an expert", mlp.ffn)
    return found
