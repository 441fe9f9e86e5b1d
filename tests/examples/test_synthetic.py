"""examples/synthetic.py on a tiny model: killed and started again, it does what one run does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples import synthetic
from tests.runtime.tiny import tiny_model

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
FLAGS = (
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128"),
    *("--num-gpu-blocks-override", "50"),
)
CHAT = [{"role": "user", "content": "hi"}]


def write(path: Path, *entries: Any) -> Path:
    """Texts as they are, anything else as JSON."""
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def flags(prompts: Path, answers: Path, *more: str) -> list[str]:
    return [str(prompts), str(answers), "--model", str(tiny_model()), *FLAGS, *more]


def run(prompts: Path, answers: Path, *more: str) -> int:
    return synthetic.main(flags(prompts, answers, *more))


def refused(capsys, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def records(path: Path) -> dict[tuple[Any, int], dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(entry["id"], entry["sample"]): entry for entry in entries}
    assert len(found) == len(entries), "an answer is there twice"
    return found


def kill_after(lines: int, arguments: list[str], answers: Path) -> None:
    """Starts the program and kills it once so many answers are in the file."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.synthetic", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600
    while not answers.exists() or answers.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=60)[1].decode()
        time.sleep(0.005)
    process.kill()
    process.communicate()


def test_a_killed_run_goes_on_where_it_was(tmp_path, capsys):
    entries = [{"prompt": f"prompt {i}", "max_tokens": 40, "ignore_eos": True} for i in range(20)]
    prompts = write(tmp_path / "prompts.jsonl", *entries, {"id": "chat", "messages": CHAT, "max_tokens": 5})
    answers, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    kill_after(5, flags(prompts, answers, "--samples", "2"), answers)
    left = answers.read_bytes()
    assert 5 <= left.count(b"\n") < 42
    kept, torn = left[: left.rindex(b"\n") + 1].splitlines(keepends=True), b'{"id": 7, "sam'
    answers.write_bytes(b"".join(kept) + torn)  # a kill between two writes of one line is too rare to wait for
    assert run(prompts, answers, "--samples", "2") == 0
    assert f"{len(kept)}/42" in capsys.readouterr().err  # the bar begins with what was there
    assert answers.read_bytes().startswith(b"".join(kept))
    assert run(prompts, whole, "--samples", "2") == 0
    assert records(answers) == records(whole) and len(records(whole)) == 42
    assert len({entry["text"] for entry in records(whole).values()}) > 35  # samples and prompts differ
    done = answers.read_bytes()
    assert run(prompts, answers, "--samples", "2") == 0 and answers.read_bytes() == done


def test_bad_lines_are_named_and_the_others_are_done(tmp_path, capsys):
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"id": "good", "prompt": "fine", "max_tokens": 2},
        '{"prompt": "cut',
        "",
        {"prompt": "a", "messages": CHAT},
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "temperature": -1.0},
        {"id": "good", "prompt": "again"},
        {"prompt": 5},
        {"prompt": "x" * 200},
        '{"prompt": "half of a pair: \\ud800"}',
        {"messages": [{"role": "user"}]},
        {"messages": []},
    )
    answers = tmp_path / "answers.jsonl"
    assert run(prompts, answers, "--samples", "2") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(str(prompts))]
    assert sorted(int(line.split(":")[1]) for line in errors) == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    for what in ("temprature: unknown", "temperature: got -1.0", "'good' is that of line 1", "has 200 tokens"):
        assert any(what in line for line in errors), what
    assert set(records(answers)) == {("good", 0), ("good", 1)}


def test_answers_of_other_settings_are_not_mixed(tmp_path, capsys):
    prompts, answers = write(tmp_path / "prompts.jsonl", {"prompt": "a"}), tmp_path / "answers.jsonl"
    assert run(prompts, answers, "--max-tokens", "2") == 0
    before = answers.read_bytes()
    for more in (("--max-tokens", "3"), ("--seed", "1"), ("--dtype", "float16")):
        error = refused(capsys, prompts, answers, "--max-tokens", "2", *more)
        assert f"{answers}:1: is of another prompt, model or setting" in error
    write(prompts, {"prompt": "b"})
    assert "is of another prompt" in refused(capsys, prompts, answers, "--max-tokens", "2")
    assert answers.read_bytes() == before
    write(prompts, {"prompt": "a"}, {"prompt": "b"})
    assert run(prompts, answers, "--max-tokens", "2", "--samples", "2") == 0  # more of the same is welcome
    assert set(records(answers)) == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_files_that_are_at_fault(tmp_path, capsys):
    prompts, answers = write(tmp_path / "prompts.jsonl", {"prompt": "a"}), tmp_path / "answers.jsonl"
    assert "No such file" in refused(capsys, tmp_path / "missing", answers)
    write(answers, {"text": "of something else"})
    assert f"{answers}:1: is no answer of this program" in refused(capsys, prompts, answers)
    answers.unlink()
    with synthetic.lock(answers):
        assert "another run is writing" in refused(capsys, prompts, answers)
    assert "temperature: got -1.0" in refused(capsys, prompts, answers, "--temperature", "-1")
    assert "samples: got 0" in refused(capsys, prompts, answers, "--samples", "0")
