"""The launchers: what they make of their arguments. ``launch_local.sh`` runs with ``echo`` for ranks."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from types import ModuleType

import pytest

from tests.server.live_server import ROOT

TP, PP = "--tensor-parallel-size", "--pipeline-parallel-size"


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {"LMJAX": "echo"} | environment
    command = [str(ROOT / "scripts/launch_local.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("counts", [("2",), ("2", "0"), ("0", "2"), ("2", "x"), ("", "2"), ("2", "--port")])
def test_counts_that_are_none(counts: tuple[str, ...]) -> None:
    done = launch(*counts)
    assert done.returncode == 2 and "PROCESSES DEVICES" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ((), (4, 1)),
        ((PP, "4"), (1, 4)),
        ((f"{PP}=2",), (2, 2)),
        ((TP, "1", PP, "4"), (1, 4)),
        ((TP, "3", f"{TP}=2", PP, "2", "--model", PP), (2, 2)),
    ],
)
def test_sizes_that_fit(flags: tuple[str, ...], sizes: tuple[int, int]) -> None:
    """The last one of a flag counts, as in ``lmjax serve``."""
    done = launch("2", "2", *flags)
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(sorted(done.stdout.splitlines())):
        found = {TP: "1", PP: "1"}
        words = line.replace("=", " ").split()
        for name, value in itertools.pairwise(words):
            if name in found and value.isdigit():
                found[name] = value
        assert (int(found[TP]), int(found[PP])) == sizes and f"--nnodes 2 --node-rank {rank}" in line


@pytest.mark.parametrize(
    ("flags", "got"),
    [((TP, "3", PP, "2"), "3 x 2"), ((TP, "2"), "2 x 1"), ((PP, "3"), "1 x 3"), ((PP, "8"), "0 x 8")],
)
def test_sizes_for_another_number_of_devices_are_refused(flags: tuple[str, ...], got: str) -> None:
    done = launch("2", "2", *flags)
    assert done.returncode == 2 and not done.stdout
    assert f"must be PROCESSES x DEVICES (2 x 2 = 4), got {got}\n" in done.stderr


def test_what_is_no_size_is_left_to_serve() -> None:
    assert launch("2", "2", TP, "x").stdout.count(f"{TP} x") == 4
    assert launch("2", "2", CUDA_VISIBLE_DEVICES="0,1,2").returncode == 2


def test_launch_ray_takes_the_same_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("placement_group", "remove_placement_group"):
        setattr(sys.modules["ray.util.placement_group"], name, None)
    sys.modules["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = None  # type: ignore[attr-defined]
    script = runpy.run_path(str(ROOT / "scripts/launch_ray.py"))

    def tensor(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["launch_ray", "--nnodes", "2", "--devices", "2", "--", *flags])
        return script["_options"]().tensor

    assert [tensor(), tensor(PP, "4"), tensor(TP, "2", f"{PP}=2")] == [4, 1, 2]
    with pytest.raises(SystemExit):
        tensor(TP, "3", PP, "2")
    assert "must be --nnodes x --devices (2 x 2 = 4), got 3 x 2" in capsys.readouterr().err
