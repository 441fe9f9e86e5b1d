"""Starts one engine on the nodes of a Ray cluster, exactly one process a node (pip install 'lmjax[ray]').

    python scripts/launch_ray.py --nnodes 2 [--devices 8] [--address auto] -- --model DIR [flags of lmjax serve]

Ray only places the processes and shows their output; they find each other, and run, as if started by hand. The HTTP
server is on the node that is named first. Ctrl-C and SIGTERM go to all ranks; ends with the first status that is not 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GRACE = 40.0  # seconds: after a rank has failed the others find out by themselves, at the latest after 30


class Rank:
    """An actor on one node: holds that node's process."""

    def address(self) -> tuple[str, int]:
        """This node's, and a port that is free."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((address, 0))
            return address, sock.getsockname()[1]

    def start(self, command: list[str]) -> None:
        # what Ray tells of its own processes (CUDA_VISIBLE_DEVICES: the bundle's cards) holds for the child, too
        self.process = subprocess.Popen(command, start_new_session=True)

    def poll(self) -> int | None:
        return self.process.poll()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def main() -> int:
    options = _options()
    ray.init(address=options.address, log_to_driver=True)
    bundle: dict[str, float] = {"CPU": 1} | ({"GPU": options.devices} if options.gpus else {})
    group = placement_group([bundle] * options.nnodes, strategy="STRICT_SPREAD")
    if not group.wait(options.patience):
        remove_placement_group(group)
        print(f"launch_ray: error: --nnodes: Ray has not {options.nnodes} nodes with {bundle} free", file=sys.stderr)
        return 2
    try:
        ranks = [_place(group, index, bundle) for index in range(options.nnodes)]
        address, port = ray.get(ranks[0].address.remote())
        print(f"launch_ray: rank 0, with the HTTP server, is on {address}", flush=True)
        ray.get([rank.start.remote(_command(options, index, address, port)) for index, rank in enumerate(ranks)])
        return _watch(ranks)
    finally:
        remove_placement_group(group)
        ray.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, required=True, help="number of nodes, and of processes")
    parser.add_argument("--devices", type=int, default=8, help="devices of each node [8]")
    parser.add_argument("--gpus", action=argparse.BooleanOptionalAction, default=True, help="they are GPUs [on]")
    parser.add_argument("--address", help="of the Ray cluster (default: RAY_ADDRESS, or a local one)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for the nodes [300]")
    parser.add_argument("serve", nargs=argparse.REMAINDER, help="-- and flags of lmjax serve")
    options = parser.parse_args()
    options.serve = options.serve[1:] if options.serve[:1] == ["--"] else options.serve
    options.tensor = _tensor_parallel(parser, options)
    return options


def _tensor_parallel(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Devices of a stage: all, unless the flags of ``lmjax serve`` say otherwise."""
    sizes = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    sizes.add_argument("--tensor-parallel-size", type=int, dest="tensor")
    sizes.add_argument("--pipeline-parallel-size", type=int, dest="pipeline", default=1)
    given, total = sizes.parse_known_args(options.serve)[0], options.nnodes * options.devices
    tensor = total // max(given.pipeline, 1) if given.tensor is None else given.tensor
    if tensor * given.pipeline != total:
        parser.error(
            "--tensor-parallel-size x --pipeline-parallel-size must be --nnodes x --devices "
            f"({options.nnodes} x {options.devices} = {total}), got {tensor} x {given.pipeline}"
        )
    return tensor


def _place(group: Any, index: int, bundle: dict[str, float]) -> Any:
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    # two calls at once: poll must not wait for another
    options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "max_concurrency": 2, "scheduling_strategy": where}
    return ray.remote(Rank).options(**options).remote()


def _command(options: argparse.Namespace, rank: int, address: str, port: int) -> list[str]:
    hosts = {"nnodes": options.nnodes, "node-rank": rank, "master-addr": address, "master-port": port}
    flags = [part for name, value in hosts.items() for part in (f"--{name}", str(value))]
    devices = ["--tensor-parallel-size", str(options.tensor)]
    return [*shlex.split(os.environ.get("LMJAX", "lmjax")), "serve", *devices, *options.serve, *flags]


def _watch(ranks: list[Any]) -> int:
    """Until all have ended. Returns the first status that is not 0."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    told, status, deadline = 0, 0, float("inf")
    while True:
        codes = ray.get([rank.poll.remote() for rank in ranks])
        status = status or next((code for code in codes if code), 0)
        if None not in codes:
            return abs(status)
        if status and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
        if len(asked) > told:
            told = len(asked)
            ray.get([rank.signal.remote(signal.SIGTERM) for rank in ranks])
        if time.monotonic() > deadline:
            ray.get([rank.signal.remote(signal.SIGKILL) for rank in ranks])
        time.sleep(0.3)


if __name__ == "__main__":
    sys.exit(main())
