"""What one load of 500 MB and more takes: memory, and time against ``safetensors.numpy.load_file`` on the same file."""

from __future__ import annotations

import pytest

from benchmarks.loading import in_a_process
from tests.weights.checkpoints import LLAMA, tensors, write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Of the shape of SmolLM2-135M: many small tensors and one large one."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = LLAMA | sizes | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config |= {"tie_word_embeddings": True}
    made = tensors(config)
    assert sum(tensor.nbytes for tensor in made.values()) > 500e6
    return str(write_hf(tmp_path_factory.mktemp("model"), config, made))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_by_the_weights(model, dtype):
    found = in_a_process("memory", model, dtype, 1)
    print(found)
    assert found["kept_bytes"] > 500e6 / (1 if dtype == "float32" else 2)
    assert 0.95 < found["ratio"] <= 1.2


@pytest.mark.slow
def test_speed(model):
    found = in_a_process("speed", model, "float32", 8)
    print(found)
    assert found["ratio"] >= 0.6
