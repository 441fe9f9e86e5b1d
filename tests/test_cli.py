"""The command line: flags, the config file, one-line errors, ``generate``, the life of ``serve``'s two processes."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmjax import cli, terminal
from lmjax.config import ConfigError, EngineConfig
from lmjax.engine.llm import LLM
from lmjax.flags import SERVER, Parser, add_options, engine_options, settings_of
from tests.engine.factories import config
from tests.engine.test_process import alive

ROOT = Path(__file__).parents[1]
MODEL = config().model


def command(*arguments, input=None, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "lmjax.cli", *arguments],
        cwd=ROOT,
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in ("serve", "generate", "plan", "compile", "verify"))],
)
def test_help_is_quick_because_it_imports_little(arguments):
    code = (
        "import sys; from lmjax import cli\n"
        f"try: cli.main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"numpy", "jax", "aiohttp", "transformers", "tokenizers", "zmq", "msgspec", "torch"}
    assert not heavy & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "x"], "--port: got 'x', must be an integer"),
        (["serve", "--port", "99999"], "--port: got 99999, must be between 0 and 65535"),
        (
            ["serve", "--data-parallel-size", "2", "--nnodes", "2"],  # whatever else several hosts need
            "--data-parallel-size: got 2, must be 1 with --nnodes above 1",
        ),
        (["serve", "--dtype", "int3"], "--dtype: got 'int3', must be one of auto, float32, bfloat16, float16"),
        (["serve", "--block-size", "7"], "--block-size: got 7, must be a power of two up to 256"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: got 0, must be an integer of at least 1"),
        (["serve", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization: got 2.0, must be in (0, 1]"),
        (["serve", "--gpu-memory-utilization", "much"], "got 'much', must be a number"),
        (["serve", "--hf-overrides", "[1]"], "--hf-overrides: got '[1]', must be a JSON object"),
        (["serve", "--max-num-se", "3"], "--max-num-se"),
        (["serve", "--ssl-keyfile", "k"], "--ssl-certfile and --ssl-keyfile go together"),
        (["serve", "--log-level", "loud"], "--log-level: got 'loud'"),
        (["serve", "--shutdown-timeout", "-1"], "--shutdown-timeout: got -1.0"),
        (["serve", "--config", "/no/file"], "--config: /no/file: No such file"),
        (["generate", "--temperature", "-1", "hi"], "temperature: got -1.0, must be"),
        (["generate", "--file", "x"], "--file and --output go together"),
        (["generate", "hi", "--file", "x", "--output", "y"], "there is a prompt on the command line, too"),
        (["generate", "--file", "/no/file", "--output", "y"], "--file: /no/file: No such file"),
        (["plan", "--model", "x"], "--device: is missing"),
        (["plan", "--device", "h300", "--model", "tests/configs/llama-3.1-8b.json"], "--device: got 'h300', must be"),
        (["plan", "--device", "h200", "--port", "8000"], "--port"),
        (["compile", "--device", "cpu"], "--bundle: is missing"),
        (["compile", "--device", "cpu", "--bundle", "x", "--autotune-results", "y"], "cpu is one device"),
        (["serv"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_wrong_value_is_one_line_and_code_2(arguments, message, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr()
    assert code == 2 and written.out == ""
    assert message in written.err and written.err.startswith("lmjax") and written.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi"],
        ["serve", "--host", "127.0.0.1", "--port", "0", "--log-level", "error"],
        ["plan", "--device", "h200"],
    ],
)
def test_a_model_that_is_not_there_is_one_line_and_code_1(arguments, capsys):
    """tests/test_malformed.py has what is wrong with one that is there."""
    assert cli.main([*arguments, "--model", "/no/config.json"]) == 1
    written = capsys.readouterr()
    assert written.out == "" and written.err.count("\n") == 1
    assert written.err.startswith(f"lmjax {arguments[0]}: error: '/no/config.json': no such file")


def parsed(*arguments):
    parser = Parser()
    parser.add_argument("--config")
    options = (*engine_options(), *SERVER)
    add_options(parser, "all", options)
    return settings_of(parser.parse_args(arguments), options)


def test_every_engine_setting_has_a_flag():
    values = {str: "x", int: "3", float: "0.5", dict: '{"a": 1}'}
    for option in engine_options():
        name = "--" + option.name.replace("_", "-")
        if option.kind is bool:
            assert parsed(name) == {option.name: True}
            assert parsed(name.replace("--", "--no-", 1)) == {option.name: False}
        elif option.pairs:
            assert parsed(name, "a=b", '{"name": "c", "path": "d"}') == {option.name: {"a": "b", "c": "d"}}
        else:
            value = values[option.kind]
            assert parsed(name, value) == {option.name: json.loads(value) if option.kind is not str else value}
    assert parsed() == {} and EngineConfig(**parsed("--model", "m")).model == "m"


def test_lists():
    assert parsed("--api-key", "a", "--api-key", "b") == {"api_key": ["a", "b"]}
    assert parsed("--served-model-name", "a", "b") == {"served_model_name": ["a", "b"]}


def test_config_file(tmp_path):
    as_json, as_toml = tmp_path / "c.json", tmp_path / "c.toml"
    as_json.write_text('{"max-num-seqs": 5, "port": 1, "api_key": "k", "gpu_memory_utilization": 1}')
    as_toml.write_text('max-num-seqs = 5\nport = 1\napi_key = ["k"]\ngpu_memory_utilization = 1\n')
    for path in (as_json, as_toml):
        found = parsed("--config", str(path), "--port", "2")
        assert found == {"max_num_seqs": 5, "port": 2, "api_key": ["k"], "gpu_memory_utilization": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_seqs": 5}', "max_seqs: there is no such setting"),
        ('{"port": "8000"}', "--port: got '8000', must be an integer"),
        ('{"port": true}', "--port: got True, must be an integer"),
        ('{"async_scheduling": 1}', "--async-scheduling: got 1, must be true or false"),
        ('{"api_key": [1]}', r"--api-key: got \[1\], must be a list of texts"),
        ("[]", "must be an object"),
        ("{", "neither JSON nor"),
    ],
)
def test_wrong_config_file(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parsed("--config", str(path))


def test_server_settings(monkeypatch):
    monkeypatch.setenv("LMJAX_API_KEY", "from-env")
    settings = cli._server_settings({"served_model_name": ["a", "b"]}, EngineConfig(scheduling_policy="priority"))
    assert settings.api_keys == ("from-env",) and settings.served_model_names == ("a", "b")
    assert settings.scheduling_policy == "priority"
    assert cli._server_settings({"api_key": ["x"]}, EngineConfig()).api_keys == ("x",)
    monkeypatch.delenv("LMJAX_API_KEY")
    shown = {option.name: option.default for option in SERVER if option.default is not None}
    assert cli._server_settings({}, EngineConfig()) == cli._server_settings(shown, EngineConfig())


# --- generate -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_llm(monkeypatch):
    monkeypatch.setitem(LLM.__init__.__kwdefaults__, "executor", "tests.engine.factories:quick")


def answer_of(prompt, **params):
    from lmjax import SamplingParams

    with LLM(MODEL) as llm:
        ids = llm.encode_chat([{"role": "user", "content": prompt}])
        return llm.generate(ids, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text


def test_generate_prints_the_answer(fake_llm, capsys):
    assert cli.main(["generate", "--model", MODEL, "--temperature", "0", "--max-tokens", "20", "hi"]) == 0
    assert capsys.readouterr().out == answer_of("hi", temperature=0.0, max_tokens=20) + "\n"


def test_generate_reads_standard_input(fake_llm, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert cli.main(["generate", "--model", MODEL, "--temperature", "0", "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out == answer_of("hi", temperature=0.0, max_tokens=20) + "\n"


def test_a_conversation_remembers(fake_llm, capsys, monkeypatch):
    seen = []
    answer = terminal._answer

    def watched(llm, job, messages):
        seen.append([*messages])
        return answer(llm, job, messages)

    def said(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(terminal, "_answer", watched)
    monkeypatch.setattr("builtins.input", said)
    monkeypatch.setattr("sys.stdin", argparse.Namespace(isatty=lambda: True))
    lines = iter(["hi", "   ", "and?"])
    flags = ["--temperature", "0", "--max-tokens", "5", "--system", "Be brief."]
    assert cli.main(["generate", "--model", MODEL, *flags]) == 0
    assert [[m["role"] for m in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert capsys.readouterr().out.count("\n") == 2 + seen[1][2]["content"].count("\n")


def test_generate_a_file(fake_llm, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        "hi",
        {"prompt": "hi", "max_tokens": 3, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    flags = ["--file", str(source), "--output", str(target), "--temperature", "0", "--max-tokens", "20"]
    assert cli.main(["generate", "--model", MODEL, *flags]) == 0
    results = [json.loads(line) for line in target.read_text().splitlines()]
    expected = answer_of("hi", temperature=0.0, max_tokens=20)
    assert results[0]["text"] == results[2]["text"] == expected and results[0]["prompt"] == "hi"
    assert results[1]["num_tokens"] == 3 and results[1]["finish_reason"] == "length"
    assert "3/3" in capsys.readouterr().err


def test_generate_with_adapters(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(LLM.__init__.__kwdefaults__, "executor", "tests.engine.factories:with_adapters")
    for name in "ab":
        (tmp_path / name).mkdir()
    flags = ["--model", MODEL, "--enable-lora", "--lora-modules", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]
    flags += ["--temperature", "0", "--max-tokens", "8"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    named = [{"prompt": "hi", "lora": name} for name in ("a", "b", None)]
    source.write_text("\n".join(map(json.dumps, ["hi", *named])))
    assert cli.main(["generate", *flags, "--file", str(source), "--output", str(target), "--lora", "b"]) == 0
    results = [json.loads(line) for line in target.read_text().splitlines()]
    texts = [result["text"] for result in results]
    assert texts[0] == texts[2] and len(set(texts)) == 3 and [r.get("lora") for r in results] == [None, "a", "b", None]
    for name, text in ((["--lora", "a"], texts[1]), ([], texts[3])):
        capsys.readouterr()
        assert cli.main(["generate", *flags, *name, "hi"]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert cli.main(["generate", *flags, "--lora", "c", "hi"]) == 2
    assert "--lora: got 'c', must be an adapter of --lora-modules (a, b)" in capsys.readouterr().err
    source.write_text('{"prompt": "hi", "lora": "c"}')
    assert cli.main(["generate", *flags, "--file", str(source), "--output", str(target)]) == 2
    assert ":1: lora: got 'c', must be an adapter of --lora-modules (a, b)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ("3", ":2: must be a text, or an object with either"),
        ('{"prompt": 3}', ":2: prompt: must be a text"),
        ('{"prompt": "a", "top_q": 1}', ":2: top_q: unknown"),
        ('{"prompt": "a", "top_p": 7}', r":2: top_p: got 7, must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('"fine"\n' + line)
    assert cli.main(["generate", "--file", str(source), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- serve --------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += task.read_text().split()
    return found


class Server:
    def __init__(self, factory, *flags):
        self.port = free_port()
        arguments = ["serve", "--model", MODEL, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_fake", factory, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def status(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def wait_ready(self):
        deadline = time.monotonic() + 30
        while self.status("/ready") != 200:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        [self.engine] = children(self.process.pid)

    def stream(self, **fields):
        body = {"model": MODEL, "prompt": "x", "stream": True, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=20)

    def end(self, timeout=60):
        _, error = self.process.communicate(timeout=timeout)
        return self.process.returncode, error


@contextmanager
def serving(factory, *flags):
    server = Server(factory, *flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_sigterm_drains_and_leaves_no_process():
    with serving("slow") as server:
        server.wait_ready()
        with server.stream(max_tokens=100) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        assert '"finish_reason":"length"' in text.replace(" ", "") and text.rstrip().endswith("data: [DONE]")
        code, error = server.end()
        assert code == 0, error
        assert not alive(server.engine)


def test_a_killed_engine_ends_streams_and_server():
    with serving("slow") as server:
        server.wait_ready()
        with server.stream(max_tokens=450) as stream:
            stream.readline()
            killed = time.monotonic()
            os.kill(int(server.engine), signal.SIGKILL)
            text = stream.read().decode()
            assert time.monotonic() - killed < 5
        assert '"error"' in text and "signal 9" in text
        assert server.status("/health") == 503
        code, _ = server.end(timeout=10)
        assert code == 1 and time.monotonic() - killed < 10


@pytest.mark.parametrize(
    ("factory", "code", "message"),
    [("refuses", 2, "--block-size: got 16, must be"), ("raises", 1, "RuntimeError: the device is on fire")],
)
def test_a_failed_start_is_one_line(factory, code, message):
    with serving(factory, "--log-level", "error") as server:
        begin = time.monotonic()
        found, error = server.end()
        assert found == code and time.monotonic() - begin < 10
        assert error.rstrip().splitlines()[-1].startswith("lmjax serve: error: ") and message in error
        if factory == "refuses":
            assert error.count("\n") == 1


def test_a_busy_port_is_found_before_anything_is_loaded():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = command("serve", "--model", "/no/model", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and str(port) in done.stderr


def test_ctrl_c_while_loading():
    with serving("hangs") as server:
        deadline = time.monotonic() + 20
        while not children(server.process.pid) or server.status("/health") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [engine] = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        code, error = server.end()
        assert code == 0, error
        assert not alive(engine)
