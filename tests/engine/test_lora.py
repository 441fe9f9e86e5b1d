"""LoRA in a whole engine: what each adapter gives in a mixed batch is what merged weights give in transformers."""

import threading
from pathlib import Path

import numpy as np
import pytest

from lmjax import LLM, SamplingParams
from lmjax.config import ConfigError
from lmjax.types import AdapterError, ParameterError
from tests import tiny, tiny_loras

GOLDENS = np.load(Path(tiny.__file__).parent / "goldens" / "loras.npz")
CONFIG = tiny.CASES[tiny_loras.MODEL].config
SIZES = {"max_num_seqs": 16, "max_model_len": 64, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=tiny_loras.GREEDY, ignore_eos=True)
NAMES = [*tiny_loras.MANY]
pytestmark = pytest.mark.timeout(900)  # on a busy machine compiling takes minutes


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(tiny_loras.write(name, folder / name)) for name in tiny_loras.ADAPTERS}


@pytest.fixture(scope="module")
def llm(directories):
    """Eight slots; eight of its adapters come with the settings."""
    modules = {name: directories[name] for name in NAMES}
    with LLM(
        params=tiny.tensors(tiny_loras.MODEL), config=CONFIG, enable_lora=True, lora_modules=modules, **SIZES
    ) as made:
        yield made


def golden(name, i):
    return GOLDENS[f"{name or 'base'}/{i}"].tolist()


def prompt(name, i):
    return tiny_loras.prompts(name or "base")[i]


def tokens(llm, asked, **how):
    """asked: (adapter or None, which of its prompts)."""
    prompts, names = [prompt(*one) for one in asked], [name for name, _ in asked]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False, lora=names, **how)]


def test_goldens_have_no_ties():
    gaps = [float(GOLDENS[f"{name}/gap/{i}"]) for name in ("base", *NAMES) for i in range(2)]
    assert min(gaps) > 1e-3, gaps


def test_eight_adapters_and_the_base_model_in_one_batch(llm):
    """16 rows: what each gives alone, and what merged weights give in transformers with peft. Nothing is compiled."""
    asked = [*[(name, i) for name in NAMES for i in range(2)][:14], (None, 0), (None, 1)]
    expected = [golden(*one) for one in asked]
    assert len({tuple(found) for found in expected}) == 16
    assert tokens(llm, asked) == expected
    assert [tokens(llm, [one])[0] for one in (*asked[:3], *asked[-2:], (NAMES[7], 0))] == [
        *expected[:3],
        *expected[-2:],
        golden(NAMES[7], 0),
    ]
    # the same prompt with another adapter finds none of the first one's blocks
    same = [prompt(NAMES[0], 0)] * 3
    found = llm.generate(same, GREEDY, use_tqdm=False, lora=[NAMES[0], None, NAMES[1]])
    assert found[0].outputs[0].token_ids == golden(NAMES[0], 0)
    assert len({tuple(out.outputs[0].token_ids) for out in found}) == 3
    assert all(info.on_device for info in llm.loras.values())
    assert llm.stats().compiles == 0


def test_prompt_logprobs_scores_and_embeddings_are_of_the_adapter(llm):
    name, ids = NAMES[3], [*prompt(NAMES[3], 0), *golden(NAMES[3], 0)]
    first = len(prompt(name, 0)) - 1
    own, base = llm.logprobs([ids, ids], lora=[name, None])
    assert (own.ranks[first:] == 1).all() and not (base.ranks[first:] == 1).all()
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (out,) = llm.generate([ids], asked, use_tqdm=False, lora=name)
    given = [next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]]
    np.testing.assert_allclose(given, own.logprobs, atol=1e-4)
    one, two = (llm.embed([ids], use_tqdm=False, lora=lora)[0].outputs.embedding for lora in (name, None))
    assert np.abs(one - two).max() > 0.01
    assert [update.deltas for update in llm.stream(ids, asked, lora=name)]
    assert llm.stats().compiles == 0


def test_more_adapters_than_slots_come_and_go(llm, directories):
    """Ten adapters on eight slots, loaded while the engine answers; an adapter of a name that was taken before is not
    taken for the earlier one, whose blocks are still there."""
    ninth, tenth = "some", "rslora"
    for name in (ninth, tenth):
        llm.load_lora(name, directories[name])
    ids = prompt(NAMES[0], 0)
    asked = [*NAMES, ninth, tenth, None]
    found = dict(zip(asked, llm.generate([ids] * 11, GREEDY, use_tqdm=False, lora=asked), strict=True))
    assert found[NAMES[0]].outputs[0].token_ids == golden(NAMES[0], 0)
    assert sum(info.on_device for info in llm.loras.values()) == 8
    llm.unload_lora(ninth)
    llm.load_lora(ninth, directories[tenth])
    (again,) = llm.generate([ids], GREEDY, use_tqdm=False, lora=ninth)
    assert again.outputs[0].token_ids == found[tenth].outputs[0].token_ids
    assert again.outputs[0].token_ids != found[ninth].outputs[0].token_ids and again.num_cached_tokens == 0
    for name in (ninth, tenth):
        llm.unload_lora(name)
    assert set(llm.loras) == set(NAMES)
    assert llm.stats().compiles == 0


def test_unloading_under_requests(llm, directories):
    """Those that are there are answered with it; others are refused."""
    name = "patterns"
    llm.load_lora(name, directories[name])
    expected = tokens(llm, [(NAMES[0], 0)])
    answers = llm.as_completed([prompt(NAMES[0], 0), prompt(NAMES[0], 1)], GREEDY, lora=[name, NAMES[0]])
    done = {}

    def take():
        done.update({index: out.outputs[0].token_ids for index, out in answers})

    thread = threading.Thread(target=take)
    thread.start()
    while not llm.stats().num_running:
        assert thread.is_alive()
    llm.unload_lora(name)
    with pytest.raises(AdapterError, match="lora: there is no adapter 'patterns'") as caught:
        llm.generate([[1, 2]], GREEDY, use_tqdm=False, lora=name)
    assert caught.value.unknown
    thread.join()
    assert done[1] == golden(NAMES[0], 1) and len(done[0]) == tiny_loras.GREEDY and done[0] != expected[0]
    assert len(llm._engine.executor._device.adapters) == 8  # its memory is free
    llm._engine.scheduler.check_integrity()


def test_what_is_wrong_is_refused_and_changes_nothing(llm, directories, tmp_path):
    before = llm.loras
    for name, path, message in (
        ("x", str(tmp_path), "adapter_config.json: cannot be read"),
        (NAMES[0], directories["some"], f"lora: the name '{NAMES[0]}' is taken"),
        ("", directories["some"], "lora: got the name '', must be"),
        ("x", directories["gpt2"], "target_modules: got 'c_attn', must be of"),
    ):
        with pytest.raises(AdapterError, match=message):
            llm.load_lora(name, path)
    with pytest.raises(AdapterError, match="there is no adapter 'x'"):
        llm.unload_lora("x")
    with pytest.raises(ParameterError, match="lora: got 1 of them for 2 prompts"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, lora=["x"])
    assert llm.loras == before
    assert tokens(llm, [(NAMES[5], 0)]) == [golden(NAMES[5], 0)]


def test_weights_change_under_adapters(llm):
    """They are added to whatever the weights are; adapters stay."""
    original, name = llm.params, NAMES[2]
    llm.set_params(tiny.tensors(tiny_loras.MODEL) | {"model.norm.weight": np.zeros(160, np.float32)})
    assert tokens(llm, [(name, 0)]) == [[0] * tiny_loras.GREEDY]
    llm.set_params(original)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm, [(name, 0)]) == [golden(name, 0)]


@pytest.mark.slow
def test_deterministic_bits_do_not_depend_on_neighbours_adapters(directories):
    """Of a row with an adapter and of one without, alone and among others."""
    modules = {name: directories[name] for name in NAMES[:3]}
    sizes = SIZES | {"max_num_batched_tokens": 32, "deterministic": True, "max_loras": 3}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    asked = [(None, 0), (NAMES[0], 0), (NAMES[1], 0), (NAMES[2], 1), (None, 1), (NAMES[1], 1)]

    def bits(llm, some):
        outputs = llm.generate([prompt(*one) for one in some], params, use_tqdm=False, lora=[name for name, _ in some])
        steps = [zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True) for o in outputs]
        return [np.float32([entry[token].logprob for entry, token in pairs]).tobytes() for pairs in steps]

    with LLM(
        params=tiny.tensors(tiny_loras.MODEL), config=CONFIG, enable_lora=True, lora_modules=modules, **sizes
    ) as llm:
        together = bits(llm, asked)
        assert [bits(llm, [one])[0] for one in asked] == together
        assert len(set(together)) == len(together) and llm.stats().compiles == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lora_rank": 8}, r"--lora-modules: many0: .*r: got 16 .*must be at most 8 \(--max-lora-rank\)"),
        ({"pipeline_parallel_size": 2}, "--enable-lora: got --pipeline-parallel-size 2, must be 1"),
        ({"max_cpu_loras": 1}, r"--max-cpu-loras: got 1, must be at least --max-loras \(8\)"),
    ],
)
def test_settings_that_do_not_fit(settings, message, directories):
    with pytest.raises(ConfigError, match=message):
        LLM(
            params=tiny.tensors(tiny_loras.MODEL),
            config=CONFIG,
            enable_lora=True,
            lora_modules={"many0": directories["many0"]},
            **(SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 1} | settings),
        )
