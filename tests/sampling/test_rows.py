import jax
import jax.numpy as jnp
import numpy as np

from lmjax.sampling.params import encode_params
from lmjax.sampling.rows import uniforms, unpack_rows
from tests.sampling.reference import make_load, reference_uniforms, threefry2x32

uniforms_jit = jax.jit(lambda params, positions: jnp.stack(uniforms(unpack_rows(params), positions), axis=1))


def draw(cases):
    params = np.stack([encode_params(make_load(seed=seed, index=index)) for seed, index, _ in cases])
    """[n, 2]"""
    return np.asarray(uniforms_jit(jnp.asarray(params), jnp.asarray([c[2] for c in cases], jnp.int32)))


def test_threefry_reference_has_the_published_answers():
    """Known answers of Random123's kat_vectors for threefry2x32, 20 rounds."""
    assert threefry2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry2x32((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2) == (0x1CB996FC, 0xBB002BE7)
    assert threefry2x32((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


CASES = [(s, i, p) for s in (0, 1, -1, 2**63, 2**64 - 5, -(2**63), 2**32) for i in (0, 1, 127) for p in (0, 1, 131071)]


def test_they_are_threefry_of_seed_index_position():
    got = draw(CASES)
    np.testing.assert_array_equal(got, [reference_uniforms(*case) for case in CASES])
    # (2**63 and -(2**63) are the same 64 bits)
    assert len(set(got.ravel().tolist())) == 2 * len({(s % 2**64, i, p) for s, i, p in CASES})


def test_they_do_not_depend_on_the_batch():
    alone = np.concatenate([draw([case]) for case in CASES[:8]])
    np.testing.assert_array_equal(alone, draw(CASES)[:8])
    np.testing.assert_array_equal(alone, draw(CASES[:8][::-1])[::-1])


def test_they_are_uniform_in_each_part_of_the_key():
    n = 4000
    for cases in ([(s, 0, 5) for s in range(n)], [(3, i, 5) for i in range(n)], [(3, 0, p) for p in range(n)]):
        pairs = draw(cases)
        assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.06
        for u in pairs.T:
            assert (u >= 0).all() and (u < 1).all()
            counts, _ = np.histogram(u, 50, (0, 1))
            chi2 = ((counts - n / 50) ** 2 / (n / 50)).sum()
            assert 20 < chi2 < 90  # 49 degrees of freedom: 1e-4 and 1 - 3e-4
            assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.06
