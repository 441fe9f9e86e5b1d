"""Executors that the engine's process builds by name ("tests.engine.factories:quick")."""

import dataclasses
import logging
import os
import time
from types import SimpleNamespace

from lmjax.config import ConfigError, EngineConfig
from lmjax.types import AdapterError
from tests.fakes import FakeExecutor, fake_info
from tests.fixtures import model_dir

# the process starts without the model's tokenizer; it has ids below 512


def config(**changes) -> EngineConfig:
    return EngineConfig(model=str(model_dir("RAND")), **changes)


def executor(config: EngineConfig, progress=lambda line: None, **settings) -> FakeExecutor:
    progress("building a fake")
    info = fake_info(
        vocab_size=512,
        max_num_seqs=config.max_num_seqs or 16,
        max_model_len=config.max_model_len or 512,
        num_blocks=(config.num_gpu_blocks_override or 1024) + 1,
        max_logprobs=config.max_logprobs,
    )
    fake = FakeExecutor(info, **settings)
    fake.model_info = SimpleNamespace(dtype="float32", platform="cpu", device_count=1)
    return fake


def quick(config, progress):
    return executor(config, progress)


def slow(config, progress):
    """5 ms a step: there is time to do something in the middle of an answer."""
    return executor(config, progress, step_seconds=0.005)


def says(config, progress):
    """A line in the log of the engine's process."""
    logging.getLogger("lmjax.runtime").warning("is being made")
    return executor(config, progress)


def refuses(config, progress):
    progress("looking at the settings")
    raise ConfigError("--block-size: got 16, must be\nanything else")


def raises(config, progress):
    raise RuntimeError("the device is on fire\nand more lines")


def ends(config, progress):
    os._exit(7)


def hangs(config, progress):
    progress("hanging")
    time.sleep(600)


def fails_later(config, progress):
    """The loop fails in the 20th step."""
    fake = executor(config, progress, step_seconds=0.002)
    submit = fake.submit

    def failing(plan):
        if fake.steps == 20:
            raise RuntimeError("step 20 is bad\nwith details")
        return submit(plan)

    fake.submit = failing
    return fake


def hangs_later(config, progress):
    """The device never finishes the fifth step."""
    fake = executor(config, progress)
    collect = fake.collect

    def hanging(in_flight):
        if fake.steps >= 5:
            time.sleep(600)
        return collect(in_flight)

    fake.collect = hanging
    return fake


def with_adapters(config, progress):
    """5 ms a step. An adapter is a directory; ``slow`` takes its time, ``only0`` is one for the first engine alone."""
    fake = executor(config, progress, step_seconds=0.005)
    fake.info = dataclasses.replace(fake.info, max_loras=config.max_loras)

    def read(path):
        if not os.path.isdir(path):
            raise AdapterError(f"{path}: is no directory")
        if path.endswith("slow"):
            time.sleep(1.0)
        if path.endswith("only0") and os.environ["CUDA_VISIBLE_DEVICES"] != "0":
            raise AdapterError(f"{path}: not for this one")
        if path.endswith("bug"):
            raise ZeroDivisionError("deep inside")
        return SimpleNamespace(rank=4)

    fake.read_adapter = read
    fake.add_adapter = fake.drop_adapter = lambda *_: None
    return fake
