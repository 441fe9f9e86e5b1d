"""An LLM of a caller's arrays: the answers of the same weights in files, and one line for what does not fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Backend

from lmjax import LLM, SamplingParams
from lmjax.config import ConfigError
from lmjax.engine.mesh import from_mesh
from lmjax.text.errors import TokenizerError
from lmjax.text.objects import tokenizer_from
from lmjax.text.tokenizer import load_tokenizer
from lmjax.types import ParameterError
from tests.runtime.tiny import tiny_model

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "num_gpu_blocks_override": 40}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 6, 7], list(range(20, 40))]


def config():
    return json.loads((tiny_model() / "config.json").read_text())


def tensors():
    return load_file(tiny_model() / "model.safetensors")


@pytest.fixture(scope="module")
def of_files():
    with LLM(str(tiny_model()), **SMALL) as llm:
        llm.first = outputs(llm)  # a second time it has the prompts' KV, and sums in other chunks
        yield llm


@pytest.fixture(scope="module")
def of_arrays(of_files):
    """Without a tokenizer; its config is an object of transformers."""
    told = []
    with LLM(
        params=of_files._engine.executor.params,
        config=transformers.LlamaConfig(**config()),
        progress=told.append,
        **SMALL,
    ) as llm:
        assert any("15 arrays taken as they are, 0 converted" in line for line in told), told
        yield llm


def outputs(llm):
    return [out.outputs[0] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_the_answers_are_those_of_the_files(of_files, of_arrays):
    for one, other in zip(of_files.first, outputs(of_arrays), strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == other.cumulative_logprob
        assert one.text and other.text == ""
    for name in ("model_type", "dtype", "vocab_size", "max_model_len"):
        assert getattr(of_arrays.info, name) == getattr(of_files.info, name)
    assert of_arrays.info.eos_token_ids == of_files.info.eos_token_ids


def test_without_a_tokenizer_there_is_no_text(of_arrays):
    for call, field in (
        (lambda: of_arrays.generate("text", use_tqdm=False), "prompt"),
        (lambda: of_arrays.chat([{"role": "user", "content": "x"}], use_tqdm=False), "messages"),
        (lambda: of_arrays.encode_chat([{"role": "user", "content": "x"}]), "messages"),
        (lambda: of_arrays.generate([[1]], SamplingParams(stop=["x"]), use_tqdm=False), "stop"),
        (lambda: of_arrays.generate([[1]], SamplingParams(bad_words=["x"]), use_tqdm=False), "bad_words"),
    ):
        with pytest.raises(ParameterError, match="this engine has no tokenizer: give token ids") as caught:
            call()
        assert caught.value.field == field


def test_an_exported_directory_holds_the_same_model(of_files, of_arrays, tmp_path):
    of_files.save_pretrained(tmp_path / "a")
    of_arrays.save_pretrained(tmp_path / "b", max_shard_size=50_000)
    original = tensors()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(found[name].tobytes() == x.tobytes() for name, x in original.items())
    with LLM(str(tmp_path / "a"), **SMALL) as again:
        assert outputs(again) == of_files.first
    parts = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(parts) > 2 and not (tmp_path / "b" / "tokenizer.json").exists()
    with LLM(str(tmp_path / "b"), tokenizer=str(tiny_model()), **SMALL) as again:
        assert [out.token_ids for out in outputs(again)] == [out.token_ids for out in of_files.first]


REFUSED = [
    ({"config": None}, "config: got NoneType"),
    ({"config": {"vocab_size": 3}}, "config: got dict, must be the content of a config.json"),
    ({"model": "smollm2"}, "model: got 'smollm2' beside params"),
    ({"params": None}, "config: is given without params"),
    ({"load_format": "dummy"}, "--load-format: is about files"),
    ({"revision": "main"}, "--revision: is about files"),
    ({"nnodes": 2, "node_rank": 0, "master_addr": "x", "tensor_parallel_size": 2}, "--nnodes: got 2"),
    ({"mesh": "data"}, "mesh: got 'data', must be a jax.sharding.Mesh"),
    ({"hf_overrides": {"hidden_act": "mish"}}, "config: hidden_act: got 'mish'"),
    ({"names": {"nothing.there": "lm_head.weight"}}, "names: 'nothing.there' is no path in params; there are "),
    ({"names": 5}, "names: got 5, must be a dict or a function"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_go_together_is_one_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        LLM(**({"params": tensors(), "config": config(), **SMALL} | changes))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def mesh(shape, names, processes=1):
    devices = np.array([SimpleNamespace(id=i, process_index=i % processes) for i in range(int(np.prod(shape)))])
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=names, shape=dict(zip(names, shape, strict=True)))


@pytest.mark.parametrize(
    ("shape", "settings", "degrees", "order"),
    [
        ((2, 4), {}, (8, 1), range(8)),
        ((2, 4), {"pipeline_parallel_size": 2}, (4, 2), range(8)),
        ((1, 4), {"tensor_parallel_size": "b"}, (4, 1), range(4)),
        ((4, 1), {"tensor_parallel_size": "a"}, (4, 1), range(4)),
        ((2, 4), {"pipeline_parallel_size": "a", "tensor_parallel_size": "b"}, (4, 2), range(8)),
        ((2, 4), {"pipeline_parallel_size": "b"}, (2, 4), [0, 4, 1, 5, 2, 6, 3, 7]),
        ((2, 2), {"pipeline_parallel_size": "b", "tensor_parallel_size": "a"}, (2, 2), [0, 2, 1, 3]),
        ((2, 2), {"pipeline_parallel_size": 2, "tensor_parallel_size": "a"}, (2, 2), [0, 2, 1, 3]),
    ],
)
def test_a_mesh_gives_devices_and_degrees(shape, settings, degrees, order):
    found, devices = from_mesh(mesh(shape, ("a", "b")), settings | {"seed": 3})
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == degrees and found["seed"] == 3
    assert [device.id for device in devices] == list(order)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": "b"}, "axis a is left over: give each replica an LLM on its own part of the mesh"),
        ({"tensor_parallel_size": "model"}, "got 'model', must be a number or an axis of the mesh: a, b"),
        ({"tensor_parallel_size": "a", "pipeline_parallel_size": "a"}, "which is pipeline_parallel_size already"),
        (
            {"tensor_parallel_size": 4},
            "has 8 devices (a 2, b 4), but tensor_parallel_size 4 x pipeline_parallel_size 1",
        ),
        ({"pipeline_parallel_size": 3}, "has 8 devices (a 2, b 4), but"),
    ],
)
def test_a_mesh_that_is_not_used_up_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        from_mesh(mesh((2, 4), ("a", "b")), settings)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="devices of several processes"):
        from_mesh(mesh((2, 4), ("a", "b"), processes=2), {})


def test_tokenizers_as_objects(tmp_path):
    path = tiny_model()
    own = load_tokenizer(path)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    for given in (own, fast, Backend.from_file(str(path / "tokenizer.json"))):
        found = tokenizer_from(given, chat_template="{{ messages[0].content }}")
        assert found.encode("Héllo <s>") == own.encode("Héllo <s>")
        assert found.decode([72, 257, 105]) == own.decode([72, 257, 105])
        assert found.chat_template == "{{ messages[0].content }}"
    assert tokenizer_from(fast).eos_token_id == own.eos_token_id is not None
    with pytest.raises(TokenizerError, match="tokenizer: got int, must be a path"):
        tokenizer_from(3)
    with pytest.raises(TokenizerError, match="of no use without a tokenizer"):
        tokenizer_from(None, chat_template="x")
