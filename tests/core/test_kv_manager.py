import numpy as np
import pytest

from lmjax.core.kv_manager import KVManager
from tests.fakes import full_spec, window_spec


def manager(specs=(full_spec(),), blocks=33, block_size=4, slots=4, cols=16):
    return KVManager(specs, (blocks,) * len(specs), block_size, slots, cols)


def names(n, salt=0):
    return [bytes([salt, i] + [0] * 14) for i in range(n)]


def fill(kv, slot, tokens, digests=()):
    kv.grow(slot, tokens)
    if digests:
        kv.register(slot, list(digests), 0, len(digests))


def table(kv, group, slot):
    return kv.tables[group, slot]


def test_patches_are_the_changes_of_the_tables():
    kv = manager((full_spec(), window_spec(6)), blocks=80)
    copy = np.zeros_like(kv.tables)
    rng = np.random.default_rng(0)
    length = [0] * 4
    for _ in range(300):
        slot = int(rng.integers(4))
        if length[slot] > 50:
            kv.take_patches()
            kv.close(slot)
            copy[:, slot] = 0
            length[slot] = 0
        kv.free_behind(slot, length[slot])
        length[slot] += int(rng.integers(1, 9))
        kv.grow(slot, length[slot])
        patches = kv.take_patches()
        places = {tuple(patch[:3]) for patch in patches.tolist()}
        assert len(places) == len(patches), "one place is patched twice"
        copy[patches[:, 0], patches[:, 1], patches[:, 2]] = patches[:, 3]
        assert np.array_equal(copy, kv.tables)
        kv.check_integrity()


def test_grow_each_is_grow():
    one, many = manager(slots=3), manager(slots=3)
    for slot in range(3):
        one.grow(slot, 4)
    many.grow_each(np.arange(3))
    assert np.array_equal(one.num_cols, many.num_cols) and np.array_equal(one.capacity, many.capacity)
    assert np.array_equal(one.take_patches()[:, :3], many.take_patches()[:, :3])
    many.check_integrity()


def test_window_groups_free_what_nobody_sees_and_full_groups_keep_it():
    kv = manager((full_spec(), window_spec(6)))
    fill(kv, 0, 20)
    kv.free_behind(0, 19)  # position 19 sees 14 .. 19: columns 3, 4
    assert (table(kv, 1, 0)[:3] == 0).all() and (table(kv, 1, 0)[3:5] > 0).all()
    assert (table(kv, 0, 0)[:5] > 0).all()
    assert kv.pools[1].num_used == 2 and kv.pools[0].num_used == 5
    kv.check_integrity()


@pytest.mark.parametrize(("window", "start", "first"), [(4, 3, 0), (4, 6, 0), (4, 7, 1), (1, 8, 2), (6, 20, 3)])
def test_first_visible_column(window, start, first):
    kv = manager((window_spec(window, (0,)),))
    assert kv.first_visible_col(window, start) == first
    assert first == max(0, start - window + 1) // 4


def test_hit_needs_the_whole_prefix_in_a_full_group():
    kv = manager()
    fill(kv, 0, 16, names(4))
    assert kv.lookup(names(4)).num_blocks == 4
    assert kv.lookup([*names(2), *names(2, salt=1)]).num_blocks == 2
    assert kv.lookup(names(4, salt=1)).num_blocks == 0
    kv.close(0)
    hit = kv.lookup(names(3))
    kv.open(1, hit)
    assert table(kv, 0, 1)[:3].tolist() == hit.blocks[0]
    kv.check_integrity()


def test_hit_needs_only_the_last_window_in_a_window_group():
    kv = manager((full_spec(), window_spec(6)))
    digests = names(5)
    fill(kv, 0, 20, digests)
    window_pool = kv.pools[1]
    gone = [window_pool.by_digest.pop(digests[i]) for i in range(3)]
    assert len(gone) == 3
    # a row at position 20 sees 15 .. 20: columns 3 and 4 are enough
    hit = kv.lookup(digests)
    assert hit.num_blocks == 5
    assert hit.blocks[1][:3] == [0, 0, 0] and all(hit.blocks[1][3:]) and all(hit.blocks[0])
    # without column 3 nothing is left: each shorter prefix needs a column that is gone
    window_pool.by_digest.pop(digests[3])
    assert kv.lookup(digests).num_blocks == 0


def test_a_shorter_prefix_hits_where_the_window_group_has_it():
    kv = manager((full_spec(), window_spec(6)))
    digests = names(6)
    fill(kv, 0, 24, digests)
    kv.pools[1].by_digest.pop(digests[4])
    assert kv.lookup(digests).num_blocks == 4


def test_lookup_against_a_plain_search():
    rng = np.random.default_rng(1)
    for _ in range(200):
        windows = [int(rng.integers(1, 20)) for _ in range(2)]
        kv = manager((full_spec(), window_spec(windows[0]), window_spec(windows[1])))
        digests = names(8)
        kv.grow(0, 32)
        have = rng.random((3, 8)) < 0.8
        for g in range(3):
            there = np.flatnonzero(have[g])
            kv.pools[g].register(kv.tables[g, 0, there], [digests[i] for i in there])

        def works(n, have=have, windows=windows):
            seen = range(n * 4)
            visible = [{p // 4 for p in seen if p >= n * 4 - w + 1} for w in windows]
            return have[0][:n].all() and all(have[g + 1][c] for g in range(2) for c in visible[g])

        assert kv.lookup(digests).num_blocks == max(n for n in range(9) if works(n))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 15, 16])
def test_fork_shares_full_blocks_and_copies_the_partial_one(start):
    kv = manager((full_spec(), window_spec(6)))
    kv.grow(0, start + 1)
    copies = kv.fork(0, 1, start)
    full = start // 4
    assert table(kv, 0, 1)[:full].tolist() == table(kv, 0, 0)[:full].tolist()
    assert table(kv, 0, 1)[full] != table(kv, 0, 0)[full]
    if start % 4:
        assert copies == [(g, int(kv.tables[g, 0, full]), int(kv.tables[g, 1, full])) for g in range(2)]
    else:
        assert copies == []
    kv.check_integrity()
    kv.close(0)
    kv.close(1)
    kv.check_integrity()
    assert all(pool.num_used == 0 for pool in kv.pools)


def test_no_fork_once_the_leader_has_freed_what_the_fork_reads():
    kv = manager((full_spec(), window_spec(6)))
    kv.grow(0, 20)
    kv.free_behind(0, 12)
    assert kv.can_fork(0, 12) and not kv.can_fork(0, 8)


def test_peak_of_a_window_group_is_bounded():
    kv = manager((full_spec(), window_spec(6)))
    assert kv.peak_cols(0, 60, 8) == 15
    assert kv.peak_cols(1, 60, 8) == 5
    held = 0
    for start in range(0, 60, 8):
        kv.free_behind(0, start)
        kv.grow(0, min(60, start + 8))
        held = max(held, kv.pools[1].num_used)
    assert held <= 5
