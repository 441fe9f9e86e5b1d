"""``lmjax verify``: small errors where there is nothing but rounding, of the size that numpy finds, and an exit code
for a layer that is not what it should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax import cli
from lmjax.models import layer
from lmjax.runtime import layer_errors
from tests import tiny
from tests.fixtures import make_model

IDS = "--prompt-token-ids=" + ",".join(str(7 * i % 90) for i in range(41))
SINGLE = "model.safetensors"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "good", hidden=64, config={"num_hidden_layers": 3})


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["verify", *map(str, arguments)])
    written = capsys.readouterr()
    return code, written.out, written.err


def report(capsys, *arguments) -> tuple[int, dict, dict[str, dict]]:
    code, out, _ = run(capsys, "--json", *arguments)
    found = json.loads(out)
    return code, found, {row["name"]: row for row in found["rows"]}


def edited(source, target, name, change):
    shutil.copytree(source, target)
    tensors = load_file(target / SINGLE)
    change(tensors[name])
    save_file(tensors, target / SINGLE)
    return target


def test_the_table(model, capsys):
    code, out, err = run(capsys, model)
    lines = out.splitlines()
    assert code == 0 and err == ""
    assert "float32 on cpu" in lines[0] and "against float32," in lines[0]
    assert [line[:14].strip() for line in lines[2:-2]] == [
        "embedding", *(f"layer {i}" for i in range(3)), "final norm", "logits"
    ]  # fmt: skip
    assert all(float(line.split()[-1]) < 1e-4 for line in lines[2:-2])
    assert "(100.0%)" in lines[-2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral_window", "qwen2_moe"])
def test_other_layers(case, tmp_path, capsys):
    """Windows, experts, two KV groups: each layer runs alone in a pool of its own."""
    path = tiny.write(case, tmp_path)
    code, found, rows = report(capsys, path, IDS)
    assert code == 0 and found["within"] and found["top1_agreement"] == 1.0 and found["num_tokens"] == 41
    assert max(row["relative_rms"] for row in rows.values()) < 1e-4
    assert len(rows) == tiny.CASES[case].config["num_hidden_layers"] + 3


def test_logits_are_those_of_transformers(tmp_path, monkeypatch):
    """Of both sides: else they might agree on nonsense."""
    case = "qwen3_window"
    path, prompt = tiny.write(case, tmp_path), tiny.prompts(case)[0]
    wanted = np.load(ROOT / "tests/goldens/tiny.npz")[f"{case}/0"]
    seen = []
    logits = layer_errors._Walk.logits
    monkeypatch.setattr(layer_errors._Walk, "logits", lambda walk: seen.append(logits(walk)) or seen[-1])
    assert cli.main(["verify", str(path), "--prompt-token-ids", " ".join(map(str, prompt))]) == 0
    assert len(seen) == 2
    for found in seen:
        got = found[:, tiny.stored_positions(case)[0]].T
        assert np.abs(got - wanted).max() / np.abs(wanted).max() < 1e-4


def test_bfloat16_differs_by_its_rounding(model, capsys):
    code, found, rows = report(capsys, model, "--dtype", "bfloat16")
    assert code == 0 and found["dtype"] == "bfloat16" and found["max_error"] == 0.1
    table = load_file(model / SINGLE)["model.embed_tokens.weight"]
    rounded = table.astype(ml_dtypes.bfloat16).astype(np.float32)
    typical = np.sqrt(np.mean((rounded - table) ** 2) / np.mean(table**2))  # by numpy, over all tokens
    assert 0.5 * typical < rows["embedding"]["relative_rms"] < 2 * typical
    assert 1e-3 < rows["logits"]["relative_rms"] < 0.1
    code, found, _ = report(capsys, model, "--dtype", "bfloat16", "--max-error", "0.0005")
    assert code == 1 and not found["within"]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_perturbed_layer_is_found(model, tmp_path, capsys, name):
    def flip(tensor):
        tensor[: len(tensor) // 4] *= -1

    broken = edited(model, tmp_path / "broken", name, flip)
    assert run(capsys, broken)[0] == 0  # it is what its own file says
    code, found, rows = report(capsys, broken, "--reference", model)
    assert code == 1 and not found["within"]
    for fine in ("embedding", "layer 0"):
        assert rows[fine]["relative_rms"] < 1e-4
    for wrong in ("layer 1", "layer 2", "final norm", "logits"):
        assert rows[wrong]["relative_rms"] > 1e-2
    code, out, err = run(capsys, broken, "--reference", model)
    assert code == 1 and err.startswith("lmjax verify: layer 1 is the first beyond --max-error 0.001: relative RMS ")
    assert err.count("\n") == 1 and f"float32 of {model}" in out
    assert run(capsys, broken, "--reference", model, "--max-error", "100")[0] == 0


def test_what_is_served_is_what_is_measured(model, capsys, monkeypatch):
    """A kernel that is wrong for decode rows alone: the last four tokens come as such."""
    paged = layer.paged

    def wrong(qkv, heads, a, pool, step, index, env):
        o, pool = paged(qkv, heads, a, pool, step, index, env)
        return (o * 1.5, pool) if step.batch.token_ids.shape[0] == 1 else (o, pool)

    jax.clear_caches()
    monkeypatch.setattr(layer, "paged", wrong)
    code, _, rows = report(capsys, model)
    monkeypatch.undo()
    jax.clear_caches()
    assert code == 1 and rows["embedding"]["relative_rms"] == 0 and rows["layer 0"]["relative_rms"] > 1e-3


@pytest.mark.parametrize("packed", ["packed", "dequantized"])
def test_quantised_against_float32(model, capsys, packed):
    settings = ("--quantization", "int8", "--quantized-weights", packed, "--kv-cache-dtype", "int8")
    code, found, rows = report(capsys, model, *settings, "--max-error", "0.2")
    assert code == 0 and found["kv_cache_dtype"] == "int8" and rows["embedding"]["relative_rms"] == 0
    assert rows["layer 0"]["relative_rms"] > 1e-3


def test_nan_is_beyond_any_bound(model, capsys, monkeypatch):
    monkeypatch.setattr(layer_errors, "_embed", lambda params, ids, *_, **__: params.embed[ids].T * np.float32(np.nan))
    code, found, rows = report(capsys, model, "--max-error", "1e30")
    assert code == 1 and not found["within"] and rows["logits"]["relative_rms"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-error", "-1"], 2, "--max-error: got -1.0, must be at least 0"),
        (["--max-error", "nan"], 2, "--max-error: got nan"),
        (["--prompt", "a", IDS], 2, "--prompt and --prompt-token-ids: give one of them"),
        (["--prompt-token-ids", "1,x"], 2, "--prompt-token-ids: got '1,x', must be integers"),
        (["--prompt-token-ids", "1,100000"], 2, "--prompt-token-ids: has the token id 100000, must be"),
        (["--prompt-token-ids", " "], 2, "--prompt-token-ids: has 0 tokens"),
        (["--prompt", ""], 2, "--prompt: has 0 tokens"),
        (["--prompt", "a" * 900, "--max-model-len", "16"], 2, "--prompt: has "),
        (["--reference", "/no/model"], 1, "no such file"),
        (["--dtype", "int3"], 2, "--dtype: got 'int3'"),
    ],
)
def test_one_line_for_what_is_wrong(model, capsys, arguments, code, message):
    found, out, err = run(capsys, model, *arguments)
    assert found == code and out == "" and err.count("\n") == 1
    assert err.startswith("lmjax verify: error: ") and message in err


def test_a_reference_of_another_shape(model, tmp_path, capsys):
    other = make_model(tmp_path / "other", hidden=64, config={"num_hidden_layers": 2})
    code, _, err = run(capsys, model, "--reference", other)
    assert code == 1 and f"{other}: is another model" in err
