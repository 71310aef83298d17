"""Tiles: work is cut into pieces of one size, so that results do not depend on the devices."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ._replica import TILE


TILES_PER_CALL = 2  # On each device; the host looks up (progress, Ctrl-C) between calls.


def map_tiles(
    function: Callable[..., Any],
    shared: Any,
    num_samples: int,
    inputs: Callable[[int, int], tuple[np.ndarray, ...]] = lambda first, count: (),
) -> Iterator[tuple[int, int, Any]]:
    """Applies a function to all tiles, a batch of them at a time, one tile on one device.

    **Arguments:**

    - `function`: takes `shared`, sample ids of shape `(TILE,)` and the slices of `inputs`, and
        gives arrays whose last axis is the samples. Must not close over arrays, and be the same
        object from call to call, or it compiles again.
    - `shared`: a PyTree that every tile gets whole.
    - `num_samples`: sample ids are `0 .. num_samples - 1`.
    - `inputs`: gives further arrays for `count` samples from `first` on, their last axis.

    **Yields:**

    The first sample id of a batch, the number of samples in it, and the results with the samples on
    the last axis, as NumPy arrays.
    """
    devices = jax.devices()
    batch = TILE * TILES_PER_CALL * len(devices)
    for first in range(0, num_samples, batch):
        count = min(batch, num_samples - first)
        ids = np.arange(first, first + batch, dtype=np.uint32).reshape(-1, TILE)
        slices = [_tiled(x, batch) for x in inputs(first, count)]
        yield first, count, (_call(function, shared, ids, slices), count)


def untile(result: tuple[Any, int]) -> Any:
    """The arrays that `map_tiles` computes, on the host, without the padding."""
    arrays, count = result

    def one(x):
        x = np.moveaxis(np.asarray(x), 0, -2)
        return x.reshape(*x.shape[:-2], -1)[..., :count]

    return jax.tree.map(one, arrays)


def sum_tiles(result: tuple[Any, int], into: Any) -> Any:
    """Adds per-tile sums to a running sum, tile by tile in the order of ids, on the host."""
    arrays, _ = result

    def add(total, x):
        for tile in np.asarray(x, np.float64):
            total = total + tile
        return total

    return jax.tree.map(add, into, arrays)


def _tiled(x: np.ndarray, batch: int) -> np.ndarray:
    padded = np.zeros((*x.shape[:-1], batch), x.dtype)
    padded[..., : x.shape[-1]] = x
    return np.moveaxis(padded.reshape(*x.shape[:-1], -1, TILE), -2, 0)


@eqx.filter_jit
def _call(function, shared, ids, inputs):
    arrays, static = eqx.partition(shared, eqx.is_array)
    mesh = Mesh(np.array(jax.devices()), ("tiles",))
    whole, tiled = PartitionSpec(), PartitionSpec("tiles")

    def on_device(arrays, ids, inputs):
        shared = eqx.combine(arrays, static)
        return lax.map(lambda tile: function(shared, tile[0], *tile[1]), (ids, inputs))

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, tiled, tiled), out_specs=tiled, check_vma=False
    )(arrays, jnp.asarray(ids), inputs)
