"""Command line flags and the ``--config`` file, both made from one table of options. Standard library only."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from lmjax.config import ConfigError, EngineConfig, flag


@dataclass(frozen=True)
class Option:
    """One setting. ``kind``: str, int, float, bool, dict (JSON), or list (of str).

    A list's flag takes several texts, or with ``repeat`` one, and may come several times. With ``pairs`` a dict's flag
    takes several ``name=path`` or JSON objects with name and path, as the config file's entry may be a list of those.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    choices: tuple[str, ...] | None = None
    repeat: bool = False
    pairs: bool = False

    def check(self, value: Any) -> Any:
        """A value from the config file; raises ``ConfigError``."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.kind is list and isinstance(value, str):
            value = [value]
        if self.pairs and isinstance(value, list):
            value = pairs_of(self.name, value)
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if type(value) is not self.kind or (self.kind is list and not texts):
            raise ConfigError(f"{flag(self.name)}: got {value!r}, must be {_NAMES[self.kind]}")
        return value


_NAMES = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "a JSON object",
    list: "a list of texts",
}

SERVER = (
    Option("host", str, "address to listen on", "0.0.0.0"),
    Option("port", int, "port to listen on (0: any free one)", 8000),
    Option("uds", str, "path of a Unix socket to listen on, instead of host and port"),
    Option("api_key", list, "a key that clients must send; may be repeated (or LMJAX_API_KEY)", repeat=True),
    Option(
        "admin_api_key",
        list,
        "a key for /v1/weights, /sleep, /wake_up, /is_sleeping and the routes of adapters, which are off without it; "
        "may be repeated",
        repeat=True,
    ),
    Option("lora_dir", str, "folder from which /v1/load_lora_adapter may load (--enable-lora; default: none)"),
    Option("served_model_name", list, "names under which the model is served (default: --model)"),
    Option("allowed_origins", list, "origins that browsers may call from (CORS); * for all"),
    Option("root_path", str, "prefix of the path that a proxy leaves on requests"),
    Option("shutdown_timeout", float, "seconds that running requests may go on after SIGTERM", 20.0),
    Option("ssl_keyfile", str, "the TLS key"),
    Option("ssl_certfile", str, "the TLS certificate"),
    Option("metrics_prefix", str, "first part of the metrics' names; vllm keeps old dashboards working", "lmjax"),
    Option("trust_request_chat_template", bool, "let requests bring their own chat template", False),
    Option("log_level", str, "how much is logged", "info", ("debug", "info", "warning", "error")),
)

ENGINES = (Option("data_parallel_size", int, "number of engines behind this server, each with its own devices", 1),)

# plan and compile: the card, and what of the engine's settings sizes its programs
DEVICE = (
    Option("device", str, "the card: a100-40, a100-80, h100, h200, b200, l4 or rtx6000pro; compile: or cpu, this one"),
)
PLAN = (
    Option("length", int, "tokens of a request, for concurrency and decode steps (default: the context length)"),
    Option("json", bool, "print JSON", False),
)
VERIFY = (
    Option("prompt", str, "the text to run (default: 50 words of prose, numbers and code)"),
    Option("prompt_token_ids", str, "token ids instead, as 1,2,3: no tokenizer is needed"),
    Option("max_error", float, "most relative RMS of any row (default: 0.001 in float32, 0.02 float16, 0.1 bfloat16)"),
    Option("reference", str, "another checkpoint of the same shape to compare with (default: the model itself)"),
    Option("json", bool, "print JSON", False),
)
VERIFIED = (
    *("revision", "download_dir", "hf_overrides", "tokenizer", "load_format", "seed", "dtype", "kv_cache_dtype"),
    *("quantization", "quantized_weights"),
    *("max_model_len", "block_size", "attention_backend", "compilation_cache_dir", "gpu_memory_utilization"),
)
COMPILE = (Option("autotune_results", str, "file that such a card has dumped (XLA's autotune results)"),)
SIZING = (
    *("model", "revision", "download_dir", "hf_overrides", "dtype", "kv_cache_dtype", "max_model_len", "block_size"),
    *("quantization", "quantized_weights"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_seqs", "max_logprobs"),
    *("max_num_batched_tokens", "enable_chunked_prefill", "attention_backend", "tensor_parallel_size"),
    *("pipeline_parallel_size", "enable_expert_parallel", "swap_space", "logprobs_mode", "deterministic"),
    *("enable_lora", "max_loras", "max_lora_rank"),
)

SAMPLING = (
    Option("max_tokens", int, "most tokens to generate (default: the rest of the context; with --raw 16)"),
    Option("min_tokens", int, "no end before so many tokens"),
    Option("temperature", float, "0: always the most likely token"),
    Option("top_p", float, "nucleus sampling"),
    Option("top_k", int, "only the k most likely tokens"),
    Option("min_p", float, "only tokens of at least this share of the most likely one's probability"),
    Option("repetition_penalty", float, "above 1: repeats get less likely"),
    Option("presence_penalty", float, "above 0: tokens that were used get less likely"),
    Option("frequency_penalty", float, "above 0: tokens get less likely with every use"),
    Option("stop", list, "a text that ends the answer; may be repeated", repeat=True),
    Option("ignore_eos", bool, "go on after the end of sequence"),
)


def engine_options() -> tuple[Option, ...]:
    """The fields of ``EngineConfig``."""
    hints = typing.get_type_hints(EngineConfig)
    options = []
    for f in fields(EngineConfig):
        default = None if f.default is MISSING else f.default
        choices, pairs = f.metadata["choices"], f.metadata["pairs"]
        options.append(Option(f.name, _kind(hints[f.name]), f.metadata["help"], default, choices, pairs=pairs))
    return tuple(options)


def pairs_of(name: str, entries: Iterable[Any]) -> dict[str, str]:
    """``name=path`` texts, or objects with name and path (also as JSON), as a dict. Raises ``ConfigError``."""
    found: dict[str, str] = {}
    for entry in entries:
        given = entry
        if isinstance(entry, str) and entry.lstrip().startswith("{"):
            try:
                given = json.loads(entry)
            except ValueError:
                raise ConfigError(f"{flag(name)}: got {entry!r}, which is no JSON") from None
        if isinstance(given, str):
            key, equals, path = given.partition("=")
            if not equals:
                raise ConfigError(f"{flag(name)}: got {given!r}, must be name=path or a JSON object with name and path")
            given = {"name": key, "path": path}
        if not isinstance(given, dict) or set(given) != {"name", "path"} or not all(map(_is_text, given.values())):
            raise ConfigError(f"{flag(name)}: got {entry!r}, must have name and path, two texts, and nothing else")
        if given["name"] in found:
            raise ConfigError(f"{flag(name)}: got the name {given['name']!r} twice")
        found[given["name"]] = given["path"]
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _kind(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return typing.get_origin(hint) or hint


class Parser(argparse.ArgumentParser):
    """Errors are one line; flags can't be abbreviated."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser: argparse.ArgumentParser, title: str, options: Iterable[Option]) -> None:
    """Flags that were not given leave no attribute, so that a config file can fill them."""
    group = parser.add_argument_group(title)
    for option in options:
        help = option.help.replace("%", "%%")
        if option.default is not None and "(default" not in help:
            shown = ("off", "on")[option.default] if option.kind is bool else option.default
            help += f" [{shown}]"
        settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help}
        if option.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif option.pairs:
            settings |= {"action": _Pairs, "nargs": "+", "metavar": "NAME=PATH"}
        elif option.kind is list:
            settings |= {"action": "append"} if option.repeat else {"action": "extend", "nargs": "+"}
            settings["metavar"] = "TEXT"
        else:
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else _METAVARS[option.kind]
            settings |= {"type": _PARSERS[option.kind], "metavar": metavar}
        group.add_argument(flag(option.name), **settings)


class _Pairs(argparse.Action):
    """Merges what several flags of a name give."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, {})
        try:
            given = pairs_of(self.dest, [*({"name": n, "path": p} for n, p in earlier.items()), *values])
        except ConfigError as error:
            parser.error(str(error))
        setattr(namespace, self.dest, given)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a JSON object")
    return value


_PARSERS: dict[type, Any] = {str: str, int: _integer, float: _number, dict: _json_object}
_METAVARS = {str: "TEXT", int: "N", float: "X", dict: "JSON"}


def settings_of(namespace: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """What was given, by flag or in the ``--config`` file; a flag wins. Raises ``ConfigError``."""
    known = {option.name: option for option in options}
    given = {name: value for name, value in vars(namespace).items() if name in known}
    path = getattr(namespace, "config", None)
    if path is None:
        return given
    values = {str(name).replace("-", "_"): value for name, value in _read(Path(path)).items()}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"--config: {path}: {name}: there is no such setting for this command")
        values[name] = known[name].check(value)
    return values | given


def _read(path: Path) -> dict[str, Any]:
    """TOML by the suffix .toml, else JSON."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        values = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--config: {path}: neither JSON nor (as *.toml) TOML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path}: must be an object with one entry a setting")
    return values
