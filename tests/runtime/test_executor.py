import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.config import ConfigError, SchedulerConfig
from lmjax.core.plan import SlotLoad, row_width, unpack_rows
from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.runtime import executor as executor_module
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.executor import build_executor
from lmjax.runtime.programs import Shapes, all_programs, forward_program
from lmjax.types import SamplingParams
from tests.fakes import run_requests
from tests.runtime.reference import NumpyLlama
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.tiny import VOCAB, make_plan, tiny_config, tiny_executor, tiny_model

GREEDY = SamplingParams(temperature=0.0)


def slot_load(slot: int, prompt: list[int], params: SamplingParams = GREEDY) -> SlotLoad:
    return SlotLoad(slot, params, 0, 0, np.array(prompt, np.int32), len(prompt))


def blocks_of(slot: int, count: int) -> list[tuple[int, int, int, int]]:
    """Patches that give a slot ``count`` blocks of its own."""
    return [(0, slot, column, 1 + slot * 24 + column) for column in range(count)]


def run(plan):
    executor = tiny_executor()
    return executor.collect(executor.submit(plan))


@pytest.fixture(scope="module")
def reference() -> NumpyLlama:
    return NumpyLlama(tiny_model())


def test_log_probabilities_are_the_references(reference):
    prompts = {1: [5, 7, 100, 34, 200], 6: list(range(40, 60))}
    params = SamplingParams(temperature=0.0, logprobs=5)
    result = run(
        make_plan(
            prefill=[(slot, 0, prompt, True) for slot, prompt in prompts.items()],
            slot_loads=[slot_load(slot, prompt, params) for slot, prompt in prompts.items()],
            patches=[patch for slot in prompts for patch in blocks_of(slot, 6)],
        )
    )
    found = unpack_rows(result.rows)
    for row, prompt in enumerate(prompts.values()):
        wanted = reference.logprobs(prompt)[-1]
        best = np.argsort(-wanted)[:5]
        assert result.token_ids[row] == best[0]
        assert found.top_ids[row].tolist() == best.tolist()
        assert found.ranks[row] == 1
        np.testing.assert_allclose(found.top_logprobs[row], wanted[best], atol=1e-5)
        np.testing.assert_allclose(found.logprobs[row], wanted[best[0]], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_come_only_when_asked_for(temperature):
    for logprobs in (None, 0, 5):
        load = slot_load(0, [5, 6], SamplingParams(temperature=temperature, logprobs=logprobs))
        result = run(make_plan(prefill=[(0, 0, [5, 6], True)], slot_loads=[load], patches=blocks_of(0, 1)))
        assert result.rows.shape == (1, row_width(None if logprobs is None else 5))


def test_prompt_log_probabilities_are_the_references(reference):
    prompt, other = [9, 250, 33, 4, 77, 180, 12], [1, 2, 3]
    result = run(
        make_plan(
            prefill=[(0, 0, other, False), (2, 0, prompt, True)],
            targets=[-1] * len(other) + [*prompt[1:], -1],
            slot_loads=[slot_load(0, other), slot_load(2, prompt)],
            patches=blocks_of(0, 1) + blocks_of(2, 2),
        )
    )
    assert result.rows.shape == (2, 1)
    (entry,) = result.prompt_logprobs
    found = unpack_rows(entry.rows)
    wanted = reference.logprobs(prompt)[:-1]
    assert (entry.handle, entry.first) == (102, 1) and found.token_ids.tolist() == prompt[1:]
    chosen = wanted[np.arange(len(wanted)), prompt[1:]]
    np.testing.assert_allclose(found.logprobs, chosen, atol=1e-5)
    assert found.ranks.tolist() == ((wanted > chosen[:, None]).sum(-1) + 1).tolist()
    best = np.argsort(-wanted)[:, :5]
    assert found.top_ids.tolist() == best.tolist()
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(wanted, best, 1), atol=1e-5)
    assert result.token_ids[1] == reference.logits(prompt)[-1].argmax()


def test_prompt_log_probabilities_of_a_later_chunk(reference):
    prompt = [9, 250, 33, 4, 77, 180, 12, 66]
    run(make_plan(prefill=[(2, 0, prompt[:3], False)], slot_loads=[slot_load(2, prompt)], patches=blocks_of(2, 3)))
    (found,) = run(make_plan(prefill=[(2, 3, prompt[3:], True)], targets=[-1, *prompt[5:], -1])).prompt_logprobs
    wanted = reference.logprobs(prompt)
    assert found.first == 5
    have = unpack_rows(found.rows).logprobs
    np.testing.assert_allclose(have, [wanted[i, prompt[i + 1]] for i in (4, 5, 6)], atol=1e-5)


def test_more_patches_than_a_step_holds(reference):
    """The overflow program: all tables at once, most of it in the step of one decode row."""
    prompt = list(range(100, 126))
    run(make_plan(prefill=[(3, 0, prompt, True)], slot_loads=[slot_load(3, prompt)], patches=blocks_of(3, 7)))
    moved = [(0, slot, column, 0) for slot in range(8) for column in range(32)]
    moved = [patch for patch in moved if (patch[1], patch[2]) >= (3, 7) or patch[1] != 3] + blocks_of(3, 7)
    result = run(make_plan(prefill=[(3, 25, prompt[25:], True)], patches=moved))
    assert result.token_ids[0] == reference.logits(prompt)[-1].argmax()


def test_copied_blocks_serve_another_slot(reference):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    run(make_plan(prefill=[(0, 0, prompt, True)], slot_loads=[slot_load(0, prompt)], patches=blocks_of(0, 3)))
    patches = blocks_of(0, 2)
    patches = [(0, 5, column, block) for _, _, column, block in patches] + [(0, 5, 2, 150)]
    result = run(
        make_plan(
            prefill=[(5, 9, prompt[9:], True)],
            slot_loads=[slot_load(5, prompt)],
            patches=patches,
            copies=[(0, blocks_of(0, 3)[2][3], 149), (0, 149, 150)],  # a chain: two calls
        )
    )
    assert result.token_ids[0] == reference.logits(prompt)[-1].argmax()


def test_a_slot_keeps_nothing_of_its_last_request(reference):
    """The second request of a slot has no bias, though the first one had."""
    prompt = [11, 22, 33]
    best = int(reference.logits(prompt)[-1].argmax())
    biased = SamplingParams(temperature=0.0, logit_bias={(best + 1) % VOCAB: 100.0})
    for params, expected in ((biased, (best + 1) % VOCAB), (GREEDY, best), (biased, (best + 1) % VOCAB)):
        result = run(
            make_plan(
                prefill=[(4, 0, prompt, True)], slot_loads=[slot_load(4, prompt, params)], patches=blocks_of(4, 1)
            )
        )
        assert result.token_ids.tolist() == [expected]


def test_at_most_two_steps_are_in_flight():
    executor = tiny_executor()
    plans = [make_plan(decode=[(0, 1)]) for _ in range(3)]
    first, second = executor.submit(plans[0]), executor.submit(plans[1])
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        executor.submit(plans[2])
    executor.collect(first)
    third = executor.submit(plans[2])
    executor.collect(second)
    executor.collect(third)


def test_the_pool_never_moves():
    """1,000 steps with two in flight: reading a result must not make a donation copy the pool."""
    executor = tiny_executor()

    def places():
        device = executor._device
        arrays = (*device._pools, device._tokens, *device._moved)
        return [array.unsafe_buffer_pointer() for array in arrays]

    run(make_plan(prefill=[(0, 0, [5], True)], slot_loads=[slot_load(0, [5])], patches=blocks_of(0, 24)))
    before, in_flight = places(), []
    for step in range(1000):
        position = 1 + step % 90
        in_flight.append(executor.submit(make_plan(decode=[(0, position)])))
        if len(in_flight) == 2:
            assert executor.collect(in_flight.pop(0)).token_ids[0] >= 0
    executor.collect(in_flight.pop())
    assert places() == before


def test_counters():
    executor = tiny_executor()
    before = executor.stats()
    run(make_plan(prefill=[(0, 0, [5, 6, 7, 8, 9], True)], slot_loads=[slot_load(0, [5])], patches=blocks_of(0, 2)))
    after = executor.stats()
    assert after["padded_tokens_total"] - before["padded_tokens_total"] == 3
    assert after["device_seconds"] > before["device_seconds"]
    assert after["compiles_total"] == 0


class CompileLog(logging.Handler):
    """JAX's own word on what it compiles, apart from the executor's count."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        message = record.getMessage()
        if "ompil" in message:
            self.lines.append(message)


@pytest.fixture
def compile_log():
    handler, logger = CompileLog(), logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler
    logger.removeHandler(handler)


def test_the_compile_log_sees_a_compile(compile_log):
    jax.jit(lambda x: x * jnp.float32(3.25))(np.ones(5, np.float32))
    assert compile_log.lines


def test_nothing_compiles_after_ready(compile_log):
    requests = random_requests(500, seed=11, longest=12)
    executor = Limited(tiny_executor(), num_blocks=40)
    answers, scheduler = run_requests(requests, scheduler_config(), executor.info, executor)
    assert len(answers) >= 500 and all(answer.reason in ("stop", "length") for answer in answers.values())
    assert any(answer.prompt_logprobs for answer in answers.values())
    assert scheduler.stats().preemptions > 0
    assert compile_log.lines == []
    assert executor.executor.stats()["compiles_total"] == 0


def shapes_with(num_blocks: int) -> Shapes:
    executor = tiny_executor()
    spec = spec_from_hf(executor.model_info.config, 128)
    return Shapes(
        spec=spec,
        dtype="float32",
        kv_specs=decoder.kv_specs(spec, "float32"),
        num_blocks=(num_blocks,),
        block_size=4,
        max_num_seqs=8,
        max_model_len=128,
        max_logprobs=5,
    )


@pytest.mark.parametrize("which", ["decode", "prefill", "copy_blocks"])
def test_temporaries_do_not_grow_with_the_pool(which):
    """Where XLA copied the pool, they would: by 1 MiB of every 1,000 blocks here."""

    def temporary_bytes(num_blocks: int) -> int:
        shapes, buckets = shapes_with(num_blocks), Buckets(8, 32)
        if which == "copy_blocks":
            program = all_programs(shapes, buckets)[which]
        else:
            program = forward_program(shapes, buckets.forward[3 if which == "decode" else -1])
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4000) - temporary_bytes(1000) < 1000


def test_window_groups_give_the_same_answers():
    """Two KV groups with a table each, the window group's blocks given back behind the window."""
    config = tiny_config(
        max_num_seqs=2,
        max_num_batched_tokens=4,
        hf_overrides={
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
        load_format="dummy",
    )
    executor = build_executor(config)
    assert [spec.window for spec in executor.info.kv_specs] == [None, 6]
    requests = random_requests(12, seed=4, longest=20)
    settings = SchedulerConfig(max_num_batched_tokens=4)
    together, _ = run_requests(requests, settings, executor.info, Limited(executor))
    for request in requests:
        alone, _ = run_requests([request], settings, executor.info, Limited(executor), overlap=False)
        for handle, answer in alone.items():
            assert together[handle].token_ids == answer.token_ids
    executor.close()
    executor.close()


def test_what_cannot_be_built_is_refused_in_one_line(monkeypatch):
    def refused(message: str, **changes):
        with pytest.raises(ConfigError, match=message) as error:
            build_executor(tiny_config(**changes))
        assert "\n" not in str(error.value)

    refused("--max-model-len: got 128, but the KV pool holds 40 tokens", num_gpu_blocks_override=10)
    refused(
        r"--max-num-batched-tokens: got 32, must be at least the context length \(128\)", enable_chunked_prefill=False
    )
    refused("--block-size", block_size=3)
    refused("--hf-overrides: model_type", hf_overrides={"model_type": "nonsense"})
    monkeypatch.setattr(executor_module, "available_memory", lambda: 1000)
    refused("--model: the weights need .* but only .* free")
