"""Attention in tiles, as in `examples/`, is attention."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from examples.tiled_attention import tiled, whole


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_tiles_of_any_size_give_attention(tile):
    q, k, v = (3 * jr.normal(key, (2, 64, 16)) for key in jr.split(jr.key(0), 3))
    scores = np.einsum("hqd,hkd->hqk", q, k) / 4
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(whole(q, k, v), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tiled(q, k, v, tile), expected, rtol=1e-5, atol=1e-6)


def test_a_tile_with_all_keys_rounds_like_all_keys_at_a_time():
    q, k, v = (jr.normal(key, (1, 32, 16), jnp.bfloat16) for key in jr.split(jr.key(1), 3))
    apart = jnp.abs((tiled(q, k, v, 32) - whole(q, k, v)).astype(jnp.float32))
    assert float(apart.max()) < 0.05
