import numpy as np
import pytest

from lmjax.core.block_hash import block_digest, extend_digests, root_digest
from lmjax.core.block_pool import BlockPool


def ids(*values):
    return np.array(values, np.int32)


def digest(i):
    return i.to_bytes(16, "little")


def test_ids_start_at_one_and_all_are_given_out():
    pool = BlockPool(9)
    assert sorted(pool.allocate(8).tolist()) == list(range(1, 9))
    assert pool.num_free == 0 and pool.num_used == 8
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks[:1])
    assert pool.num_free == 3
    pool.check_integrity()


def test_cached_free_blocks_are_found_until_evicted_oldest_first():
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for i, block in enumerate(blocks.tolist()):
        pool.register(np.array([block]), [digest(i)])
    pool.release(blocks[2:])  # 2 is released first
    pool.release(blocks[:2])
    assert pool.num_free == 5
    evicted = pool.allocate(2)
    assert sorted(evicted.tolist()) == sorted(blocks[2:4].tolist())
    assert [digest(i) in pool.by_digest for i in range(5)] == [True, True, False, False, True]
    pool.check_integrity()


def test_a_block_in_use_is_never_evicted():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks, [digest(i) for i in range(3)])
    pool.release(blocks)
    pool.share(blocks[:1])  # a prefix hit
    assert pool.num_free == 2
    assert blocks[0] not in pool.allocate(2)
    assert digest(0) in pool.by_digest
    pool.check_integrity()


def test_released_again_means_recently_used():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks, [digest(i) for i in range(3)])
    pool.release(blocks)
    pool.share(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(2).tolist().count(int(blocks[0])) == 0


def test_the_first_block_keeps_a_name():
    pool = BlockPool(4)
    first, second = pool.allocate(2).tolist()
    pool.register(np.array([first]), [digest(7)])
    pool.register(np.array([second]), [digest(7)])
    assert pool.by_digest[digest(7)] == first
    pool.release(ids(second))
    assert second not in pool.by_digest.values()
    pool.check_integrity()


def test_random_use_against_a_plain_model():
    rng = np.random.default_rng(0)
    pool = BlockPool(40)
    held: list[np.ndarray] = []
    names = 0
    for _ in range(3000):
        action = rng.integers(4)
        if action == 0 and pool.num_free:
            held.append(pool.allocate(int(rng.integers(1, min(6, pool.num_free) + 1))))
        elif action == 1 and held:
            pool.release(held.pop(int(rng.integers(len(held)))))
        elif action == 2 and held:
            block = int(held[-1][0])
            if block not in pool.by_digest.values():
                pool.register(np.array([block]), [digest(names)])
                names += 1
        elif action == 3 and pool.by_digest:
            block = list(pool.by_digest.values())[int(rng.integers(len(pool.by_digest)))]
            pool.share(ids(block))
            held.append(ids(block))
        counts = np.bincount(np.concatenate(held), minlength=40) if held else np.zeros(40)
        assert np.array_equal(counts, pool.refs)
        pool.check_integrity()
    assert names > 40


def test_digests_are_a_chain_over_tokens_and_root():
    tokens = np.arange(40, dtype=np.int32)
    digests: list[bytes] = []
    extend_digests(digests, root_digest(None, None), tokens, 16)
    assert len(digests) == 2
    assert digests[1] == block_digest(digests[0], tokens[16:32].tobytes())
    other: list[bytes] = []
    extend_digests(other, root_digest(None, None), np.concatenate((tokens[:1] + 1, tokens[1:])), 16)
    assert other[0] != digests[0] and other[1] != digests[1], "an equal block after another prefix"
    grown = digests[:1]
    extend_digests(grown, root_digest(None, None), tokens, 16)
    assert grown == digests


def test_adapter_and_salt_have_roots_of_their_own():
    roots = [root_digest(*pair) for pair in [(None, None), (1, None), (None, "a"), (1, "a"), (2, None), (None, "1")]]
    assert len(set(roots)) == len(roots)
