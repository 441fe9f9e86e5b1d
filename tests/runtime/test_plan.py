"""Plans against what XLA says of the whole programs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmjax import planning
from lmjax.config import ConfigError, EngineConfig
from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.parallel.split import Degree
from lmjax.runtime import cards, compile_bundle
from lmjax.runtime.buckets import ForwardKey, SampleKey
from lmjax.runtime.bundle import Bundle, PoolFacts
from lmjax.runtime.hlo import entry, large_copies, launches
from lmjax.runtime.identity import identity
from lmjax.runtime.memory import GIB
from lmjax.runtime.plan import Deployment, Plan, largest_keys, make_plan
from lmjax.runtime.plan_layers import cut
from lmjax.runtime.plan_report import to_json, to_text
from lmjax.runtime.platform import no_compilation_cache
from lmjax.runtime.programs import APPLY_PATCHES, COPY_BLOCKS, Shapes, all_programs, forward_program
from lmjax.runtime.resolve import ProgramMemory, model_source, resolve_dtype, step_bytes
from lmjax.weights.errors import WeightError
from tests import deviceless

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
WINDOWS = {
    **SMALL,
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}

LATENT = {
    **{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")},
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


def ignore(message: str) -> None:
    pass


def deployment(model, card="h200", devices=1, expert_parallel=False, **settings) -> Deployment:
    config = EngineConfig(model=str(model), **settings).validate()
    return Deployment(config, model_source(config), cards.card(card), Degree(devices, 1, expert_parallel))


def write(tmp_path, config) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def shapes_for(config, **changes) -> Shapes:
    spec = spec_from_hf(config, None)
    kv = decoder.kv_specs(spec, "bfloat16")
    sizes = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 64, "max_logprobs": 0}
    return Shapes(spec=spec, dtype="bfloat16", kv_specs=kv, num_blocks=tuple(100 for _ in kv), **(sizes | changes))


def test_a_cut_keeps_four_layers_and_the_pools_size():
    small = cut(shapes_for(SMALL))
    assert small.kept == (0, 1, 2, 3)
    assert small.shapes.num_blocks == (200,) and small.shapes.kv_specs[0].layers == (0, 1, 2, 3)


def test_a_cut_keeps_three_layers_of_each_kind_with_groups_in_order():
    late = {**WINDOWS, "layer_types": ["full_attention"] * 5 + ["sliding_attention"] * 3}
    small = cut(shapes_for(late))
    assert small.kept == (0, 1, 2, 5, 6, 7)
    assert [(x.attention.group, x.attention.index) for x in small.shapes.spec.layers] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]
    assert small.shapes.num_blocks == (167, 100)  # 5 layers of 100 blocks, in 3


def whole_programs(plan: Plan, where: Deployment):
    """{name: (XLA's memory analysis, launches)} of the plan's forward programs at full depth."""
    resolved = where.resolve()
    shapes = resolved.shapes(plan.pool.num_blocks, plan.pool.max_model_len)
    found = {}
    with no_compilation_cache():
        for key in largest_keys(resolved.buckets(plan.pool.max_model_len))[1:]:
            executable = forward_program(shapes, key).compile()
            instructions = entry(executable.as_text())
            assert not large_copies(instructions, 2**20)
            found[key.name] = executable.memory_analysis(), launches(instructions)
    return found


@pytest.fixture
def no_sampler(monkeypatch):
    """Leaves the sample program out of plans: it does not depend on the model's depth, and is slow to compile."""
    monkeypatch.setattr("lmjax.runtime.plan.largest_keys", lambda buckets: largest_keys(buckets)[1:])


@deviceless.skip
@pytest.mark.parametrize(
    ("config", "devices"),
    [
        pytest.param(SMALL, 1, marks=pytest.mark.slow, id="llama"),
        pytest.param(WINDOWS, 2, id="windows, two cards"),
        pytest.param(LATENT, 2, marks=pytest.mark.slow, id="latent KV, two cards"),
    ],
)
def test_a_plan_tells_what_the_whole_programs_need(tmp_path, config, devices, no_sampler):
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_logprobs": 0}
    where = deployment(write(tmp_path, config), devices=devices, **settings)
    plan = make_plan(where, None, ignore)
    assert plan.refusal is None and len(plan.programs) == 2
    assert set(plan.attention) == {"xla" if config is LATENT else "triton"}
    assert ("attention: in XLA form, without a kernel" in to_text(plan)) == (config is LATENT)
    for name, (memory, counted) in whole_programs(plan, where).items():
        program = next(p for p in plan.programs if p.name == name)
        assert abs(program.temporaries - memory.temp_size_in_bytes) <= max(0.1 * memory.temp_size_in_bytes, 16 * 2**20)
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs
        assert program.peak == pytest.approx(peak, rel=0.01)
        assert program.arguments == pytest.approx(memory.argument_size_in_bytes, rel=1e-3)
        assert program.launches.kernels == pytest.approx(counted.kernels, abs=4)
        assert program.launches.collectives == counted.collectives
        assert len(counted.collectives) == (2 * 8 + 1 if devices > 1 else 0)
    check_arithmetic(plan, where)


def check_arithmetic(plan: Plan, where: Deployment) -> None:
    """Every byte that may be used is accounted for, and the pool is as large as the rest allows."""
    memory = cards.card("h200").memory_bytes
    assert plan.usable == int(0.9 * memory) and plan.reserve == 3 * GIB // 2 + int(0.03 * memory)
    assert plan.room == plan.usable - plan.reserve - plan.weights - plan.state - plan.program_bytes
    assert plan.pool.num_bytes <= plan.room
    all_of_them = where.config.max_num_seqs * plan.pool.max_model_len  # more tokens are of no use
    per_token = sum(kv.bytes_per_token() for kv in where.resolve().device_kv_specs)
    assert plan.pool.num_tokens == min(all_of_them, plan.room // per_token // 16 * 16)
    assert plan.concurrency == plan.pool.num_tokens / plan.length


@deviceless.skip
@pytest.mark.parametrize(("length", "devices"), [(4096, 2), pytest.param(131_072, 4, marks=pytest.mark.slow)])
def test_70b_is_refused_on_one_h100_and_the_smallest_mesh_named(length, devices, request):
    if devices == 4:  # gigabytes are left: the sampler's half of one decides nothing
        request.getfixturevalue("no_sampler")
    model = CONFIGS / "llama-3.3-70b.json"
    where = deployment(model, "h100", max_model_len=length, max_num_batched_tokens=2048)
    plan = make_plan(where, None, ignore)
    assert plan.pool is None and "weights, state and reserve need 135." in plan.refusal
    smallest = plan.smallest
    assert smallest.devices == devices and smallest.refusal is None
    # a token takes 2 x 80 layers x 8 heads x 128 features x 2 bytes on all cards together
    by_hand = smallest.room // (2 * 80 * 8 * 128 * 2 // devices) // 16 * 16 - 16
    assert smallest.pool.num_tokens == by_hand >= length
    text = to_text(plan)
    assert f"Smallest that fits: --tensor-parallel-size {devices}, with " in text and f"{by_hand:,} tokens" in text


def test_the_report_is_json_and_text(monkeypatch, capsys, tmp_path):
    found = fake_plan()
    monkeypatch.setattr("lmjax.runtime.plan.make_plan", lambda *_: found)
    monkeypatch.setattr(planning, "_use_cpu", lambda: None)
    config = EngineConfig(model=str(write(tmp_path, SMALL)))
    assert planning.plan(config, "l4", None, True) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_json(found)))
    assert planning.plan(config, "l4", 100, False) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT: too large" in text and "No number of these cards that divides this model fits it." in text


def fake_plan() -> Plan:
    return Plan(
        model="llama",
        card=cards.card("l4"),
        degree=Degree(),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        attention=("triton",),
        block_size=16,
        usable=20 * GIB,
        reserve=2 * GIB,
        weights=30 * GIB,
        adapters=0,
        state=0,
        program_bytes=0,
        room=-12 * GIB,
        pool=None,
        wanted_len=4096,
        refusal="too large",
    )


def test_what_cannot_be_spread_is_refused_by_name_before_a_compiler_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("lmjax.runtime.plan.topology", None)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: got 3, but the model has 16 query heads"):
        make_plan(deployment(write(tmp_path, SMALL), devices=3), None, ignore)


@pytest.fixture
def two_programs(monkeypatch):
    def some(shapes, buckets):
        found = all_programs(shapes, buckets)
        return {key: found[key] for key in (APPLY_PATCHES, COPY_BLOCKS)}

    monkeypatch.setattr("lmjax.runtime.compile_bundle.all_programs", some)
    return PoolFacts((100,), 64, 0)


def write_bundle(tmp_path, pool, autotune_results=None):
    where = deployment(write(tmp_path, SMALL), max_num_seqs=1, max_num_batched_tokens=1)
    resolved = where.resolve()
    devices = list(resolved.placement.mesh.devices.flat)
    return (
        compile_bundle.write(resolved, pool, devices, tmp_path / "bundle", ignore, autotune_results),
        resolved,
        devices,
    )


@deviceless.skip
def test_a_bundle_for_a_card_says_what_it_is_for(tmp_path, two_programs):
    written, resolved, devices = write_bundle(tmp_path, two_programs)
    assert written.compiled == 2
    bundle = Bundle.read(written.path)
    assert bundle.identity["device"] == "h200" and bundle.identity["compute capability"] == "9.0"
    assert bundle.identity["plugin"].startswith("jax-cuda12-plugin ") and bundle.pool == two_programs
    assert bundle.difference(identity(resolved, devices)) is None
    other = identity(resolved, list(cards.topology(cards.card("h100"))))
    assert bundle.difference(other) == "device: h100 here, h200 in the bundle"


@deviceless.skip
def test_autotune_results_are_loaded_and_part_of_a_bundle(tmp_path, two_programs):
    results = tmp_path / "results.txtpb"
    with pytest.raises(ConfigError, match="No such file"):
        write_bundle(tmp_path, two_programs, str(results))
    results.write_text("not {")
    with pytest.raises(ConfigError, match="Failed to parse autotune results"):
        write_bundle(tmp_path, two_programs, str(results))
    results.write_text("version: 3\n")
    assert write_bundle(tmp_path, two_programs, str(results))[0].compiled == 2
    assert write_bundle(tmp_path, two_programs, str(results))[0].compiled == 0
    results.write_text("version: 3\n\n")
    assert write_bundle(tmp_path, two_programs, str(results))[0].compiled == 2


def test_outputs_of_two_steps_and_temporaries_of_one():
    shapes = shapes_for(SMALL)
    block = 16 * sum(kv.bytes_per_token() for kv in shapes.kv_specs)
    forward, sample = ForwardKey(512, 16), SampleKey(16, 3, True)
    small, large = ProgramMemory(10, 7), ProgramMemory(10**9, 3)
    assert step_bytes(shapes, {forward: small, sample: small}) == 2 * 7 + 16 * block  # copying blocks needs more
    assert step_bytes(shapes, {forward: large, sample: small}) == 2 * 3 + 10**9
    assert step_bytes(shapes, {forward: small, sample: large}) == 2 * 7 + 10**9 + 2 * 3


def test_settings_of_plan_and_compile_are_checked(tmp_path):
    config = EngineConfig(model=str(write(tmp_path, SMALL)))
    with pytest.raises(ConfigError, match="--length: got 0"):
        planning.plan(config, "h200", 0, False)
    with pytest.raises(ConfigError, match="--bundle: is missing"):
        planning.compile(config, "h200", None)
    with pytest.raises(ConfigError, match="cpu is one device"):
        planning.compile(config.replace(bundle="x", tensor_parallel_size=2), "cpu", None)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: got 0"):
        config.replace(tensor_parallel_size=0).validate()


def test_a_checkpoints_type_that_is_none_is_refused_where_it_would_be_used(tmp_path):
    config = EngineConfig(model=str(write(tmp_path, SMALL | {"torch_dtype": "torch.float8_e4m3fn"})))
    source = model_source(config)
    with pytest.raises(WeightError, match=r"config\.json: torch_dtype: got 'float8_e4m3fn', must be one of .*--dtype"):
        resolve_dtype(config, source, "gpu")
    assert resolve_dtype(config.replace(dtype="float16"), source, "gpu") == "float16"
    assert resolve_dtype(config, source, "cpu") == "float32"


def test_without_the_plugin_the_command_that_installs_it_is_told(monkeypatch, tmp_path):
    from jax.experimental import topologies

    def no_plugin(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", no_plugin)
    monkeypatch.setenv("LMJAX_CUDA_PLUGIN", str(tmp_path))
    cards.topology.cache_clear()
    with pytest.raises(ConfigError, match="pip install --no-deps --target"):
        cards.topology(cards.card("h200"))
