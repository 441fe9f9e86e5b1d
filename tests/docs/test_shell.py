"""Every shell block of README.md and docs/ is executed, or stands below with the reason why not; all flags exist.

A block is named by its page and its first line. A new one has to be put into a list.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs import shell
from tests.docs.blocks import ALL, Block, blocks_of
from tests.docs.test_python import NEEDS
from tests.peft_dirs import make_adapter
from tests.runtime.tiny import tiny_model

LANGUAGES = {"python", "bash", "console", "text"}
CAPITAL = "$ curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
WEIGHTS = "curl -sf localhost:8000/v1/weights -H 'Authorization: Bearer ADMIN' -H 'Content-Type: application/json'"


@dataclass(frozen=True)
class Run:
    """How a block is executed. ``8000`` and ``8123`` become a free port.

    server: flags of an ``lmjax serve`` that runs meanwhile. replaced: other texts that become others. servers: every
    command is a server in the foreground: it is started, has to become ready, and is told to end. expect: patterns in
    what the block prints.
    """

    server: str | None = None
    replaced: dict[str, str] = field(default_factory=dict)
    servers: bool = False
    expect: tuple[str, ...] = ()
    needs: str | None = None


RUN = {
    ("README.md", CAPITAL): Run(server="", expect=("chat.completion", "The capital of France is Paris")),
    ("docs/distributed.md", 'small="--max-num-seqs 8 --max-num-batched-tokens 64 --max-model-len 512"'): Run(
        servers=True,  # with 4 layers of random weights, to be done in a minute
        replaced={
            'small="': """small='--load-format dummy --hf-overrides {"num_hidden_layers":4} """,
            '--max-model-len 512"': "--max-model-len 512'",
        },
    ),
    ("docs/embeddings.md", "curl -sf localhost:8000/v1/embeddings -H 'Content-Type: application/json'"): Run(
        server="--load-format dummy --hf-overrides '{\"num_hidden_layers\":2}' --max-num-seqs 4 "
        "--max-num-batched-tokens 32 --max-model-len 64",
        expect=('"embedding"', '"score"', '"relevance_score"'),
    ),
    ("docs/gpu.md", "lmjax plan --device h200 --tensor-parallel-size 8"): Run(
        replaced={"meta-llama/Llama-3.3-70B-Instruct": str(Path(__file__).parents[1] / "configs/llama-3.3-70b.json")},
        expect=("h200",),
    ),
    ("docs/live_weights.md", WEIGHTS): Run(
        server="--model {tiny} --max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 64 --admin-api-key ADMIN",
        replaced={"/checkpoints/100": "{tiny}"},
        expect=('"version": ?"step-100", ?"seconds"', '"version": ?"step-100"}'),
    ),
    ("docs/lora.md", "curl -sf localhost:8000/v1/load_lora_adapter"): Run(
        server="--model {tiny} --max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 64 --admin-api-key ADMIN "
        "--enable-lora --max-loras 2 --lora-dir {adapters}",
        expect=("'sql' added successfully", '"id": ?"sql"', '"model": ?"sql"', "'sql' removed successfully"),
    ),
    ("docs/pipelines.md", "python -m lmjax.weights.embedded --out checkpoint"): Run(
        expect=('"version": ?"step-100", ?"seconds"', '"is_sleeping": ?true', '"version": ?"step-100"}')
    ),
    ("docs/verify.md", '$ lmjax verify DIR --dtype bfloat16 --prompt "Once upon a time"'): Run(
        replaced={"DIR": "{tiny}"}, expect=("bfloat16 on cpu", "logits", "most likely next token")
    ),
    ("docs/pipelines.md", "mkdir -p tasks"): Run(needs="lm_eval", expect=("exact_match", "exact_match")),
}
NOT_RUN = {
    ("README.md", "make serve"): "the environment this test runs in is made by it; it would install it anew",
    ("docs/distributed.md", "lmjax serve --model DIR --tensor-parallel-size 16 --nnodes 2"): "needs two hosts",
    ("docs/gpu.md", "lmjax compile --device h200 --model M --bundle DIR"): "needs a card to serve with the bundle",
    ("docs/quantization.md", "lmjax serve --model org/model-GPTQ"): "models of the hub; tests of their own have them",
    ("docs/gpu.md", "python -m benchmarks.gpu"): "needs a card; tests/benchmarks/test_gpu.py runs its second line",
}
SHELL = [block for block in ALL if block.language in ("bash", "console")]


def entries(block: Block, listed) -> list:
    return [entry for (page, first), entry in listed.items() if page == block.page and block.first.startswith(first)]


def test_every_block_says_what_it_is():
    assert not [f"{block} [{block.language}]" for block in ALL if block.language not in LANGUAGES]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_block_is_in_one_list(block):
    assert len(entries(block, RUN) + entries(block, NOT_RUN)) == 1, f"{block.key}: put it into RUN or NOT_RUN"


@pytest.mark.parametrize("key", [*RUN, *NOT_RUN], ids=str)
def test_the_lists_name_blocks_that_are_there(key):
    assert len([b for b in SHELL if b.page == key[0] and b.first.startswith(key[1])]) == 1


def test_a_fence_that_is_left_open_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\n    ```\n```bash\nls\n")
    with pytest.raises(ValueError, match=r"page\.md:7"):
        blocks_of(page)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_the_flags_in_a_block_exist(block):
    for command in shell.block_commands(block):
        assert not shell.unknown_flags(command), command


def test_the_flags_in_the_text_exist():
    found = list(shell.inline_commands())
    assert len(found) > 10
    assert not [(page, command, flags) for page, command in found if (flags := shell.unknown_flags(command))]


@pytest.mark.parametrize(
    "command",
    [
        "lmjax serve --no-such 1",
        "a=1 lmjax plan --sleep",
        "python -m examples.synthetic a --no-such",
        "scripts/launch_local.sh 2 2 --x",
    ],
)
def test_a_flag_that_is_not_there_is_found(command):
    assert len(shell.unknown_flags(command)) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", [block for block in SHELL if entries(block, RUN)], ids=str)
def test_it_runs(block, tmp_path):
    [how] = entries(block, RUN)
    if how.needs and importlib.util.find_spec(how.needs) is None:
        pytest.skip(NEEDS[how.needs])
    output = shell.run_shell(script(block, how, tmp_path), tmp_path, timeout=1100)
    for pattern in how.expect:
        found = re.search(pattern, output)
        assert found, f"no {pattern!r} in\n{output[-4000:]}"
        output = output[found.end() :]


def script(block: Block, how: Run, cwd: Path) -> str:
    port, tiny = shell.free_port(), str(tiny_model())
    text = "\n".join(block.commands) + "\n" if block.language == "console" or how.servers else block.text
    for old, new in how.replaced.items():
        assert old in text
        text = text.replace(old, new.replace("{tiny}", tiny))
    text = re.sub(r"\b(8000|8123)\b", str(port), text)
    ready = shell.READY.format(port=port)
    if how.servers:
        ended = f"{ready}\nkill $server\nwait $server\n"
        starts = r"^((?:lmjax serve|scripts/)[^#\n]*).*$"
        text = re.sub(starts, lambda m: f"{m[1]} --port {port} & server=$!\n{ended}", text, flags=re.MULTILINE)
        text = text.replace("scripts/", f"MASTER_PORT={shell.free_port()} {shell.ROOT}/scripts/")
    if how.server is not None:
        flags = how.server.replace("{tiny}", tiny)
        if "{adapters}" in flags:
            make_adapter(cwd / "adapters" / "sql-v2", model=json.loads(Path(tiny, "config.json").read_text()))
            flags = flags.replace("{adapters}", str(cwd / "adapters"))
        text = f"lmjax serve {flags} --port {port} >&2 &\n{ready}\n{text}"
    return text
