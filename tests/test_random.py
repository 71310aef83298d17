"""The stream of random numbers: the map from bits to normals, and independence."""

import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_jax.random import (
    Stream,
    check_key,
    counters,
    exp,
    fold,
    key_data,
    normal_pairs,
    normals,
)
from prism_jax.random._elementary import cos_half_turns, log, sin_half_turns
from prism_jax.random._threefry import threefry


# As they are used: compiled whole.
_normals, _normal_pairs = (jax.jit(f, static_argnums=3) for f in (normals, normal_pairs))
_exp, _log, _threefry = map(jax.jit, (exp, log, threefry))


def test_elementary_functions_in_single_precision():
    """Against NumPy in double precision, over their ranges."""
    uniform = np.concatenate([np.logspace(-9.9, 0, 200_001), 1 - np.logspace(-7, -0.1, 100_001)])
    uniform = uniform.astype(np.float32)
    exact = np.log(uniform.astype(float))
    np.testing.assert_allclose(_log(jnp.asarray(uniform)), exact, rtol=4e-7)
    x = np.linspace(-60, 60, 200_001).astype(np.float32)
    np.testing.assert_allclose(_exp(jnp.asarray(x)), np.exp(x.astype(float)), rtol=4e-7)
    assert float(_exp(jnp.zeros((), jnp.float32))) == 1.0
    assert float(jax.grad(_exp)(jnp.float32(0.5))) == pytest.approx(np.exp(0.5), rel=4e-7)
    half_turns = np.linspace(-0.5, 0.5, 200_001)
    for of_half_turns, exact in ((sin_half_turns, np.sin), (cos_half_turns, np.cos)):
        for dtype, apart in ((np.float32, 2e-7), (float, 1e-14)):
            s = half_turns.astype(dtype)
            values = jax.jit(of_half_turns)(jnp.asarray(s))
            np.testing.assert_allclose(values, exact(np.pi * s.astype(float)), atol=apart)


def test_normals_in_single_precision_are_those_of_their_words():
    """Within 1e-6 of what the uniforms give in exact arithmetic, in the tails too."""
    key, ids = key_data(jax.random.key(3)), jnp.arange(2**20, dtype=jnp.uint32)
    zeros = jnp.zeros((1,), jnp.uint32)
    first, second = _threefry(key, ids, jnp.zeros_like(ids))
    uniform = (np.asarray(first).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = uniform.astype(float)
    second, radius = np.asarray(second), np.sqrt(-2 * np.log(uniform))
    angle = np.pi * second.view(np.int32).astype(float) / 2**32
    exact = radius * np.sin(angle), radius * np.cos(angle) * np.where(second % 2, -1, 1)
    beyond = float(2 * scipy.stats.norm.sf(4))
    for z, of_words in zip(_normal_pairs(key, ids, zeros, np.dtype("f")), exact, strict=True):
        assert np.max(np.abs(np.asarray(z) - of_words)) < 1e-6
        assert np.max(np.abs(of_words)) > 4.5
        tail = scipy.stats.binomtest(int(np.sum(np.abs(of_words) > 4)), 2**20, beyond)
        assert tail.pvalue > 1e-4
        assert scipy.stats.kstest(of_words, "norm").pvalue > 1e-4


@pytest.mark.parametrize("what", ["keys", "samples", "ops", "pairs", "folds"])
def test_neighbours_are_independent(what):
    """Correlations of values, and of their signs and sizes, between 33 neighbouring streams."""
    number, size, dtype = 33, 50_000, jnp.dtype(jnp.float32)
    ids = jnp.arange(size, dtype=jnp.uint32)
    key = key_data(jax.random.key(0))
    one = jnp.zeros((1,), jnp.uint32)
    if what == "keys":
        z = [_normals(key_data(jax.random.key(k)), ids, one, dtype) for k in range(number)]
    elif what == "folds":
        z = [_normals(fold(key, Stream.OPS, k), ids, one, dtype) for k in range(number)]
    elif what == "samples":
        z = [_normals(key, jnp.full_like(ids, k), ids, dtype) for k in range(number)]
    elif what == "pairs":
        z = jnp.concatenate(_normal_pairs(key, ids, counters(number // 2 + 1), dtype))[:number]
    else:
        z = _normals(key, ids, counters(number), dtype)
    z = np.asarray(jnp.stack([row.reshape(-1) for row in z]) if isinstance(z, list) else z, float)
    for values in (z, np.sign(z), z**2 - 1):
        off = np.corrcoef(values)[~np.eye(number, dtype=bool)]
        assert np.abs(off).max() < 5 / np.sqrt(size)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dieharder") is None, reason="dieharder is not installed")
@pytest.mark.parametrize("along", ["samples", "ops"])
def test_random_stream_passes_dieharder(along, tmp_path):
    """A part of the battery that fits a stream of 256 MiB; a test may be weak by chance."""
    key, size = key_data(jax.random.key(1)), 2**12
    path = tmp_path / "stream.bin"
    with open(path, "wb") as file:
        for block in range(2):
            ids = jnp.arange(block * size, (block + 1) * size, dtype=jnp.uint32)
            ids, ops = jnp.broadcast_arrays(ids[:, None], jnp.arange(size, dtype=jnp.uint32)[None])
            words = threefry(key, *((ids, ops) if along == "ops" else (ops, ids)))
            file.write(np.stack([np.asarray(w) for w in words], axis=-1).tobytes())
    failed = []
    for test in (0, 1, 2, 3, 8, 10, 13, 15, 16, 100, 101):
        command = ["dieharder", "-g", "201", "-f", str(path), "-d", str(test), "-p", "20"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        failed += [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert not failed


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_raw_key_is_the_key_that_it_is_of(implementation):
    with jax.default_prng_impl(implementation):
        key, raw = jax.random.key(5), jax.random.PRNGKey(5)
        np.testing.assert_array_equal(key_data(raw), key_data(key))
        for other in (raw[:1], raw.astype(float), jax.random.split(raw), np.asarray(raw), 5):
            with pytest.raises(ValueError, match=r"must be one key of `jax\.random`"):
                check_key(other)
