"""The command line. It wires the layers together; heavy imports come late."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmjax import __version__
from lmjax.cluster.detect import host_settings
from lmjax.config import ConfigError, EngineConfig
from lmjax.flags import (
    COMPILE,
    DEVICE,
    ENGINES,
    PLAN,
    SAMPLING,
    SERVER,
    SIZING,
    VERIFIED,
    VERIFY,
    Option,
    Parser,
    add_options,
    engine_options,
    settings_of,
)
from lmjax.types import EngineDeadError, ModelError

if TYPE_CHECKING:
    from lmjax.protocol import EngineClient
    from server.settings import ServerSettings

_SETTINGS_NAMES = {
    "api_key": "api_keys",
    "admin_api_key": "admin_api_keys",
    "served_model_name": "served_model_names",
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 fine, 1 failed (the model's files at fault among that), 2 wrong flags, settings or input, 130
    interrupted."""
    arguments = _parser().parse_args(argv)
    command = _COMMANDS[arguments.command]
    try:
        return command(arguments)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:  # settings, model files, input: ConfigError, WeightError, ParameterError, ...
        if type(error).__module__.split(".")[0] not in ("lmjax", "server"):
            raise  # not ours: a bug, which needs its traceback
        return _fail(arguments, error, 1 if isinstance(error, ModelError) else 2)
    except EngineDeadError as error:
        return _fail(arguments, error, 1)


def _fail(arguments: argparse.Namespace, error: Exception, code: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    label = getattr(arguments, "label", "")  # of one of several ranks
    print(f"lmjax {arguments.command}: {label}error: {lines[0]}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="lmjax", description="Serving large language models with JAX and XLA alone.")
    parser.add_argument("--version", action="version", version=f"lmjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    options = engine_options()

    serve = commands.add_parser("serve", help="the OpenAI-compatible server")
    add_options(serve, "server", (*SERVER, *ENGINES))
    generate = commands.add_parser("generate", help="answers in the terminal, or of a file of prompts")
    generate.add_argument("prompt", nargs="?", help="the prompt (without one: a conversation, or standard input)")
    generate.add_argument(
        "--file", metavar="FILE", help="prompts, one a line: a JSON text, or an object with prompt or messages"
    )
    generate.add_argument("--output", metavar="FILE", help="where the answers to --file go, a JSON object a line")
    generate.add_argument("--system", metavar="TEXT", help="the system message")
    generate.add_argument("--lora", metavar="NAME", help="answer with this adapter of --lora-modules")
    generate.add_argument("--raw", action="store_true", help="go on with the text itself, without the chat template")
    add_options(generate, "sampling", SAMPLING)
    plan = commands.add_parser("plan", help="whether and how a model fits NVIDIA cards, found without one")
    add_options(plan, "plan", PLAN)
    compile = commands.add_parser("compile", help="writes a bundle of executables that serve can start from")
    add_options(compile, "compile", COMPILE)
    for command in (plan, compile):
        add_options(command, "device", DEVICE)
    verify = commands.add_parser("verify", help="how far what is served is from float32, layer by layer")
    verify.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help="a directory, a .gguf file, a hub name [smollm2]"
    )
    add_options(verify, "verify", VERIFY)
    for command in (serve, generate, plan, compile, verify):
        command.add_argument("--config", metavar="FILE", help="JSON or TOML with settings, named as the flags")
    for command in (serve, generate):
        add_options(command, "engine", options)
    add_options(plan, "engine", _sizing_options())
    add_options(compile, "engine", _sizing_options("bundle"))
    add_options(verify, "engine", _engine_options(VERIFIED))
    return parser


def _sizing_options(*more: str) -> tuple[Option, ...]:
    return _engine_options((*SIZING, *more))


def _engine_options(names: tuple[str, ...]) -> tuple[Option, ...]:
    return tuple(option for option in engine_options() if option.name in names)


# --- serve --------------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    options = engine_options()
    given = settings_of(arguments, (*options, *SERVER, *ENGINES))
    _check_replicas(given)
    given |= host_settings(given, os.environ)
    _check_replicas(given)
    engine_names = {option.name for option in options}
    config = EngineConfig(**{k: v for k, v in given.items() if k in engine_names}).validate()
    replicas = given.pop("data_parallel_size", 1)
    arguments.label = config.rank_label
    settings = _server_settings({k: v for k, v in given.items() if k not in engine_names}, config)
    _check_loras(config, settings)
    if config.node_rank:
        return _follow(config, settings)
    from server.app import run_server

    return run_server(lambda: _start_engine(config, replicas), settings, config.rank_label)


def _check_replicas(given: dict[str, Any]) -> None:
    """Before anything that only matters to one engine on several hosts."""
    replicas = given.get("data_parallel_size", 1)
    if replicas < 1:
        raise ConfigError(f"--data-parallel-size: got {replicas}, must be at least 1")
    if replicas > 1 and given.get("nnodes", 1) > 1:
        raise ConfigError(f"--data-parallel-size: got {replicas}, must be 1 with --nnodes above 1")


def _check_loras(config: EngineConfig, settings: ServerSettings) -> None:
    if settings.lora_dir is not None and not config.enable_lora:
        raise ConfigError(f"--lora-dir: got {settings.lora_dir!r}, but needs --enable-lora")
    for name in settings.served_model_names or (config.model,):
        if name in config.lora_modules:
            raise ConfigError(f"--lora-modules: got the name {name!r}, which is that of the model itself")


def _follow(config: EngineConfig, settings: ServerSettings) -> int:
    from lmjax.engine.follower import run_follower
    from server.lifecycle import set_up_logging

    set_up_logging(settings.log_level, config.rank_label)
    # rank 0 may need its whole time-out, and a moment for the engine
    return run_follower(config, settings.shutdown_timeout + 10.0)


def _server_settings(given: dict[str, Any], config: EngineConfig) -> ServerSettings:
    from server.settings import ServerSettings

    if "api_key" not in given and os.environ.get("LMJAX_API_KEY"):
        given["api_key"] = [os.environ["LMJAX_API_KEY"]]
    values: dict[str, Any] = {
        _SETTINGS_NAMES.get(k, k): tuple(v) if isinstance(v, list) else v for k, v in given.items()
    }
    return ServerSettings(scheduling_policy=config.scheduling_policy, **values).validate()


async def _start_engine(config: EngineConfig, replicas: int) -> EngineClient:
    if replicas > 1:
        from lmjax.engine.replicas import Replicas

        return await Replicas.start(config, replicas)
    from lmjax.engine.async_engine import AsyncEngine

    return await AsyncEngine.start(config)


# --- generate -----------------------------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace) -> int:
    from lmjax.terminal import Job, run

    options = engine_options()
    given = settings_of(arguments, (*options, *SAMPLING))
    sampling_names = {option.name for option in SAMPLING}
    config = EngineConfig(**{k: v for k, v in given.items() if k not in sampling_names}).validate()
    if (arguments.file is None) != (arguments.output is None):
        raise ConfigError("--file and --output go together")
    if arguments.file is not None and arguments.prompt is not None:
        raise ConfigError("--file: there is a prompt on the command line, too; give one of them")
    job = Job(
        prompt=arguments.prompt,
        file=Path(arguments.file) if arguments.file else None,
        output=Path(arguments.output) if arguments.output else None,
        raw=arguments.raw,
        system=arguments.system,
        sampling={k: v for k, v in given.items() if k in sampling_names},
        lora=arguments.lora,
    )
    return run(job, config)


# --- plan, compile, verify --------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    from lmjax.planning import plan

    given = settings_of(arguments, (*_sizing_options(), *DEVICE, *PLAN))
    length, as_json = given.pop("length", None), given.pop("json", False)
    device = _device(given)
    return plan(EngineConfig(**given).validate(), device, length, as_json)


def _compile(arguments: argparse.Namespace) -> int:
    from lmjax.planning import compile

    given = settings_of(arguments, (*_sizing_options("bundle"), *DEVICE, *COMPILE))
    autotune_results = given.pop("autotune_results", None)
    device = _device(given)
    return compile(EngineConfig(**given).validate(), device, autotune_results)


def _verify(arguments: argparse.Namespace) -> int:
    from lmjax.verifying import Asked, verify

    given = settings_of(arguments, (*_engine_options(("model", *VERIFIED)), *VERIFY))
    own = {option.name: given.pop(option.name) for option in VERIFY if option.name in given}
    asked = Asked(token_ids=own.pop("prompt_token_ids", None), **own)
    return verify(EngineConfig(**given).validate(), asked)


def _device(given: dict[str, Any]) -> str:
    """Takes ``--device`` out of ``given``."""
    if "device" not in given:
        raise ConfigError(f"--device: is missing; it is {next(option.help for option in DEVICE)}")
    return given.pop("device")


_COMMANDS = {"serve": _serve, "generate": _generate, "plan": _plan, "compile": _compile, "verify": _verify}

if __name__ == "__main__":
    sys.exit(main())
