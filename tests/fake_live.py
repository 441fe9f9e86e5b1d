"""Weights and sleep of the fake executor: a file of weights is a number."""

from __future__ import annotations

import contextlib

import numpy as np


class FakeLoading:
    """Takes two looks."""

    def __init__(self, path: str | int):
        self.path, self._looks = path, 2
        self.error = None if str(path).isdigit() else ValueError(f"{path}: no such file")

    def done(self) -> bool:
        self._looks -= 1
        return self._looks <= 0


class FakeLive:
    weights: int  # how often they were changed, or what was loaded
    level: int  # of sleep
    in_flight: int
    pools: list[np.ndarray]
    host_pools: list[np.ndarray]

    @property
    def has_params(self) -> bool:
        return self.level < 2

    def has_lost_params(self) -> bool:
        return False

    def context(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def start_loading(self, path: str | None) -> FakeLoading:
        assert path is not None or self.level == 2
        return FakeLoading(self.weights if path is None else path)

    def set_params(self, params: FakeLoading) -> None:
        assert params.error is None
        self.weights = int(params.path)
        self.level = min(self.level, 1)

    def sleep(self, level: int) -> None:
        assert not self.in_flight
        self.level = level
        for pool in self.pools + self.host_pools:
            pool[:] = -1

    def wake(self) -> None:
        assert self.has_params
        self.level = 0
