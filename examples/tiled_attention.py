"""How far attention in bf16 is from float32, computed whole or in tiles of keys, as fused kernels
do it: `python examples/tiled_attention.py`.

A tile rescales what the tiles before it have summed, so that each tile rounds once more. The
distance between the laws of the entries of two outputs is that of Wasserstein (Golden et al. 2024,
"Is Flash Attention Stable?", arXiv:2405.02803).
"""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from scipy.stats import wasserstein_distance


_HEADS, _TOKENS, _SIZE = 2, 1024, 64
_TILES = (512, 128, 32)  # of keys

Heads = Float[Array, "heads tokens size"]


@jax.jit
def whole(q: Heads, k: Heads, v: Heads) -> Heads:
    """Attention with all scores at a time, in the dtype of its inputs."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), v)


@ft.partial(jax.jit, static_argnums=3)
def tiled(q: Heads, k: Heads, v: Heads, tile: int) -> Heads:
    """The same by tiles of keys, of which each corrects the sums of those before it (Milakov and
    Gimelshein 2018, arXiv:1805.02867)."""

    def add(state, tile_of_keys):
        highest, sums, outputs = state
        keys, values = tile_of_keys
        scores = jnp.einsum("hqd,hkd->hqk", q, keys) * q.shape[-1] ** -0.5
        new = jnp.maximum(highest, scores.max(-1, keepdims=True))
        weights, before = jnp.exp(scores - new), jnp.exp(highest - new)
        sums = before * sums + weights.sum(-1, keepdims=True)
        outputs = before * outputs + jnp.einsum("hqk,hkd->hqd", weights, values)
        return (new, sums, outputs), None

    heads, tokens, size = k.shape
    parts = [x.reshape(heads, tokens // tile, tile, size).swapaxes(0, 1) for x in (k, v)]
    least = jnp.full((*q.shape[:2], 1), jnp.finfo(q.dtype).min, q.dtype)
    start = (least, jnp.zeros_like(least), jnp.zeros_like(q))
    (_, sums, outputs), _ = jax.lax.scan(add, start, tuple(parts))
    return outputs / sums


def distances() -> dict[str, tuple[float, float]]:
    """Of each way in bf16: the Wasserstein distance of its outputs from those in float32, and the
    mean size of what an entry is off, both relative to their standard deviation."""
    keys = jr.split(jr.key(0), 3)
    exact = [jr.normal(key, (_HEADS, _TOKENS, _SIZE), jnp.float32) for key in keys]
    narrow = [x.astype(jnp.bfloat16) for x in exact]
    # Both have the same inputs, so that only what is computed differs.
    exact = [x.astype(jnp.float32) for x in narrow]
    reference = whole(*exact)
    ways = {"whole": whole(*narrow)}
    ways |= {f"tiles of {tile}": tiled(*narrow, tile) for tile in _TILES}
    found = {}
    for name, output in ways.items():
        entries = output.astype(jnp.float32)
        apart = wasserstein_distance(entries.ravel(), reference.ravel())
        off = float(jnp.abs(entries - reference).mean())
        scale = float(reference.std())
        found[name] = float(apart) / scale, off / scale
    return found


if __name__ == "__main__":
    print(f"{'bf16':>14}  {'Wasserstein':>11}  {'mean error':>10}")
    for name, (apart, off) in distances().items():
        print(f"{name:>14}  {apart:11.2e}  {off:10.2e}")
