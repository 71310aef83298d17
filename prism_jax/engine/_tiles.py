"""Tiles: work is cut into pieces of one size, so that results do not depend on the devices."""

import functools as ft
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ._replica import TILE


# A call keeps each device busy for about so many op evaluations (some ten milliseconds on a core);
# the host looks up (progress, Ctrl-C) between calls.
_OPS_PER_CALL = 2**23
_MOST_TILES = 64

# A loop over small arrays gains from the widest vectors that there are.
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


def map_tiles(
    function: Callable[..., Any],
    shared: Any,
    num_samples: int,
    consume: Callable[[int, int, Any], object],
    inputs: Callable[[int, int], tuple[np.ndarray, ...]] = lambda first, count: (),
    *,
    first: int = 0,
    cost: int = 1,
) -> None:
    """Applies a function to all tiles, a batch of them at a time, one tile on one device.

    While the devices compute a batch, a thread looks at the last one and prepares the next.

    **Arguments:**

    - `function`: takes `shared`, sample ids of shape `(TILE,)` and the slices of `inputs`, and
        gives arrays whose last axis is the samples. Must not close over arrays, and be the same
        object from call to call, or it compiles again.
    - `shared`: a PyTree that every tile gets whole.
    - `num_samples`: sample ids are `first .. first + num_samples - 1`.
    - `consume`: is given, in order, the first sample id of each batch, the number of samples in it,
        and the results for `untile` and `sum_tiles`.
    - `inputs`: gives further arrays for `count` samples from an id on, their last axis.
    - `first`: the first sample id.
    - `cost`: op evaluations per sample, about.
    """
    devices = len(jax.devices())
    tiles = min(max(_OPS_PER_CALL // (cost * TILE), 2), _MOST_TILES)
    batch = TILE * tiles * devices
    end = first + num_samples

    def prepare(start):
        count = min(batch, end - start)
        ids = _deal(np.arange(start, start + batch, dtype=np.uint32).reshape(-1, TILE), devices)
        return ids, [_tiled(x, batch, devices) for x in inputs(start, count)]

    # The devices are called from this thread, for some of JAX's settings belong to a thread.
    with ThreadPoolExecutor(1) as host:
        prepared = host.submit(prepare, first)
        consumed = None
        for start in range(first, end, batch):
            count = min(batch, end - start)
            ids, slices = prepared.result()
            if start + batch < end:
                prepared = host.submit(prepare, start + batch)
            turns = np.int32(-(-count // (TILE * devices)))
            result = jax.block_until_ready(_call(function, shared, turns, ids, slices))
            if consumed is not None:
                consumed.result()
            consumed = host.submit(consume, start, count, (result, count))
        if consumed is not None:
            consumed.result()


def untile(result: tuple[Any, int]) -> Any:
    """The arrays that `map_tiles` computes, on the host, without the padding."""
    arrays, count = result

    def one(x):
        x = np.moveaxis(_collect(x, count), 0, -2)
        return x.reshape(*x.shape[:-2], -1)[..., :count]

    return jax.tree.map(one, arrays)


def sum_tiles(result: tuple[Any, int], into: Any) -> Any:
    """Adds per-tile sums to a running sum, tile by tile in the order of ids, on the host."""
    arrays, count = result

    def add(total, x):
        for tile in _collect(x, count).astype(np.float64):
            total = total + tile
        return total

    return jax.tree.map(add, into, arrays)


def _tiled(x: np.ndarray, batch: int, devices: int) -> np.ndarray:
    padded = np.zeros((*x.shape[:-1], batch), x.dtype)
    padded[..., : x.shape[-1]] = x
    return _deal(np.moveaxis(padded.reshape(*x.shape[:-1], -1, TILE), -2, 0), devices)


def _deal(tiles: np.ndarray, devices: int) -> np.ndarray:
    """Deals tiles out to the devices in turn, so that a short batch keeps all of them busy."""
    dealt = tiles.reshape(-1, devices, *tiles.shape[1:])
    return np.swapaxes(dealt, 0, 1).reshape(tiles.shape)


def _collect(x, count: int) -> np.ndarray:
    """The tiles that were computed, in the order of ids."""
    x = np.asarray(x)
    devices = len(jax.devices())
    tiles = np.swapaxes(x.reshape(devices, -1, *x.shape[1:]), 0, 1).reshape(x.shape)
    return tiles[: -(-count // TILE)]


def _call(*arguments):
    return _jitted(jax.default_backend())(*arguments)


@ft.cache
def _jitted(backend: str):
    options: dict[str, Any] = {"compiler_options": CPU_OPTIONS} if backend == "cpu" else {}
    return eqx.filter_jit(_run, **options)


def _run(function, shared, turns, ids, inputs):
    arrays, static = eqx.partition(shared, eqx.is_array)
    mesh = Mesh(np.array(jax.devices()), ("tiles",))
    whole, tiled = PartitionSpec(), PartitionSpec("tiles")

    def on_device(arrays, turns, ids, inputs):
        shared = eqx.combine(arrays, static)

        def one(turn):
            at_turn = [lax.dynamic_index_in_dim(x, turn, keepdims=False) for x in (ids, *inputs)]
            return function(shared, *at_turn)

        def body(turn, results):
            def place(tiles, tile):
                return lax.dynamic_update_index_in_dim(tiles, tile, turn, 0)

            return jax.tree.map(place, results, one(turn))

        shapes = jax.eval_shape(one, turns)
        empty = jax.tree.map(lambda x: jnp.zeros((len(ids), *x.shape), x.dtype), shapes)
        # As many turns as there are tiles to do, without compiling anew for each number of them.
        return lax.fori_loop(0, turns, body, empty)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, whole, tiled, tiled),
        out_specs=tiled,
        check_vma=False,
    )(arrays, turns, jnp.asarray(ids), inputs)
