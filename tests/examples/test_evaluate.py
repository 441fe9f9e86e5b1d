"""examples/evaluate.py: the harness's scores through lmjax, in process and over HTTP, are those through transformers.

The tests with the harness need ``pip install 'lm-eval[api,hf]' torch`` (extra ``eval``, and the oracle's torch).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.evaluate import LmjaxLM, main, over_http
from lmjax import LLM, SamplingParams
from tests.fixtures import model_dir
from tests.runtime.tiny import tiny_model
from tests.server.live_server import LiveServer

SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128, "num_gpu_blocks_override": 64}
QUESTIONS = (
    ("The capital of France is", ("Paris", "Berlin", "a sort of cheese"), 0),
    ("The opposite of hot is", ("warm", "cold", "very old"), 1),
    ("Water is made of hydrogen and", ("oxygen", "iron", "sand"), 0),
    ("2 + 2 =", ("5", "22", "4"), 2),
    ("A week has", ("ten days", "seven days", "no days"), 1),
    ("The sun rises in the", ("east", "west"), 0),
    ("Dogs are", ("plants", "animals", "numbers", "colours"), 1),
    ("Shakespeare wrote", ("Hamlet", "the Odyssey", "Faust"), 0),
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good "
    "or for evil, in the superlative degree of comparison only.",
    "Ceci n'est pas une pipe: 3 < 4, naïve café, 世界.",
)
UNTIL = {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False}


@pytest.fixture(scope="module")
def tiny():
    with LLM(str(tiny_model()), **SETTINGS) as llm:
        yield llm


def test_a_greedy_answer_is_scored_as_it_was_generated(tiny):
    """Generated one by one, scored in one prefill."""
    context = list(range(40, 60))
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=0, ignore_eos=True)
    answer = tiny.generate(context, params, use_tqdm=False)[0].outputs[0]
    changed = [*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % 256]
    requests = [(None, context, answer.token_ids), (None, context, changed), (None, context[:-1], answer.token_ids)]
    (same, greedy), (other, not_greedy), (shorter, _) = LmjaxLM(tiny, progress=False)._loglikelihood_tokens(requests)
    assert same == pytest.approx(answer.cumulative_logprob, abs=1e-4) and greedy is True
    assert other < same and not_greedy is False
    assert abs(shorter - same) > 1e-3  # the context counts


def test_a_long_context_loses_its_beginning(tiny):
    lm = LmjaxLM(tiny, progress=False)
    assert lm.max_length == 126
    ids = [(7 * i) % 256 for i in range(300)]
    requests = [(None, ids[:290], ids[290:]), (None, ids[173:290], ids[290:]), (None, ids[:3], ids[3:])]
    cut, short, all_of_it = lm._loglikelihood_tokens(requests)
    assert cut == short
    assert all_of_it[0] < cut[0]  # as much of the continuation as fits


def test_special_tokens_are_not_doubled(tiny):
    lm = LmjaxLM(tiny, progress=False)
    assert lm.prefix_token_id == tiny.tokenizer.bos_token_id and lm.eot_token_id == tiny.tokenizer.eos_token_id
    assert lm.tok_encode("<s>ab") == [lm.prefix_token_id, *b"ab"]


# --- with the harness -------------------------------------------------------------------------------------------------


def harness() -> Any:
    return pytest.importorskip("lm_eval", reason="needs the harness: pip install 'lmjax[eval]'")


def write_tasks(folder: Path, answers: list[str]) -> str:
    """Three tasks with their data; returns their names. ``answers``: what the exact matches should be."""
    choice = [{"text": text, "choices": choices, "gold": gold} for text, choices, gold in QUESTIONS]
    exact = [{"text": text, "gold": gold} for (text, _, _), gold in zip(QUESTIONS, answers, strict=True)]
    rolling = [{"text": text} for text in TEXTS]
    kinds = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "exact": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{gold}}",
            "generation_kwargs": UNTIL,
            "metric_list": [{"metric": "exact_match"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }
    for (name, task), docs in zip(kinds.items(), (choice, exact, rolling), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        task |= {"task": f"local_{name}", "dataset_path": "json", "test_split": "test"}
        task |= {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML, too
    return ",".join(f"local_{name}" for name in kinds)


def evaluated(tasks: str, folder: Path, **model: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(**model, tasks=tasks.split(","), task_manager=manager, bootstrap_iters=0, log_samples=True)


def scores(results: dict[str, Any]) -> dict[str, float]:
    """``task/metric`` -> value."""
    return {
        f"{task}/{name}": value
        for task, found in results["results"].items()
        for name, value in found.items()
        if name.endswith(",none") and "stderr" not in name
    }


def responses(results: dict[str, Any]) -> list[Any]:
    """Every answer of the model, in the order of tasks, documents and requests."""
    samples = (s for task in sorted(results["samples"]) for s in results["samples"][task])
    return [response for s in sorted(samples, key=lambda s: (s["doc_hash"], s["doc_id"])) for response in s["resps"]]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = scores(found), scores(expected)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        exact = "acc" in name or "match" in name
        assert ours[name] == (value if exact else pytest.approx(value, rel=1e-5)), name
    pairs = list(zip(responses(found), responses(expected), strict=True))
    assert len(pairs) == sum(len(choices) for _, choices, _ in QUESTIONS) + len(QUESTIONS) + len(TEXTS)
    for [mine], [other] in pairs:
        if isinstance(other, str):
            assert mine == other
        elif isinstance(other, tuple | list):
            assert mine[0] == pytest.approx(other[0], abs=1e-3) and mine[1] == other[1]
        else:
            assert mine == pytest.approx(other, abs=1e-3)


class Server(LiveServer):
    """``fixture`` is a directory here."""

    def command(self) -> list[str]:
        flags = [part for k, v in SETTINGS.items() for part in ("--" + k.replace("_", "-"), str(v))]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "-m", "lmjax.cli", "serve", "--model", self.fixture, *address, *flags]


def exported(path: Path) -> Path:
    from lmjax.weights.embedded import export

    export(path)
    return path


@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_the_harness_gives_the_scores_of_transformers(name, tmp_path, monkeypatch):
    harness()
    torch = pytest.importorskip("torch", reason="needs transformers with torch, to compare with")
    torch.set_num_threads(1)  # on cores that others use, too, its threads wait for each other
    pytest.importorskip("accelerate", reason="needs the harness's transformers: pip install 'lm-eval[hf]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = str(model_dir("RAND") if name == "tiny" else exported(tmp_path / "model"))
    with LLM(model, **SETTINGS) as llm:
        prompts = [text for text, _, _ in QUESTIONS]
        params = SamplingParams(temperature=0.0, max_tokens=UNTIL["max_gen_toks"], stop=UNTIL["until"])
        said = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        tasks = write_tasks(tmp_path, [text if i % 3 else "nothing" for i, text in enumerate(said)])
        ours = evaluated(tasks, tmp_path, model=LmjaxLM(llm, progress=False))
        max_length = LmjaxLM(llm).max_length
    # torch's float32 log_softmax over 49,152 tokens is 9e-6 too high for every token: 1e-3 in a text of 120
    pretrained = {"pretrained": model, "dtype": "float32", "softmax_dtype": "float64", "max_length": max_length}
    theirs = evaluated(tasks, tmp_path, model="hf", model_args=pretrained, device="cpu", batch_size=1)
    assert 0 < scores(theirs)["local_exact/exact_match,none"] < 1
    assert_equal(ours, theirs)
    server = Server(model)
    try:
        over = evaluated(tasks, tmp_path, **over_http(f"http://127.0.0.1:{server.port}/v1"))
    finally:
        server.close()
    assert_equal(over, theirs)
    print({name: (value, scores(ours)[name], scores(over)[name]) for name, value in scores(theirs).items()})


@pytest.mark.filterwarnings("ignore")
def test_the_command_line(tmp_path, monkeypatch, capsys):
    harness()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = write_tasks(tmp_path, ["nothing"] * len(QUESTIONS)).split(",")[0]
    flags = [part for k, v in SETTINGS.items() for part in ("--" + k.replace("_", "-"), str(v))]
    output = tmp_path / "results.json"
    arguments = ["--tasks", tasks, "--include-path", str(tmp_path), "--model", str(model_dir("RAND")), *flags]
    assert main([*arguments, "--limit", "4", "--output", str(output)]) == 0
    assert 0 <= json.loads(output.read_text())["local_choice"]["acc,none"] <= 1


def test_the_command_line_refuses_what_it_would_not_use(capsys):
    with pytest.raises(SystemExit):
        main(["--tasks", "a", "--base-url", "http://localhost:1", "--max-num-seqs", "4"])
    assert "--max-num-seqs: is the server's to know" in capsys.readouterr().err
