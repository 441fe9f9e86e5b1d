"""Bundles: written by ``compile``, read by ``serve``, on this machine's CPU."""

from __future__ import annotations

import hashlib
import json
import shutil

import jax
import numpy as np
import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.bundle import MANIFEST, Bundle, BundleError, usable_bundle
from lmjax.runtime.compile_bundle import compile_for_cpu, model_source
from lmjax.runtime.compiler import Program
from lmjax.runtime.executor import build_executor, plan_memory
from lmjax.runtime.resolve import resolve
from tests.runtime.tiny import make_plan, tiny_config

SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 64, "max_logprobs": 2}


def config(**changes) -> EngineConfig:
    return tiny_config(**(SMALL | changes))


def ignore(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    return compile_for_cpu(config(), path, ignore)


@pytest.fixture
def bundle(made, tmp_path):
    """A copy of it that a test may spoil."""
    return shutil.copytree(made.path, tmp_path / "bundle")


def start(path, **changes):
    """(executor, what was told)"""
    told: list[str] = []
    return build_executor(config(bundle=str(path), **changes), told.append), told


def open_bundle(path, **changes) -> tuple[Bundle | None, list[str]]:
    told: list[str] = []
    settings = config(bundle=str(path), **changes)
    resolved = resolve(settings, model_source(settings), "cpu")
    return usable_bundle(resolved, jax.devices()[:1], told.append), told


def tokens(executor) -> list[int]:
    executor.collect(executor.submit(make_plan(0, prefill=[(0, 0, [5], False)], patches=[(0, 0, 0, 1)])))
    first = executor.collect(executor.submit(make_plan(1, prefill=[(0, 1, [6], True)])))
    second = executor.collect(executor.submit(make_plan(2, decode=[(0, 2)])))
    return [int(first.token_ids[0]), int(second.token_ids[0])]


def test_a_bundle_starts_without_a_compile_and_gives_the_same_tokens(made, monkeypatch):
    plain = build_executor(config())
    with monkeypatch.context() as patch:
        patch.setattr(Program, "compile", lambda program: pytest.fail(f"{program.name} is compiled"))
        executor, told = start(made.path)
    assert made.compiled == len(Bundle.read(made.path).programs) > 4
    assert f"bundle {made.path}: {made.compiled} programs loaded, 0 to compile" in told
    assert tokens(executor) == tokens(plain)
    assert executor.info == plain.info
    executor.close()


def test_finished_programs_are_kept_on_a_second_run(bundle):
    file = next(bundle.glob("*.bin"))
    file.unlink()
    told: list[str] = []
    again = compile_for_cpu(config(), bundle, told.append)
    assert again.compiled == 1 and again.kept > 4 and file.is_file()
    assert any("programs are there from an earlier run" in line for line in told)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_num_seqs": 3}, "--max-num-seqs: 3 here, 1 in the bundle"),
        ({"max_logprobs": 1}, "--max-logprobs: 1 here, 2 in the bundle"),
        (
            {"logprobs_mode": "processed_logprobs"},
            "--logprobs-mode: processed_logprobs here, raw_logprobs in the bundle",
        ),
        ({"dtype": "bfloat16"}, "--dtype: bfloat16 here, float32 in the bundle"),
        ({"max_model_len": 32}, "--max-model-len: 32 here, 64 in the bundle"),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "model: llama of"),
    ],
)
def test_what_differs_is_named(made, changes, reason):
    assert open_bundle(made.path)[0] is not None
    found, told = open_bundle(made.path, **changes)
    assert found is None and reason in told[0] and told[0].startswith(f"bundle {made.path} not used, programs are comp")


def test_a_pool_of_another_size_is_compiled_for(made, monkeypatch):
    asked = []
    monkeypatch.setattr("lmjax.runtime.executor.compile_all", lambda programs, tell: asked.extend(programs) or {})
    executor, told = start(made.path, num_gpu_blocks_override=150)
    assert any("not used" in line and "its KV pool takes" in line for line in told)
    assert executor.info.num_blocks == (151,) and len(asked) == made.compiled
    executor.close()


def test_the_bundles_pool_is_taken_where_it_fits(made, monkeypatch):
    """Free memory is another at every start, and a bundle is of one size."""
    bundle = Bundle.read(made.path)
    settings = config(bundle=str(made.path), num_gpu_blocks_override=None)
    resolved = resolve(settings, model_source(settings), "cpu")
    told: list[str] = []
    plan, kept = plan_memory(resolved, bundle, told.append)
    assert kept is bundle and plan.num_blocks == bundle.pool.num_blocks and not told
    monkeypatch.setattr("lmjax.runtime.executor.cpu_pool_budget", lambda available: 100_000)
    plan, kept = plan_memory(resolved, bundle, told.append)
    assert kept is None and plan.num_bytes <= 100_000 and "its KV pool takes" in told[0]


@pytest.mark.parametrize("field", ["jax", "jaxlib", "instruction set", "lmjax's sources", "XLA_FLAGS"])
def test_every_fact_of_the_machine_counts(bundle, field):
    manifest = json.loads((bundle / MANIFEST).read_text())
    facts = manifest["identity"]
    found = Bundle.read(bundle).difference(facts | {field: "other"})
    assert found == f"{field}: other here, {facts[field] or 'none'} in the bundle"
    assert Bundle.read(bundle).difference(facts) is None


def test_a_damaged_program_is_compiled_and_named(bundle, caplog):
    entry = Bundle.read(bundle).programs["load_slot"]
    file = bundle / entry["file"]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    executor, told = start(bundle)
    assert "load_slot is compiled: its file is damaged" in caplog.text
    assert any(line.endswith("1 to compile") for line in told)
    executor.close()


def test_what_jax_cannot_load_is_compiled(bundle, caplog):
    manifest = json.loads((bundle / MANIFEST).read_text())
    entry = manifest["programs"]["copy_blocks"]
    (bundle / entry["file"]).write_bytes(b"not an executable")
    entry["sha256"] = hashlib.sha256(b"not an executable").hexdigest()
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    executor, told = start(bundle)
    assert "copy_blocks is compiled: " in caplog.text
    assert any(line.endswith("1 to compile") for line in told)
    executor.close()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_may_write_to_is_not_read(bundle, mode):
    bundle.chmod(mode)
    with pytest.raises(BundleError, match="others may write to"):
        Bundle.read(bundle)
    found, told = open_bundle(bundle)
    assert found is None and "not used" in told[0] and "others may write to" in told[0]


def test_a_file_that_others_may_write_to_is_not_read(bundle):
    (bundle / MANIFEST).chmod(0o666)
    with pytest.raises(BundleError, match="others may write to"):
        Bundle.read(bundle)


def test_a_new_bundle_is_private(made):
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in made.path.iterdir()} == {0o600}


def test_a_missing_or_strange_bundle_is_told(tmp_path):
    with pytest.raises(BundleError, match="No such file"):
        Bundle.read(tmp_path / "none")
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(BundleError, match="not a bundle's manifest"):
        Bundle.read(tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds something else than a bundle"):
        compile_for_cpu(config(), tmp_path, ignore)


def test_a_bundle_for_something_else_is_replaced(bundle, monkeypatch):
    monkeypatch.setattr("lmjax.runtime.compile_bundle.compile_all", lambda *_: {})
    told: list[str] = []
    again = compile_for_cpu(config(max_logprobs=0), bundle, told.append)
    assert again.kept == 0
    assert any("made anew: --max-logprobs: 0 here, 2 in the bundle" in line for line in told)
    assert not set(bundle.glob("*.bin")) and not Bundle.read(bundle).programs


def test_numbers_in_the_manifest_give_the_result_tree_back(made):
    entry = Bundle.read(made.path).programs["forward[1,1]"]
    assert entry["result"] == [0, [1], 2, 3, None]
    assert np.prod([len(entry[k]) for k in ("sha256", "arguments")]) == 64 * 16
