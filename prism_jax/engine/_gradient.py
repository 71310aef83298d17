"""Derivatives of figures of the step time with respect to a program's parameters.

A parameter acts on a step in three ways: through the ends of the replica that decides the step;
through the step's own draws (factor, reductions, tail); and through the weights of samples, which
depend on stall rates and the network. Samples are not stored; they are drawn again.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..program import Program
from ..replica import (
    Plan,
    by_strata,
    given_scores,
    gradients_of,
    replica_ends,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import (
    STEP_TILES,
    AbstractOneDecides,
    Over,
    Resampled,
    VectorRule,
    steps_of,
)
from ._composed import Composed
from ._draw import sobol_points
from ._prepare import Run
from ._run import Stretch
from ._weights import through_weights


# Steps whose slope is below this share of the mean slope are left out of derivatives.
_LEAST_SLOPE = 1e-4


class Weighting(NamedTuple):
    """How a figure depends on steps.

    **Attributes:**

    - `slope`: the derivative of the figure with respect to each step.
    - `influence`: the derivative of the figure with respect to the logarithm of each step's weight.
    - `over`: in place of that of the steps.
    - `resampled`: the decisions of all stretches, if their samples have new weights.
    """

    slope: Float[np.ndarray, " n"]
    influence: Float[np.ndarray, " n"]
    over: Over | None = None
    resampled: tuple[Resampled, ...] | None = None


def pull_back(composed_: Composed, weightings: Iterable[Weighting]) -> list[Program]:
    """The derivatives of figures with respect to the parameters of the program that was simulated.

    **Arguments:**

    - `weightings`: one for each figure.

    **Returns:**

    For each figure, a program whose parameters are the derivatives, with `None` for everything that
    is not a float.
    """
    found = [_of_figure(composed_, weighting) for weighting in weightings]
    return gradients_of(composed_.run.program, found)


def _of_figure(composed_: Composed, weighting: Weighting) -> Any:
    """Derivatives with respect to the plan's tables."""
    run, over = composed_.run, weighting.over or composed_.over
    of_tables = jax.tree.map(lambda x: np.zeros(x.shape), run.plan.tables)
    for k, stretch in enumerate(composed_.stretches):
        mine = slice(stretch.draws.first, stretch.draws.first + stretch.steps)
        slope, influence = weighting.slope[mine], weighting.influence[mine]
        of_tables, of_ends = _through_steps(run, stretch, over, slope, of_tables)
        of_tables = _through_replicas(run, stretch, of_ends, of_tables)
        if isinstance(stretch.decision, VectorRule):
            selections = stretch.decision.selections
            if weighting.resampled is not None:
                selections = weighting.resampled[k].selections
            of_tables = through_weights(run, stretch, selections, influence, of_tables)
    return of_tables


def _through_steps(run: Run, stretch: Stretch, over: Over | None, slope, of_tables):
    """Backpropagates through the composition of steps, to the plan and the ends of kept samples."""
    decision = stretch.decision
    assert isinstance(decision, AbstractOneDecides)
    sinks, kept = run.program.sinks.number, decision.kept
    of_ends = np.zeros(kept.ends.shape)
    needed = np.flatnonzero(_that_count(slope))
    samples = decision.samples(0, stretch.steps)[needed]
    regimes = decision.deal.regimes(0, stretch.steps)[needed]

    def inputs(first, count):
        some = slice(first, first + count)
        ends = np.zeros((count, len(run.plan.structure.sinks.first)), run.plan.dtype)
        ends[:, :sinks] = kept.ends[samples[some]]
        ids = (kept.first + needed[some]).astype(np.uint32)
        return ids, ends, regimes[some], slope[needed[some]].astype(run.plan.dtype)

    shared = (without_graph(run.plan), run.key, over)
    options = {"per_batch": STEP_TILES, "size": tile_size(len(needed))}
    for batch in tiles(_step_vjp, shared, len(needed), inputs, **options):
        tables_share, ends_share = batch.arrays
        of_tables = dataclasses.replace(batch, arrays=tables_share).added_to(of_tables)
        of_steps = dataclasses.replace(batch, arrays=ends_share).samples()
        step, sink = np.nonzero(of_steps[:, :sinks])  # Mostly one each.
        np.add.at(of_ends, (samples[batch.first + step], sink), of_steps[step, sink])
    return of_tables, of_ends


def _that_count(slope: np.ndarray) -> np.ndarray:
    """Whether a slope matters: those of steps far from a quantile sum to next to nothing."""
    size = np.abs(slope)
    return size * len(slope) > _LEAST_SLOPE * size.sum()


def _step_vjp(shared, _, ids, ends, regimes, slope):
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
