import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmjax.core.plan import SlotLoad
from lmjax.runtime.state import COPY_BATCH, copy_blocks, load_slot, pack_copies, pack_slot
from lmjax.sampling.params import encode_state, state_row_size
from lmjax.types import SamplingParams

NUM_BLOCKS = 20


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS - 1)), max_size=40)
)
def test_copies_act_as_if_done_one_by_one(copies):
    copies = [copy for copy in copies if copy[1] != copy[2]]
    pools = [np.arange(NUM_BLOCKS), 100 + np.arange(NUM_BLOCKS)]
    want = [pool.copy() for pool in pools]
    for group, source, target in copies:
        want[group][target] = want[group][source]
    for pairs in pack_copies(copies, 2):
        for pool, pair in zip(pools, pairs, strict=True):
            # what the program does; a block may be named twice only as the null block's padding
            targets = pair[pair[:, 1] != 0, 1]
            assert len(targets) == len(set(targets.tolist()))
            pool[pair[:, 1]] = pool[pair[:, 0]]
    assert all((a == b).all() for a, b in zip(pools, want, strict=True))


def test_many_copies_take_several_calls():
    assert len(pack_copies([(0, 1, 2 + i) for i in range(COPY_BATCH)], 1)) == 1
    assert len(pack_copies([(0, 1, 2 + i) for i in range(COPY_BATCH + 1)], 1)) == 2
    assert pack_copies([], 1) == []


def test_copy_blocks_copies_all_layers_keys_and_values():
    rng = np.random.default_rng(0)
    pools = [rng.normal(size=(2, 2, 6, 3, 4, 5)).astype(np.float32) for _ in range(2)]
    pairs = pack_copies([(0, 2, 4), (1, 5, 1), (0, 3, 5)], 2)
    assert len(pairs) == 1
    out = jax.jit(copy_blocks)(tuple(map(jnp.asarray, pools)), pairs[0])
    pools[0][:, :, 4], pools[0][:, :, 5] = pools[0][:, :, 2], pools[0][:, :, 3]
    pools[1][:, :, 1] = pools[1][:, :, 5]
    assert all((np.asarray(a) == b).all() for a, b in zip(out, pools, strict=True))


def test_load_slot_sets_one_slot_only():
    vocab, length = 50, 12
    load = SlotLoad(1, SamplingParams(logit_bias={3: 1.5}), 0, 0, np.array([7, 8, 9], np.int32), 3)
    tokens = jnp.full((3, length), 5, jnp.int32)
    sampling = jnp.full((3, state_row_size(vocab)), 6, jnp.int32)
    tokens, sampling = jax.jit(load_slot)(tokens, sampling, pack_slot(load, vocab, length))
    assert np.asarray(tokens).tolist() == [[5] * length, [7, 8, 9] + [0] * (length - 3), [5] * length]
    assert np.asarray(sampling)[1].tolist() == encode_state(load, vocab).tolist()
    assert (np.asarray(sampling)[[0, 2]] == 6).all()
