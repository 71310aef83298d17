"""Derivatives of figures of the step time with respect to a program's parameters.

A parameter acts on a step in three ways: through the ends of the replica that decides the step;
through the step's own draws (factor, reductions, tail); and through the weights of samples, which
depend on stall rates and the network. Samples are not stored; they are drawn again.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..program import Program
from ..replica import (
    Plan,
    by_strata,
    given_scores,
    gradient_of,
    gradients_of,
    replica_ends,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import (
    AbstractOneDecides,
    steps_of,
)
from ._composed import Composed
from ._draw import sobol_points
from ._prepare import Run
from ._run import Stretch, step_tiles
from ._weights import through_weights


def pull_back(
    composed_: Composed, slope: Float[np.ndarray, " n"], influence: Float[np.ndarray, " n"]
) -> Program:
    """The derivative of a figure with respect to the parameters of the program that was simulated.

    **Arguments:**

    - `slope`: the derivative of the figure with respect to each of `composed_.steps`.
    - `influence`: the derivative of the figure with respect to the logarithm of each step's weight.

    **Returns:**

    A program whose parameters are the derivatives, with `None` for everything that is not a float.
    """
    of_stretches = _of_stretches(composed_, slope, influence)
    return gradient_of(composed_.run.program, ft.reduce(_sum, of_stretches))


def pull_back_batches(
    composed_: Composed, slope: Float[np.ndarray, " n"], influence: Float[np.ndarray, " n"]
) -> list[Program]:
    """The contribution of each batch to `pull_back`, which is their sum."""
    of_stretches = _of_stretches(composed_, slope, influence)
    number = len(composed_.stretches) // composed_.batches
    batches = (it.islice(of_stretches, number) for _ in range(composed_.batches))
    return gradients_of(composed_.run.program, [ft.reduce(_sum, batch) for batch in batches])


def _sum(one, other):
    return jax.tree.map(np.add, one, other)


def _of_stretches(composed_: Composed, slope, influence) -> Iterator[Any]:
    """The contribution of each stretch, as derivatives with respect to the plan's tables."""
    run = composed_.run
    for stretch in composed_.stretches:
        mine = slice(stretch.draws.first, stretch.draws.first + stretch.draws.steps)
        of_tables = jax.tree.map(lambda x: np.zeros(x.shape), run.plan.tables)
        of_tables, of_ends = _through_steps(composed_, stretch, slope[mine], of_tables)
        of_tables = _through_replicas(run, stretch, of_ends, of_tables)
        yield through_weights(run, stretch, influence[mine], of_tables)


def _through_steps(composed_: Composed, stretch: Stretch, slope, of_tables):
    """Backpropagates through the composition of steps, to the plan and the ends of kept samples."""
    run, decision = composed_.run, stretch.decision
    assert isinstance(decision, AbstractOneDecides)
    start, sinks = decision.kept.first, run.program.sinks.number
    of_ends = np.zeros(decision.kept.ends.shape)

    def inputs(first, count):
        return (slope[first : first + count].astype(run.plan.dtype),)

    shared = (without_graph(run.plan), run.key, composed_.over)
    for batch in step_tiles(_step_vjp, shared, [stretch], inputs):
        tables_share, ends_share = batch.arrays
        of_tables = dataclasses.replace(batch, arrays=tables_share).added_to(of_tables)
        of_steps = dataclasses.replace(batch, arrays=ends_share).samples()
        samples = decision.samples(batch.first - start, batch.count)
        step, sink = np.nonzero(of_steps[:, :sinks])  # Mostly one each.
        np.add.at(of_ends, (samples[step], sink), of_steps[step, sink])
    return of_tables, of_ends


def _step_vjp(shared, ids, ends, regimes, slope):
    plan, key, over = shared

    def forward(tables, ends):
        return steps_of(dataclasses.replace(plan, tables=tables), ends.T, ids, key, regimes, over)

    _, vjp = jax.vjp(forward, plan.tables, ends)
    return vjp(slope)


def _through_replicas(run: Run, stretch: Stretch, of_ends, of_tables):
    """Backpropagates through the replica samples that steps depend on, to the plan.

    Each pair of a sample and a deciding sink is backpropagated along one path.
    """
    draws, kept = stretch.draws, stretch.decision.kept
    needed, sink = np.nonzero(of_ends)
    points = sobol_points(run, draws)

    def inputs(first, count):
        some = slice(first, first + count)
        ids = kept.ids[needed[some]]
        given = () if points is None else (points[ids - np.uint32(draws.first)],)
        weight = of_ends[needed[some], sink[some]].astype(kept.ends.dtype)
        return ids, sink[some].astype(np.int32), weight, *given

    shared = (run.plan, draws.lead, run.key)
    options = {"per_batch": tiles_of(run.plan), "size": tile_size(len(needed))}
    for batch in tiles(_replica_vjp, shared, len(needed), inputs, **options):
        of_tables = batch.added_to(of_tables)
    return of_tables


def _replica_vjp(shared, _, ids, sink, weight, *points):
    plan: Plan
    plan, lead, key = shared
    given, _ = given_scores(lead, ids, key, *points)

    def forward(tables):
        whole = dataclasses.replace(plan, tables=tables)
        return replica_ends(whole, by_strata(plan, ids, given), key)

    ends, vjp = jax.vjp(forward, plan.tables)
    mine = jnp.arange(len(ends), dtype=jnp.int32)[:, None] == sink[None, :]
    return vjp(jnp.where(mine, weight[None, :], 0))[0]
