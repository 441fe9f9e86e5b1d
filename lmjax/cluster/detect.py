"""Which rank of how many this process is, from flags and from what Slurm, Open MPI and Kubernetes tell their tasks.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmjax.config import ConfigError, flag

NAMES = ("nnodes", "node_rank", "master_addr", "master_port")
# ports above those that hosts give out by themselves on most systems; jobs on one host get different ones
_PORTS, _FIRST_PORT = 4096, 61440


def host_settings(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """``nnodes``, ``node_rank``, ``master_addr`` and ``master_port`` as far as they are known; flags win.

    given: settings from flags or the config file. Empty where nothing says that there are several processes, and with
    ``--nnodes 1``. Raises ``ConfigError`` for flags that nothing completes.
    """
    flags = {name: given[name] for name in NAMES if given.get(name) is not None}
    if flags.get("nnodes") == 1:
        return flags
    launcher, found = _detect(environ, "nnodes" in flags)
    settings = found | flags
    if not settings:
        return {}
    needed = [name for name in NAMES[:3] if name not in settings]
    if needed:
        told = f"{launcher} tells {', '.join(found)}" if found else "no launcher was found that tells it"
        have = " ".join(f"{flag(name)} {value}" for name, value in flags.items())
        raise ConfigError(f"{flag(needed[0])}: is missing: {have + ' needs it; ' if have else ''}{told}")
    return settings


def _detect(environ: Mapping[str, str], sized: bool) -> tuple[str, dict[str, Any]]:
    """The launcher's name and what it tells. Open MPI first: Slurm may have started only its helpers."""
    for name, read in (("Open MPI", _open_mpi), ("Slurm", _slurm), ("LeaderWorkerSet", _leader_worker_set)):
        found = read(environ)
        if found:
            return name, found
    index = _number(environ, "JOB_COMPLETION_INDEX")
    if sized and index is not None:  # an indexed Job does not tell its size
        return "the Kubernetes Job", {"node_rank": index}
    return "", {}


def _open_mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    size, rank = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    if size is None or rank is None or size < 2:
        return {}
    found: dict[str, Any] = {"nnodes": size, "node_rank": rank}
    # of the host where mpirun runs; Open MPI 5 tells none
    uri = re.search(r"tcp://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        found["master_addr"] = "127.0.0.1"
    elif uri:
        found["master_addr"] = uri.group(1)
    return found


def _slurm(environ: Mapping[str, str]) -> dict[str, Any]:
    """A step's task. A batch script outside of srun is none, whatever its job has asked for."""
    size, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if size is None or rank is None or size < 2:
        return {}
    found: dict[str, Any] = {"nnodes": size, "node_rank": rank}
    if nodes:
        found["master_addr"] = first_host(nodes)
    job = _number(environ, "SLURM_JOB_ID")
    if job is not None:
        found["master_port"] = _FIRST_PORT + job % _PORTS
    return found


def _leader_worker_set(environ: Mapping[str, str]) -> dict[str, Any]:
    size, rank = _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
    if size is None or rank is None or size < 2:
        return {}
    address = environ.get("LWS_LEADER_ADDRESS")
    return {"nnodes": size, "node_rank": rank} | ({"master_addr": address} if address else {})


def first_host(nodes: str) -> str:
    """Of Slurm's short form: ``gpu[007-009,012],login`` -> ``gpu007``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ConfigError(f"--master-addr: is missing; SLURM_STEP_NODELIST {nodes!r} names no host")
    head, number, tail = match.groups()
    return head + (number or "") + (tail or "")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None
