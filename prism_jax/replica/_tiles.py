"""Tiles: work is cut into pieces of one size, so that results do not depend on the devices."""

import atexit
import dataclasses
import functools as ft
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _devices
from .._interrupt import interruptible, stop_threads
from .._padding import bucket
from ._ends import TILE
from ._plan import Plan


# An accelerator takes tiles side by side: a level costs it some ten microseconds of launch, however
# few samples there are. As many as there are to do, rounded up to a power of two, for each of which
# it is compiled; so many at most, and no more than fit into this share of its memory. An H200 takes
# 4.4e10 ops a second of 128 tiles and 8.3e10 of 512.
_MOST_WIDE_TILES = 512
_SHARE_OF_MEMORY = 0.25
# A CPU takes them one after the other, and batches of up to so many share compiled code.
_MOST_TILES = 8
_SMALL_TILE = 128

# Python calls them from the last to the first: before that of JAX, and before that of `weakref`,
# which JAX needs to work, and which the first finalizer registers.
weakref.finalize(stop_threads, int)
atexit.register(stop_threads)


def _all(arrays: Any) -> Any:
    return arrays


@dataclasses.dataclass(frozen=True)
class Batch:
    """What some tiles give.

    **Attributes:**

    - `first`, `count`: the first sample id, and how many there are.
    - `arrays`: on the devices.
    - `size`: of a tile.
    """

    first: int
    count: int
    arrays: Any
    size: int = TILE

    def samples(self, pick: Callable[[Any], Any] = _all) -> Any:
        """All or some arrays, whose first axis is the samples, on the host, without the padding."""

        def collected(x):
            x = _collect(x, self.count, self.size)
            return x.reshape(-1, *x.shape[2:])[: self.count]

        return jax.tree.map(collected, pick(self.arrays))

    def kept(self, pick: Callable[[Any], Any] = _all) -> Any:
        """As `samples`, but an array of a single accelerator stays there."""
        if not on_accelerator() or len(_devices.chosen()) > 1:
            return self.samples(pick)
        return jax.tree.map(lambda x: _flat(x, self.count), pick(self.arrays))

    def by_tile(self, pick: Callable[[Any], Any] = _all) -> Any:
        """All or some sums over each tile, on the host, in the order of ids."""
        number = -(-self.count // self.size)
        return jax.tree.map(
            lambda x: _collect(x, self.count, self.size)[:number], pick(self.arrays)
        )


_NO_MESH = jax.sharding.AbstractMesh((), ())
# A CPU's loops over small arrays gain from the widest vectors that there are. A GPU runs the turns
# of loops in a CUDA graph, without the host: an H200 takes values of 128 tiles 1.3 times as fast by
# loops, and derivatives 1.4 times. Where nothing is a product, XLA would only tune how fusions are
# written, and compile each several times.
COMPILER_OPTIONS = {
    "cpu": {"xla_cpu_prefer_vector_width": 512},
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
        "xla_gpu_autotune_level": 0,
    },
}


def tiles(
    function: Callable[..., Any],
    shared: Any,
    num_samples: int,
    inputs: Callable[[int, int], tuple[np.ndarray, ...]] = lambda first, count: (),
    *,
    first: int = 0,
    per_batch: int,
    size: int = TILE,
) -> Iterator[Batch]:
    """Applies a function to all tiles, a batch of them at a time, one tile on one device.

    While the devices compute a batch, the caller looks at the last one.

    **Arguments:**

    - `function`: takes `shared`, sample ids of shape `(size,)` and the slices of `inputs`, and
        gives arrays whose first axis is the samples, or sums over the tile. Must not close over
        arrays, and be the same object from call to call, or it compiles again.
    - `shared`: a PyTree that every tile gets whole.
    - `num_samples`: sample ids are `first .. first + num_samples - 1`.
    - `inputs`: gives further arrays for `count` samples from an id on, their first axis.
    - `first`: the first sample id.
    - `per_batch`: how many tiles of a batch are for each device, a power of two; at most 8 on a
        CPU, and fewer on an accelerator whose memory does not hold so many.
    - `size`: of a tile.

    **Returns:**

    Batches, in order.

    **Raises:**

    `KeyboardInterrupt` between batches, after Ctrl-C: see `interruptible`.
    """
    devices, wide = len(_devices.chosen()), on_accelerator()
    assert wide or per_batch <= _MOST_TILES
    start, end, most = first, first + num_samples, per_batch
    in_hand: list[Batch] = []
    call = _compiled(function, on_all_devices(shared))
    with interruptible() as interrupt:
        while start < end:
            count = min(size * most * devices, end - start)
            ids = np.arange(start, start + count, dtype=np.uint32)
            turns = _turns(count, size, devices)
            room = bucket(int(turns[0]), 1) if wide else _MOST_TILES
            slices = [_tiled(x, size, room, devices) for x in (ids, *inputs(start, count))]
            args = turns, slices[0], slices[1:]
            # JAX sets it within derivatives, and would compile the same anew without it.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                if wide:
                    lower = ft.partial(call.func.lower, *call.args, *args)
                    if (fitting := fitting_tiles(lower, room)) < room:
                        most = fitting
                        continue
                arrays = call(*args)
            in_hand.append(Batch(start, count, arrays, size))
            start += count
            # The devices have the next batch in hand before the host waits for the last one.
            if len(in_hand) > 1:
                yield in_hand.pop(0)
                interrupt.check()
        for last in in_hand:
            yield last
            interrupt.check()


def tile_size(num_samples: int) -> int:
    """For so many samples: a tile takes as long as there is room in it, filled or not."""
    return TILE if num_samples >= TILE else _SMALL_TILE


def tiles_of(plan: Plan) -> int:
    """How many tiles of replica samples make a batch for a device: a power of two."""
    if on_accelerator():
        return _MOST_WIDE_TILES
    levels = plan.structure.replica.levels
    # Small enough that Ctrl-C is noticed soon.
    ops = int(levels.num_levels) * levels.width
    return _MOST_TILES if ops < 4096 else 4 if ops < 16384 else 2


def fitting_tiles(lower: Callable[[], Any], room: int) -> int:
    """How many tiles side by side fit into memory, by what the backend says of `room` of them,
    which `lower` lowers: a power of two, and at least one. What is compiled for this is what runs.
    """
    try:
        held = held_bytes(lower().compile())
    except jax.errors.JaxRuntimeError as error:  # A TPU says so where it compiles.
        if room > 1 and "RESOURCE_EXHAUSTED" in str(error):
            return room // 2
        raise
    most = int(room * _SHARE_OF_MEMORY * _memory() / max(held, 1))
    return min(room, 2 ** (max(most, 1).bit_length() - 1))


def held_bytes(compiled: Any) -> int:
    """The bytes of a compiled program and what it is given; zero where the backend says nothing."""
    if (memory := compiled.memory_analysis()) is None:
        return 0
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return sum(parts)


def _memory() -> int:
    """The bytes of memory of a device."""
    device = jax.local_devices(backend=_devices.platform())[0]
    return (device.memory_stats() or {}).get("bytes_limit", 2**33)


def on_accelerator() -> bool:
    """Whether tiles run side by side, and not one after the other."""
    return _devices.platform() != "cpu"


@ft.partial(jax.jit, static_argnums=1)
def _flat(x, count: int):
    return x.reshape(-1, *x.shape[2:])[:count]


def _turns(count: int, size: int, devices: int) -> np.ndarray:
    """How many tiles each device computes: of a short batch, the last ones may have fewer."""
    number = -(-count // size)
    most = -(-number // devices)
    return np.clip(number - most * np.arange(devices, dtype=np.int32), 0, most)


def _tiled(x: np.ndarray, size: int, tiles: int, devices: int) -> np.ndarray:
    """Tiles for all devices, `tiles` each, of which a short batch fills the first few on each."""
    shape = devices, tiles * size, *x.shape[1:]
    if len(x) < shape[0] * shape[1]:
        filled = np.zeros(shape, x.dtype)
        per_device = int(_turns(len(x), size, devices)[0]) * size
        for rows, start in zip(filled, range(0, len(x), per_device), strict=False):
            rows[:per_device][: len(x) - start] = x[start : start + per_device]
        x = filled
    return x.reshape(-1, size, *shape[2:])


def _collect(x, count: int, size: int) -> np.ndarray:
    """The tiles that were computed, in the order of ids, also where other processes have some."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        parts = np.split(np.asarray(process_allgather(x, tiled=True)), len(_devices.chosen()))
    else:
        parts = [shard.data for shard in x.addressable_shards]
    turns = int(_turns(count, size, len(parts))[0])
    return np.concatenate([np.asarray(part)[:turns] for part in parts])


def on_all_devices(shared: Any) -> Any:
    """The same, copied to all devices at once rather than again for each batch. What is there stays
    as it is.
    """
    if jax.process_count() > 1:
        return shared
    everywhere = NamedSharding(_mesh(), PartitionSpec())
    elsewhere = eqx.filter(
        shared, lambda x: eqx.is_array(x) and getattr(x, "sharding", None) != everywhere
    )
    return eqx.combine(jax.device_put(elsewhere, everywhere), shared)


def _mesh() -> Mesh:
    return Mesh(np.array(_devices.chosen()), ("tiles",))


def _compiled(function, shared) -> Callable[..., Any]:
    arrays, static = eqx.partition(shared, eqx.is_array)
    leaves, tree = jax.tree.flatten(static)
    run = _jitted(function, _mesh(), _devices.platform(), on_accelerator())
    return ft.partial(run, (tuple(leaves), tree), arrays)


@ft.cache
def _jitted(function, mesh: Mesh, platform: str, wide: bool):
    # `eqx.filter_jit` would wait for the result, and leave the devices idle while the host works.
    run = ft.wraps(function)(ft.partial(_run, mesh, wide, function))  # JAX's log has the name.
    return jax.jit(run, static_argnums=0, compiler_options=COMPILER_OPTIONS.get(platform))


def _run(mesh: Mesh, wide: bool, function, static, arrays, turns, ids, inputs):
    leaves, tree = static
    static = jax.tree.unflatten(tree, leaves)
    replicated, tiled = PartitionSpec(), PartitionSpec("tiles")

    def on_device(arrays, turns, ids, inputs):
        shared = eqx.combine(arrays, static)
        if wide:
            return jax.vmap(lambda *tile: function(shared, *tile))(ids, *inputs)

        # Traced once for its shapes and for the loop: the type of `turn` must be the same in both.
        @ft.partial(jax.jit, inline=True)
        def one(turn):
            at_turn = [lax.dynamic_index_in_dim(x, turn, keepdims=False) for x in (ids, *inputs)]
            return function(shared, *at_turn)

        def body(turn, results):
            def place(tiles, tile):
                return lax.dynamic_update_index_in_dim(tiles, tile, turn, 0)

            return jax.tree.map(place, results, one(turn))

        first = np.int32(0)  # Of the type that the loop counts in.
        shapes = jax.eval_shape(one, first)
        empty = jax.tree.map(lambda x: jnp.zeros((len(ids), *x.shape), x.dtype), shapes)
        # As many turns as there are tiles to do, without compiling anew for each number of them.
        return lax.fori_loop(first, turns[0], body, empty)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(replicated, tiled, tiled, tiled),
        out_specs=tiled,
        check_vma=False,
    )(arrays, turns, jnp.asarray(ids), inputs)
