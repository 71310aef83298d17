"""Max-plus propagation: an op starts when all it waits for has ended, and ends a latency later."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .. import _devices
from ._derivative import along_path
from ._lanes import pack, words_of
from ._latencies import Latencies
from ._levels import Levels


# Ends are counted anew from the latest one after so many levels: in single precision, a sum of 3e5
# equal latencies would drift by 0.4 %.
LEVELS_OF_SUM = 1024
_SAMPLES_OF_KERNEL = 128  # Four warps have so many threads.
# Of all indices of lanes and slots.
_IN = "promise_in_bounds"


def propagate(
    levels: Levels, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "sinks samples"]:
    """The ends of a graph's sinks, in seconds: the latest end of the ops of each.

    Latencies are made where they are used, one level after the other.

    Differentiable in reverse mode with respect to `latencies.tables` and `latencies.common`. The
    derivative of a max-plus program is one along the critical path and zero elsewhere: one pass
    keeps which of the ends that an op waits for was the latest (a bit where there are two), another
    follows these back, one level after the other, and makes the latencies on the path again. Where
    ends are equal, the path goes through the first.

    **Arguments:**

    - `levels`: the graph.
    - `latencies`: see [`Latencies`][].
    - `num_samples`: the length of the samples' axis.
    - `dtype`: of the ends.
    """
    return _ends(*_parted(latencies), levels, num_samples, dtype)


def propagate_to(
    levels: Levels, latencies: Latencies, sink: Int[Array, " samples"], dtype: jnp.dtype
) -> Float[Array, " samples"]:
    """The end of one sink in each sample, in seconds: `propagate`, where the derivatives of several
    figures, by `jax.vmap`, go back along the same paths, which are followed once.
    """
    return _end(*_parted(latencies), levels, sink, dtype)


def _parted(latencies: Latencies):
    """What is differentiated, and what is fixed."""
    values, fixed = eqx.partition((latencies.tables, latencies.common), eqx.is_inexact_array)
    return values, fixed, dataclasses.replace(latencies, tables=None, common=None)


@eqx.filter_custom_vjp
def _end(values, fixed, latencies, levels, sink, dtype):
    ends, _ = _forward(values, fixed, latencies, levels, len(sink), dtype, keep=False)
    return ends[sink, jnp.arange(len(sink))]


@_end.def_fwd
def _end_forward(perturbed, values, fixed, latencies, levels, sink, dtype):
    del perturbed
    number = len(sink)
    ends, kept = _forward(values, fixed, latencies, levels, number, dtype, keep=True)
    return ends[sink, jnp.arange(number)], kept


@_end.def_bwd
def _end_backward(kept, cotangent, perturbed, values, fixed, latencies, levels, sink, dtype):
    values, fixed = _perturbed(perturbed, values, fixed)
    return _back(values, fixed, latencies, levels, kept, sink, cotangent, dtype)


@eqx.filter_custom_vjp
def _ends(values, fixed, latencies, levels, num_samples, dtype):
    return _forward(values, fixed, latencies, levels, num_samples, dtype, keep=False)[0]


@_ends.def_fwd
def _ends_forward(perturbed, values, fixed, latencies, levels, num_samples, dtype):
    del perturbed
    return _forward(values, fixed, latencies, levels, num_samples, dtype, keep=True)


def level_latencies(latencies: Latencies, tables, common, levels: Levels, level):
    """The latencies of the lanes of a level: `(width, samples)`, or what broadcasts to it."""
    of_level = jax.tree.map(lambda table, row: table[row[level]], tables, latencies.rows)
    pair = jnp.arange(levels.width // 2, dtype=jnp.uint32)[:, None]
    pair += level.astype(jnp.uint32) * levels.pairs
    z = latencies.noise(latencies.noise_arguments, pair, _one_after_the_other)
    op = levels.ops[level][:, None]
    seconds = of_level.latency(op, z, common)
    return jnp.where(op >= 0, seconds, 0) if levels.joins else seconds


def _one_after_the_other(first, second):
    return jnp.stack([first, second], axis=1).reshape(-1, first.shape[1])


def on_hopper() -> bool:
    """Whether there is a GPU of compute capability 9, where one kernel for all levels is faster
    than loops of XLA: 2.4 to 1.7 times on an H200.
    """
    device, *_ = _devices.chosen()
    return device.platform == "gpu" and device.compute_capability.startswith("9.")


def _forward(values, fixed, latencies: Latencies, levels: Levels, num_samples, dtype, *, keep):
    """The ends of the sinks, and, to `keep`, which end was the latest at each join and sink."""
    args = *eqx.combine(values, fixed), latencies, levels, num_samples, dtype
    loops = ft.partial(_by_loops, *args, keep=keep)
    if not _in_one_kernel(num_samples, dtype):
        return loops()
    from ._kernel import one_kernel  # To import it takes longer than other imports together.

    # What is on a CPU, beside the GPU, is computed there.
    kernel = ft.partial(one_kernel, *args, keep=keep, interpret=False)
    return lax.platform_dependent(cuda=kernel, default=loops)


def _in_one_kernel(num_samples: int, dtype) -> bool:
    return dtype == jnp.float32 and num_samples % _SAMPLES_OF_KERNEL == 0 and on_hopper()


def _by_loops(
    tables, common, latencies: Latencies, levels: Levels, num_samples: int, dtype, *, keep
):
    """Level by level."""

    def step(level, carry):
        state, choices = carry
        latest, choice = _latest(state, levels.reads[level], keep)
        drawn = level_latencies(latencies, tables, common, levels, level)
        if keep:
            choices = lax.dynamic_update_index_in_dim(choices, pack(choice, levels), level, 0)
        return state.at[levels.writes[level]].set(latest + drawn, mode=_IN), choices

    def block(turn, carry):
        state, choices, passed = carry
        first = turn * LEVELS_OF_SUM
        last = jnp.minimum(first + LEVELS_OF_SUM, levels.num_levels)
        state, choices = lax.fori_loop(first, last, step, (state, choices))
        # Max-plus is linear: a constant that is subtracted from every slot shifts all ends, and is
        # added back last. Any would do, also the end in a slot that is no longer read.
        latest = jnp.where(last < levels.num_levels, jnp.max(state, axis=0, keepdims=True), 0)
        return state - latest, choices, passed + latest

    state = jnp.zeros((levels.num_slots, num_samples), dtype)
    words, word = words_of(levels)
    choices = jnp.zeros((len(levels.ops), words, num_samples), word) if keep else None
    blocks = -(-levels.num_levels // LEVELS_OF_SUM)
    start = (state, choices, jnp.zeros((1, num_samples), dtype))
    state, choices, passed = lax.fori_loop(0, blocks, block, start)
    ends, choice = _latest(state, levels.sinks, keep)
    return ends + passed, (choices, choice)


def _latest(state, reads: Int[Array, "lanes fan_in"], keep: bool):
    """The latest of the ends that each lane waits for, and which one it is: the first of equals, or
    any of them where a device reduces in another order.
    """
    if not keep:
        latest = state.at[reads[:, 0]].get(mode=_IN)
        for k in range(1, reads.shape[1]):
            latest = jnp.maximum(latest, state.at[reads[:, k]].get(mode=_IN))
        return latest, None
    # One reduction of both: XLA on a CPU reads the ends where it compares them, and only once.
    ends = state.at[reads].get(mode=_IN)
    number = lax.broadcasted_iota(jnp.uint32, ends.shape, 1)
    start = ends.dtype.type(-np.inf), np.uint32(0)
    return lax.reduce((ends, number), start, _later, (1,))


def _later(a, b):
    return jnp.maximum(a[0], b[0]), jnp.where(b[0] > a[0], b[1], a[1])


def _perturbed(perturbed, values, fixed):
    """What is differentiated here, and what is fixed."""
    values, constant = eqx.partition(values, perturbed)
    return values, eqx.combine(fixed, constant)


def _back(values, fixed, latencies, levels: Levels, kept, sink, weight, dtype):
    """What the latencies on the path to a sink of each sample contribute to the derivatives."""
    choices, at_sinks = kept
    samples = len(sink)
    last = levels.sink_cells[sink, at_sinks[sink, jnp.arange(samples)].astype(jnp.int32)]
    args = values, fixed, latencies, levels, choices, last, weight
    loops = ft.partial(along_path, *args)
    # Of a table that is looked up, a column of each sample would take too much memory.
    tables = any(len(x) > 1 for x in jax.tree.leaves((values[1], fixed[1])))
    if tables or not _in_one_kernel(samples, dtype):
        return loops()
    from ._kernel_back import one_kernel_back

    kernel = ft.partial(one_kernel_back, *args, interpret=False)
    return lax.platform_dependent(cuda=kernel, default=loops)


@_ends.def_bwd
def _ends_backward(
    kept, cotangent, perturbed, values, fixed, latencies, levels, num_samples, dtype
):
    values, fixed = _perturbed(perturbed, values, fixed)
    number, columns = np.arange(len(cotangent), dtype=np.int32)[:, None], jnp.arange(num_samples)

    def after(sink):
        """Which sinks of each sample after this one are still to follow."""
        return (cotangent != 0) & (number > sink[None])

    def follow(carry):
        """The next path of each sample: of weight zero, if there is none."""
        sink, gradient = carry
        there = after(sink)
        onward = lax.argmax(there, 0, np.int32)
        weight = jnp.where(there[onward, columns], cotangent[onward, columns], 0)
        more = _back(values, fixed, latencies, levels, kept, onward, weight, dtype)
        return jnp.maximum(sink, onward), jax.tree.map(jnp.add, gradient, more)

    start = jnp.full(num_samples, -1, np.int32), jax.tree.map(jnp.zeros_like, values)
    return lax.while_loop(lambda carry: jnp.any(after(carry[0])), follow, start)[1]
