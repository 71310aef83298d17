"""Kernels of a GPU by Pallas and Triton, each program of whose grid takes some samples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import triton

from ._latencies import Latencies
from ._levels import Levels


_WARPS = 4


def on_grid(
    kernel: Callable[..., None],
    graph: Any,
    law: Latencies,
    of_samples: Any,
    results: Any,
    *,
    samples: int,
    block: int,
    name: str,
    interpret: bool,
):
    """Runs a kernel on all samples, and returns its results.

    **Arguments:**

    - `kernel`: is given references to `graph`, `law`, `of_samples` and its results, which it
        writes.
    - `graph`: arrays that all programs see whole.
    - `of_samples`: arrays whose last axis is the samples.
    - `results`: the shape of each without the samples, and its dtype.
    - `samples`, `block`: how many there are, and how many of a program: a part of them.
    - `interpret`: whether JAX evaluates the kernel, on any device.
    """

    def whole(x) -> pallas.BlockSpec:
        return pallas.BlockSpec(x.shape, lambda i: (0,) * x.ndim)

    def cut(x) -> pallas.BlockSpec:
        return pallas.BlockSpec((*x.shape[:-1], block), lambda i: (*[0] * (x.ndim - 1), i))

    # What a kernel reads in place has one axis.
    common = jax.tree.map(lambda x: x if len(x) == 1 else x.reshape(-1), law.common)
    law = dataclasses.replace(law, common=common)
    leaves, tree = jax.tree.flatten((graph, law, of_samples))
    parts = (
        jax.tree.map(whole, (graph, law.rows)),
        jax.tree.map(lambda x: cut(x) if x.shape[1] > 1 else whole(x), law.tables),
        jax.tree.map(lambda x: cut(x) if x.ndim > 1 else whole(x), common),
        jax.tree.map(lambda x: cut(x) if len(x) == samples else whole(x), law.noise_arguments),
        jax.tree.map(cut, of_samples),
    )
    (graph_parts, rows), tables, common, noise_arguments, cuts = parts
    law_parts = Latencies(tables, rows, common, law.noise, noise_arguments)
    shapes = [jax.ShapeDtypeStruct((*shape, samples), kind) for shape, kind in results]

    def of_refs(*refs):
        kernel(*tree.unflatten(refs[: len(leaves)]), refs[len(leaves) :])

    return pallas.pallas_call(
        of_refs,
        grid=(samples // block,),
        in_specs=jax.tree.leaves((graph_parts, law_parts, cuts)),
        out_specs=[cut(x) for x in shapes],
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name=name,
    )(*leaves)


def numbers_of(levels: Levels):
    """How many levels there are, and pairs of random numbers of a level: an array, for a kernel
    takes no numbers.
    """
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (levels.num_levels, levels.pairs)])


def noise_of(law: Latencies, numbers, level, lane, block: int, arranged):
    """The noise of the ops in a pair of lanes, of which `lane` is one, for all samples, or for each
    sample in a pair of its own, as `arranged` wants it.
    """

    def read(x):
        return x[...] if x.shape == (block,) else tuple(x[i] for i in range(len(x)))

    pair = level.astype(jnp.uint32) * numbers[np.int32(1)].astype(jnp.uint32)
    arguments = jax.tree.map(read, law.noise_arguments)
    return law.noise(arguments, pair + (lane.astype(jnp.uint32) >> np.uint32(1)), arranged)


def common_of(law: Latencies):
    """What all ops share: read where it is used, for what is held through all levels would take
    many registers.
    """
    return jax.tree.map(lambda x: x[0, :] if x.ndim == 2 else _InPlace(x), law.common)


class _InPlace:
    """A table that is read where it lies: what `look_up` asks of an array."""

    def __init__(self, table):
        self.table = table

    def reshape(self, *_):
        return self

    def __getitem__(self, index):
        return triton.load(self.table.at[index])


def turns(number, body, start=None):
    """`body` of each number below the given one, and of what the last one gave."""
    return lax.fori_loop(np.int32(0), jnp.asarray(number, jnp.int32), body, start)
