"""The kernels that propagate on a GPU, as JAX interprets them: forward the same bits as the loops
of XLA, and back the same derivatives.
"""

import dataclasses
import functools as ft
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.engine._sampling import pilot_key
from prism_jax.latency import Gamma, LogNormal
from prism_jax.maxplus import _propagate, to_levels
from prism_jax.maxplus._derivative import along_path
from prism_jax.maxplus._kernel import one_kernel
from prism_jax.maxplus._kernel_back import one_kernel_back
from prism_jax.program import Adjustment, _assemble
from prism_jax.random import key_data
from prism_jax.replica import leading_axes, led, make_plan
from prism_jax.replica._ends import replica_latencies

from .helpers import lognormal, random_dag, rich_program


_SAMPLES = 256


def _wide_and_joined(number: int):
    """More ops at once than stand side by side, and joins."""
    before = random_dag(0, number)
    return [
        *before,
        tuple(range(number)),
        *[(number,)] * number,
        tuple(range(number + 1, 2 * number)),
    ]


def _of_graph(predecessors, kinds) -> prism.Program:
    laws = prism.Variability(residual=kinds)
    names = list(kinds)
    ops = [prism.Op(1.0, before, names[i % len(names)]) for i, before in enumerate(predecessors)]
    return prism.compile_graph(ops, variability=laws)


def _in_wide_levels(make) -> prism.Program:
    """With levels of 64 lanes, whose choices are in several words."""
    with mock.patch.object(_assemble, "to_levels", ft.partial(to_levels, width=64)):
        return make()


def _adjusted(program: prism.Program) -> prism.Program:
    """With a group for each rank, and factors on them."""
    ranks = 1 + int(program.rows.rank.max())
    group = program.rows.rank[program.ops.row] % ranks
    factors = jnp.linspace(0.5, 1.5, ranks, dtype=program.latencies.mean.dtype)
    adjustment = Adjustment(np.asarray(group, np.int32), factors, factors, factors)
    return dataclasses.replace(program, adjustment=adjustment)


_GAMMAS = {"a": Gamma(1.0, 0.1), "b": Gamma(2.0, 0.3)}
PROGRAMS = {
    "all laws": lambda: _adjusted(rich_program(4, worker_step=lognormal(0.02))),
    "laws of tables, many levels": lambda: _of_graph(
        [tuple(x for x in (i - 1, i - 7) if x >= 0) for i in range(1100)], _GAMMAS
    ),
    "many lanes and joins": lambda: _in_wide_levels(
        lambda: _of_graph(_wide_and_joined(70), {"a": LogNormal(1.0, 0.2)})
    ),
}


def latencies_of(program: prism.Program):
    """Tables and all else that the kernel takes, of some samples of a program; of leading axes,
    too, where there are shared factors.
    """
    plan, key = make_plan(program), key_data(jr.key(3))
    shared = program.variability.rank is not None
    lead = leading_axes(program, plan, pilot_key()) if shared else None
    sampled, _ = led(plan, lead, jnp.arange(_SAMPLES, dtype=jnp.uint32), key)
    values, fixed, latencies = _propagate._parted(replica_latencies(plan, sampled, key))
    tables, common = eqx.combine(values, fixed)
    return tables, common, latencies, plan.structure.replica.levels, _SAMPLES, plan.dtype


@eqx.filter_jit
def loops(tables, common, *others):
    """The ends of sinks and the choices of joins and sinks, by the loops of XLA."""
    values, fixed = eqx.partition((tables, common), eqx.is_inexact_array)
    return _propagate._forward(values, fixed, *others, keep=True)


@eqx.filter_jit
def _interpreted(*args):
    ends, kept = one_kernel(*args, keep=True, interpret=True)
    return ends, kept, one_kernel(*args, keep=False, interpret=True)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernel_gives_the_bits_of_the_loops_and_their_choices(name):
    with jax.enable_x64(False):
        args = latencies_of(PROGRAMS[name]())
        levels = args[3]
        ends, kept = loops(*args)
        by_kernel, kept_by_kernel, alone = _interpreted(*args)
    number = int(levels.num_levels)
    assert ends.dtype == np.float32
    assert kept[0].dtype.itemsize > 1  # Or indices of up to 4 GiB would not fit into 31 bits.
    np.testing.assert_array_equal(by_kernel, ends)
    np.testing.assert_array_equal(alone, ends)
    np.testing.assert_array_equal(kept_by_kernel[0][:number], kept[0][:number])
    np.testing.assert_array_equal(kept_by_kernel[1], kept[1])


def paths_of(program: prism.Program):
    """What `along_path` takes, of samples that take turns in whose sink's path they have."""
    args = tables, common, latencies, levels, number, _ = latencies_of(program)
    _, (choices, at_sinks) = loops(*args)
    sample = np.arange(number)
    sink = sample % np.count_nonzero(np.asarray(levels.sink_cells)[:, 0] >= 0)
    last = levels.sink_cells[sink, np.asarray(at_sinks)[sink, sample].astype(np.int32)]
    values, fixed = eqx.partition((tables, common), eqx.is_inexact_array)
    weight = jnp.linspace(-1, 2, number, dtype=jnp.float32)
    return values, fixed, latencies, levels, choices, jnp.asarray(last), weight


loops_back = eqx.filter_jit(along_path)
BACK = "all laws", "many lanes and joins"  # Without laws of tables.


@pytest.mark.parametrize("name", BACK)
def test_back_along_paths_one_kernel_gives_the_derivatives_of_the_loops(name):
    """To the last bits, which sums in another order have; of scores and stalls, all bits."""
    with jax.enable_x64(False):
        args = paths_of(PROGRAMS[name]())
        of_loops = loops_back(*args)
        of_kernel = eqx.filter_jit(one_kernel_back)(*args, interpret=True)
    for a, b in zip(*map(jax.tree.leaves, (of_kernel, of_loops)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
    assert np.any(of_loops[0].class_law.single.mean)
    alone = [(x[0].score, x[1]) for x in (of_kernel, of_loops)]
    jax.tree.map(np.testing.assert_array_equal, *alone)
