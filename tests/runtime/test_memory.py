import logging
from dataclasses import replace

import pytest

from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.memory import (
    GIB,
    available_memory,
    check_weights_fit,
    cpu_pool_budget,
    gpu_pool_budget,
    plan_kv,
    pool_bytes,
)
from lmjax.types import KVSpec

FULL = KVSpec("full", (0, 1), kv_heads=2, k_dim=8, v_dim=8)  # 256 bytes a token
WINDOW = KVSpec("window", (2, 3), kv_heads=2, k_dim=8, v_dim=8, window=64)


def plan(config: EngineConfig, specs=(FULL,), **changes):
    arguments = {
        "model_max_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "budget": 10 * GIB,
        "available": 20 * GIB,
    }
    return plan_kv(specs, config, **(arguments | changes))


def test_override_means_usable_blocks():
    found = plan(EngineConfig(num_gpu_blocks_override=100), specs=(FULL, WINDOW))
    assert found.num_blocks == (101, 101)
    assert found.num_tokens == 1600 and found.max_model_len == 1024


def test_never_more_than_all_sequences_can_use():
    found = plan(EngineConfig())
    assert found.num_blocks == (4 * 64 + 1,)
    assert found.num_bytes == 257 * 16 * 256


def test_bytes_are_kept_to():
    for wanted in (20_000, 123_456, 500_000):
        found = plan(EngineConfig(kv_cache_memory_bytes=wanted), specs=(FULL, WINDOW))
        assert wanted - 2 * 16 * 256 < found.num_bytes <= wanted
        assert found.num_bytes == pool_bytes((FULL, WINDOW), found.num_blocks, 16)


@pytest.mark.parametrize(("budget", "wanted"), [(1.9, 1.9), (3.0, 3.0), (3.1, 3.0), (6.0, 3.0), (6.1, 6.1), (9.0, 9.0)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_pool_of_bytes_is_never_between_2_and_4_gib(budget, wanted, dtype):
    spec = replace(FULL, dtype=dtype, layers=tuple(range(64)))  # 2 KiB a token and 1 KiB of scales
    found = plan(EngineConfig(), specs=(spec,), budget=int(budget * GIB), model_max_len=10**7)
    assert abs(found.num_bytes - wanted * GIB) <= 2**16
    assert not 2 * GIB < found.num_bytes * 2 // 3 <= 4 * GIB
    wide = plan(EngineConfig(), specs=(replace(spec, dtype="bfloat16"),), budget=3 * GIB, model_max_len=10**7)
    assert wide.num_bytes > 2.9 * GIB


def test_a_window_groups_pool_of_bytes_is_cut_too():
    window = replace(WINDOW, dtype="int8", layers=tuple(range(64)), window=10**6)
    found = plan(EngineConfig(), specs=(FULL, window), budget=4 * GIB, model_max_len=10**7)
    assert found.num_blocks[1] * 2**15 <= 2 * GIB < found.num_blocks[1] * 2**15 + 2**16


def test_an_override_between_2_and_4_gib_of_bytes_is_refused():
    spec = replace(FULL, dtype="int8", layers=tuple(range(64)))
    with pytest.raises(ConfigError, match="below 2 or above 4 GiB"):
        plan(EngineConfig(num_gpu_blocks_override=100_000), specs=(spec,))
    assert plan(EngineConfig(num_gpu_blocks_override=60_000), specs=(spec,)).num_blocks == (60_001,)


def test_window_groups_get_what_all_windows_need_and_no_more():
    full, window = plan(EngineConfig(), specs=(FULL, WINDOW)).num_blocks
    assert full == 257
    assert window == 4 * 5 + 8 + 1 + 1


def test_a_model_of_windows_only_may_be_longer_than_its_pool():
    found = plan(EngineConfig(), specs=(WINDOW,), model_max_len=100_000)
    assert found.max_model_len == 100_000
    assert found.num_blocks[0] < 40


def test_context_is_cut_to_the_pool_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        found = plan(EngineConfig(num_gpu_blocks_override=10))
    assert found.max_model_len == 160
    assert "1024" in caplog.text and "160" in caplog.text


def test_explicit_context_beyond_the_pool_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"--max-model-len: got 1000, but the KV pool holds 160 tokens"):
        plan(EngineConfig(num_gpu_blocks_override=10, max_model_len=1000))


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(num_gpu_blocks_override=10**9), "--num-gpu-blocks-override"),
        (EngineConfig(kv_cache_memory_bytes=2**50), "--kv-cache-memory-bytes"),
    ],
)
def test_more_than_there_is_is_refused(config, flag):
    with pytest.raises(ConfigError, match=rf"{flag}: the KV pool would take .* GiB, but only 20.00 GiB"):
        plan(config, max_num_seqs=2**30)


def test_no_room_for_a_block_is_refused():
    with pytest.raises(ConfigError, match="no room for a single KV block"):
        plan(EngineConfig(kv_cache_memory_bytes=100))


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    check_weights_fit(5 * GIB, 5 * GIB)
    with pytest.raises(ConfigError, match=r"--model: the weights need 16.00 GiB, but only 5.00 GiB"):
        check_weights_fit(16 * GIB, 5 * GIB)


def test_budgets():
    assert cpu_pool_budget(5 * GIB) == 2 * GIB
    assert cpu_pool_budget(100 * GIB) == 4 * GIB
    assert gpu_pool_budget(80 * GIB, 20 * GIB, 2 * GIB) == 58 * GIB - 2**28
    assert gpu_pool_budget(10 * GIB, 20 * GIB, 2 * GIB) == 0


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_of_the_machine_is_the_limit_without_cgroups(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert available_memory(tmp_path) == 64 * 1024


def test_a_cgroup_v2_limit_of_a_parent_counts(tmp_path):
    write(tmp_path / "proc/meminfo", "MemAvailable: 1000000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup"
    write(group / "a/b/memory.max", "max\n")
    write(group / "a/b/memory.current", "1000\n")
    write(group / "a/memory.max", "50000\n")
    write(group / "a/memory.current", "20000\n")
    write(group / "a/memory.stat", "anon 1\ninactive_file 5000\n")
    assert available_memory(tmp_path) == 35_000


def test_inside_a_container_the_root_is_its_own_group(tmp_path):
    write(tmp_path / "proc/meminfo", "MemAvailable: 1000000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/../../host/path\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "4000\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "5000\n")
    assert available_memory(tmp_path) == 0


def test_cgroup_v1(tmp_path):
    write(tmp_path / "proc/meminfo", "MemAvailable: 1000000 kB\n")
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "docker/x/memory.limit_in_bytes", "9000\n")
    write(group / "docker/x/memory.usage_in_bytes", "2000\n")
    write(group / "memory.limit_in_bytes", "9223372036854771712\n")
    write(group / "memory.usage_in_bytes", "2000\n")
    assert available_memory(tmp_path) == 7000


def test_this_machine():
    assert 2**20 < available_memory() < 2**50
