"""Ranks and addresses from flags and from what launchers tell their tasks."""

from __future__ import annotations

import pytest

from lmjax.cluster.detect import first_host, host_settings
from lmjax.config import ConfigError, EngineConfig

SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]",
    "SLURM_NTASKS": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lmjax-0.lmjax.default"}


def hosts(nnodes, node_rank, master_addr, **more):
    return {"nnodes": nnodes, "node_rank": node_rank, "master_addr": master_addr, **more}


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        ({}, {}, {}),
        ({}, SLURM, hosts(4, 1, "gpu007", master_port=61440 + 3)),
        ({}, OPEN_MPI, hosts(2, 1, "10.96.0.1")),
        ({}, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, hosts(2, 1, "127.0.0.1")),
        ({}, LWS, hosts(2, 1, "lmjax-0.lmjax.default")),
        # mpirun in a Slurm job: Slurm's task is mpirun's helper
        ({}, OPEN_MPI | SLURM, hosts(2, 1, "10.96.0.1")),
        # one task is nothing to join, nor is the batch script itself
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({}, {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"}, {}),
        ({}, LWS | {"LWS_GROUP_SIZE": "1"}, {}),
        ({}, {"JOB_COMPLETION_INDEX": "1"}, {}),
        ({"nnodes": 3, "master_addr": "a"}, {"JOB_COMPLETION_INDEX": "2"}, hosts(3, 2, "a")),
        # flags win, one by one
        ({"master_addr": "b", "master_port": 9}, SLURM, hosts(4, 1, "b", master_port=9)),
        ({"nnodes": 1}, SLURM, {"nnodes": 1}),
        (hosts(2, 0, "a"), {}, hosts(2, 0, "a")),
    ],
)
def test_what_is_found(given, environ, found):
    assert host_settings({"model": "m", **given}, environ) == found


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"nnodes": 2}, {}, "--node-rank: is missing: --nnodes 2 needs it; no launcher"),
        ({"nnodes": 2, "node_rank": 1}, {}, "--master-addr: is missing: --nnodes 2 --node-rank 1 needs it"),
        ({"node_rank": 1}, {}, "--nnodes: is missing: --node-rank 1"),
        ({"master_addr": "a"}, {}, "--nnodes: is missing: --master-addr a"),
        (
            {},
            {k: v for k, v in OPEN_MPI.items() if "uri" not in k},
            "--master-addr: is missing: Open MPI tells nnodes, node_rank",
        ),
        ({"nnodes": 2}, {"JOB_COMPLETION_INDEX": "1"}, "--master-addr: is missing: --nnodes 2 needs it; the Kub"),
    ],
)
def test_what_is_missing_is_named(given, environ, message):
    with pytest.raises(ConfigError) as caught:
        host_settings(given, environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[03,05]", "n03"), ("n[1-2]-ib,m", "n1-ib"), ("a[1-2],b[3]", "a1")],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 0}, "--nnodes: got 0, must be an integer of at least 1"),
        ({"nnodes": 2}, "--node-rank: is missing; --nnodes 2 needs it"),
        ({"nnodes": 2, "node_rank": 0}, "--master-addr: is missing"),
        (hosts(2, 2, "a"), "--node-rank: got 2, must be between 0 and 1"),
        ({"node_rank": 1}, "--node-rank: got 1, must be below --nnodes (1)"),
        (hosts(2, 0, "a"), "--tensor-parallel-size: got 1, must be a multiple of --nnodes (2)"),
        (hosts(2, 0, "a", pipeline_parallel_size=3), "--pipeline-parallel-size: got 3, must be a multiple of --nnodes"),
        (
            hosts(2, 0, "a", tensor_parallel_size=3, pipeline_parallel_size=3),
            "--tensor-parallel-size x --pipeline-parallel-size: got 3 x 3, must be a multiple of --nnodes (2)",
        ),
        (hosts(2, 0, "a", tensor_parallel_size=2, master_port=0), "--master-port: got 0, must be between 1 and 65535"),
        (hosts(2, 0, "a", tensor_parallel_size=2, bundle="b"), "--bundle: is for one host"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings).validate()
    assert message in str(caught.value)
