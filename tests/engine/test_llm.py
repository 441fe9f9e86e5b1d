"""The offline API on a device without a model, and then on a real tiny one beside the asynchronous engine."""

import asyncio
import os
import signal
import threading
import time

import pytest

from lmjax import LLM, AsyncEngine, EngineConfig, SamplingParams
from lmjax.config import ConfigError
from lmjax.types import EngineDeadError, ParameterError
from tests.fixtures import EOS_ID, FIRST_PIECE, make_model, model_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def fake(name="quick", **settings):
    return LLM(str(model_dir("RAND")), executor=f"tests.engine.factories:{name}", **settings)


@pytest.fixture
def llm():
    with fake() as made:
        yield made


def test_answers_come_in_order(llm):
    prompts = ["alpha", "b" * 200, "gamma"]
    outputs = llm.generate(prompts, [GREEDY, SamplingParams(max_tokens=1), GREEDY], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.prompt_token_ids for output in outputs] == [list(p.encode()) for p in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 1, 8]
    alone = llm.generate("gamma", GREEDY, use_tqdm=False)
    assert alone[0].outputs == outputs[2].outputs and alone[0].outputs[0].finish_reason == "length"


def test_answers_as_they_are_finished(llm):
    prompts, lengths = ["alpha", "beta", "gamma"], (30, 2, 9)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    expected = llm.generate(prompts, params, use_tqdm=False)
    found = list(llm.as_completed(prompts, params))
    assert [index for index, _ in found] == [1, 2, 0]
    assert all(output.outputs == expected[index].outputs for index, output in found)
    with pytest.raises(ParameterError, match="prompt: is empty"):
        llm.as_completed(["fine", ""], GREEDY)
    left = llm.as_completed(prompts, params)
    assert next(left)[0] == 1 and llm.stats().num_running == 2
    left.close()
    assert llm.stats().num_running == 0 and llm.stats().kv_usage == 0


def test_token_ids_are_prompts_too(llm):
    by_text = llm.generate(["ab"], GREEDY, use_tqdm=False)[0]
    for prompts in ([97, 98], [[97, 98]]):
        [output] = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.outputs == by_text.outputs and output.prompt is None


def test_choices_and_logprobs(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [output] = llm.generate("hello", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    for choice in output.outputs:
        assert len(choice.logprobs) == 6
        for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            assert next(iter(entry)) == token and entry[token].decoded_token == llm.tokenizer.token_text(token)
        total = sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:]] == list(b"ello")


def test_a_bad_request_stops_all_before_anything_runs(llm):
    with pytest.raises(ParameterError, match="prompt: is empty"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(ParameterError, match="got 1 of them for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.stats().steps == 0
    assert llm.generate([], GREEDY) == []


def test_priority_orders_the_queue():
    with fake(max_num_seqs=1, scheduling_policy="priority") as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False, priority=[5, -1, 2])
        times = [output.metrics.scheduled for output in outputs]
        assert times[1] < times[2] < times[0]
    with fake() as llm, pytest.raises(ParameterError, match="priority: got 3, but only --scheduling-policy"):
        llm.generate("a", GREEDY, priority=3)


def test_the_progress_bar_counts_requests(llm, capsys):
    llm.generate(["a", "b", "c"], GREEDY)
    assert "3/3" in capsys.readouterr().err


def test_chat_takes_one_conversation_or_many(llm):
    conversation = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "yo"}]], GREEDY, use_tqdm=False)
    assert one.outputs == two[0].outputs
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == llm.tokenizer.encode(one.prompt, add_special_tokens=False)
    assert len(two[1].prompt_token_ids) > len(one.prompt_token_ids)
    with pytest.raises(ParameterError, match="messages: is empty"):
        llm.chat([])


def test_a_stream_may_be_left_and_others_run_inside_it(llm):
    stream = llm.stream("outer", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    tokens = list(next(stream).deltas[0].token_ids)
    assert len(llm.generate("inner", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
    for update in stream:
        tokens += update.deltas[0].token_ids
    whole = llm.generate("outer", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert tokens == whole[0].outputs[0].token_ids
    left = llm.stream("left", SamplingParams(max_tokens=400, ignore_eos=True))
    next(left)
    left.close()
    assert llm.stats().num_running == 0 and llm.stats().kv_usage == 0


def test_threads_share_the_engine(llm):
    expected = llm.generate("x", GREEDY, use_tqdm=False)[0].outputs
    found = []

    def work():
        found.extend(output.outputs == expected for output in llm.generate(["x"] * 5, GREEDY, use_tqdm=False))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


@pytest.fixture
def ctrl_c():
    """A shell that started us in the background may have set the signal to be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_a_usable_engine(ctrl_c):
    with fake("slow") as llm:
        expected = llm.generate("again", GREEDY, use_tqdm=False)[0].outputs
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=480, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - begin < 1.5
        assert llm.stats().num_running == 0 and llm.stats().kv_usage == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate("again", GREEDY, use_tqdm=False)[0].outputs == expected


def test_a_failed_device_is_told_and_stays_told():
    with fake("fails_later") as llm:
        with pytest.raises(RuntimeError, match="step 20 is bad"):
            llm.generate("a", SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        with pytest.raises(EngineDeadError, match="step 20 is bad"):
            llm.generate("a", GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompts", [5, None, {"prompt": "a"}, [{"prompt_token_ids": [1, 2]}], [None], [["a"]]])
def test_prompts_of_another_kind_are_refused(llm, prompts):
    with pytest.raises(ParameterError, match=r"^prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_seqs: unknown setting"):
        fake(max_seqs=3)
    with pytest.raises(ConfigError, match="--block-size: got 7"):
        fake(block_size=7)
    with pytest.raises(ConfigError, match="--max-num-queued-reqs"):
        fake(max_num_queued_reqs=7)
    with fake() as llm:
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate("a", GREEDY, use_tqdm=False)


def test_the_models_own_defaults(tmp_path):
    generation = {"temperature": 0.25, "top_k": 7, "eos_token_id": [EOS_ID, 5]}
    path = make_model(tmp_path / "m", generation=generation)
    with LLM(str(path), executor="tests.engine.factories:quick") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 16)
        assert llm.info.eos_token_ids == (EOS_ID, 5)
    with LLM(str(path), executor="tests.engine.factories:quick", generation_config="lmjax") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


# --- a real model -------------------------------------------------------------------------------------------------

SMALL = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 16}


def test_64_streams_say_what_plain_answers_say():
    model = str(model_dir("RAND"))
    prompts = [f"{i} bottles of beer on the wall"[: 5 + i % 20] for i in range(64)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=12, logprobs=1 if i % 4 == 0 else None)
        for i in range(64)
    ]

    async def stream(engine, prompt, param):
        tokens, text, entries = [], "", []
        async for update in engine.generate(engine.tokenizer.encode(prompt), param):
            for delta in update.deltas:
                tokens += delta.token_ids
                text += delta.text
                entries += delta.logprobs or []
        return tokens, text, [entry.logprob for entry in entries]

    async def main():
        async with await AsyncEngine.start(EngineConfig(model=model, **SMALL)) as engine:
            with open(f"/proc/{engine.pid}/maps") as maps:
                assert "torch" not in maps.read()
            jobs = (stream(engine, *job) for job in zip(prompts, params, strict=True))
            streams = await asyncio.gather(*jobs)
            assert engine.stats().compiles == 0
            return streams

    streams = asyncio.run(main())
    with LLM(model, **SMALL) as llm:
        plain = [llm.generate(*job, use_tqdm=False)[0].outputs[0] for job in zip(prompts, params, strict=True)]
    for (tokens, text, logprobs), answer in zip(streams, plain, strict=True):
        assert (tokens, text) == (answer.token_ids, answer.text)
        if answer.logprobs is not None:
            expected = [e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True)]
            assert logprobs == pytest.approx(expected, abs=1e-4)


def test_a_scripted_model_says_its_script_and_stops():
    with LLM(str(model_dir("ALPHA")), **SMALL) as llm:
        plain, stopped, included = llm.generate(
            ["Hello"] * 3,
            [
                SamplingParams(temperature=0.0, max_tokens=None, logprobs=1),
                SamplingParams(temperature=0.0, stop=["EFG"], logprobs=1),
                SamplingParams(temperature=0.0, stop=["EFG"], include_stop_str_in_output=True),
            ],
            use_tqdm=False,
        )
    [answer] = plain.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Say ABCDEFGHIJKL end", "stop", None)
    assert answer.token_ids == [*range(FIRST_PIECE, FIRST_PIECE + 6), EOS_ID]
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].logprob == pytest.approx(-0.10536, abs=1e-3) and entry[token].rank == 1
    [answer] = stopped.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Say ABCD", "stop", "EFG")
    assert len(answer.token_ids) == len(answer.logprobs) == 4
    assert included.outputs[0].text == "Say ABCDEFG"
