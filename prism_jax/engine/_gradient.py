"""Derivatives of figures of the step time with respect to a program's parameters.

A parameter acts on a step in three ways: through the ends of the replica that decides the step;
through the step's own draws (factor, reductions, tail); and through the weights of samples, which
depend on stall rates and the network. Samples are not stored; they are drawn again.
"""

import dataclasses
import itertools as it
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from ..host import vjp_on_host
from ..program import Program
from ..replica import (
    TILE,
    Plan,
    Tables,
    gradients_of,
    led,
    replica_end,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import (
    BLOCK,
    STEP_TILES,
    AbstractOneDecides,
    ConditionalExceedance,
    LastTables,
    StepParts,
    VectorRule,
    last_tables,
    step_parts,
    times_or_chances,
)
from ._run import Chunk, Run, composed, parts_of
from ._simulated_steps import SimulatedSteps
from ._weights import through_weights


# Steps whose slope is below this share of the mean slope are left out of derivatives.
_LEAST_SLOPE = 1e-4
# Derivatives with respect to the ends of samples are held for so many ends at once.
_MOST_ENDS = 2**25


class Weighting(NamedTuple):
    """How a figure depends on steps.

    **Attributes:**

    - `simulated`: the steps, or probabilities given a threshold.
    - `weights`: how much each of them counts; one on average.
    - `slope`: the derivative of the figure with respect to each of them.
    - `influence`: the derivative of the figure with respect to each weight.
    - `weighed`: the same chunks, perhaps with new weights of their samples, on which the weights
        of steps depend.
    - `bounded`: whether no step can matter more than others beyond the same threshold: a figure of
        probabilities, smoothed over steps or not.
    """

    simulated: SimulatedSteps
    weights: Float[np.ndarray, " n"]
    slope: Float[np.ndarray, " n"]
    influence: Float[np.ndarray, " n"]
    weighed: tuple[Chunk, ...]
    bounded: bool

    def relevance(self) -> Float[np.ndarray, " n"]:
        """How much each step matters to the derivative. A probability of zero or one does not."""
        size = np.abs(self.slope)
        steps = self.simulated.steps
        return size if self.simulated.exceedance is None else size * steps * (1 - steps)


def pull_back(weightings: Iterable[Weighting]) -> list[tuple[Program, float]]:
    """The derivatives of figures with respect to the parameters of the program that was simulated.

    **Arguments:**

    - `weightings`: one for each figure, all of one simulation, perhaps with other weights of its
        samples.

    **Returns:**

    For each figure, a program whose parameters are the derivatives, with `None` for everything that
    is not a float; and the derivative with respect to the threshold of its probabilities, or zero.
    """
    rest, found = iter(weightings), []
    first = next(rest)
    size = max(chunk.decision.kept.ends.size for chunk in first.simulated.chunks)
    some = [first, *it.islice(rest, max(_MOST_ENDS // size - 1, 0))]
    while some:
        found.append(_of_figures(some))
        some = [*it.islice(rest, max(_MOST_ENDS // size, 1))]
    tables, thresholds = jax.tree.map(lambda *x: np.concatenate(x), *found)
    gradients = gradients_of(first.simulated.run.program, tables)
    return list(zip(gradients, thresholds.tolist(), strict=True))


def _of_figures(every: Sequence[Weighting]) -> tuple[Tables, Float[np.ndarray, " figures"]]:
    """The derivatives with respect to tables and to thresholds; figures are the first axis."""
    run, chunks = every[0].simulated.run, every[0].simulated.chunks
    sums = jax.tree.map(lambda x: np.zeros((len(every), *x.shape)), run.plan.tables)
    of_thresholds = np.zeros(len(every))
    for k, chunk in enumerate(chunks):
        first = chunk.draws.first
        mine = slice(first, first + chunk.steps)
        of_ends = _through_steps(every, k, mine, sums, of_thresholds)
        _through_replicas(run, chunk, of_ends, sums)
        if isinstance(chunk.decision, VectorRule):
            decisions = [one.weighed[k].decision for one in every]
            influences = [(one.influence[mine], one.weights[mine], one.bounded) for one in every]
            through_weights(run, chunk, decisions, influences, sums)
    return sums, of_thresholds


def _through_steps(
    every: Sequence[Weighting], k: int, mine: slice, sums: Tables, of_thresholds: np.ndarray
) -> Float[np.ndarray, "kept sinks figures"]:
    """Backpropagates through the composition of the steps of chunk `k`: adds to the derivatives
    with respect to tables and thresholds, and returns those with respect to the ends of kept
    samples.
    """
    run, decision = every[0].simulated.run, every[0].simulated.chunks[k].decision
    assert isinstance(decision, AbstractOneDecides)
    kept, number, sinks = decision.kept, mine.stop - mine.start, run.program.sinks.number
    of_ends = np.zeros((*kept.ends.shape, len(every)))
    # Figures share the steps and the samples that decide these.
    needed = np.flatnonzero(np.any([_that_count(one.relevance()[mine]) for one in every], axis=0))
    samples = decision.samples(0, number)[needed]
    regimes = decision.systematic.regimes(0, number)[needed]

    def inputs(first, count):
        these = slice(first, first + count)
        ends = np.zeros((count, len(run.plan.structure.sinks.first)), run.plan.dtype)
        ends[:, :sinks] = kept.ends[samples[these]]
        return (kept.first + needed[these]).astype(np.uint32), ends, regimes[these]

    if not len(needed):
        return of_ends
    parts = parts_of(composed(run, len(needed), inputs))
    shared = without_graph(run.plan), run.key
    options = {"per_batch": STEP_TILES, "size": tile_size(len(needed), len(every))}
    # Some at a time, so that memory holds few of their derivatives.
    most = max(BLOCK // len(every), TILE)
    for start in range(0, len(needed), most):
        block = np.arange(start, min(start + most, len(needed)))
        of_last, of_parts, of_threshold = _through_last(every, parts, needed + mine.start, block)
        of_thresholds += of_threshold
        _add((sums.step, sums.residuals), (of_last.step, of_last.residuals))

        def of_block(first, count, start=start, of_parts=of_parts):
            return *inputs(start + first, count), *(x[first : first + count] for x in of_parts)

        for batch in tiles(_step_vjp, shared, len(block), of_block, **options):
            _add_tiles(sums, batch.by_tile(operator.itemgetter(0)))
            of_steps = batch.samples(operator.itemgetter(1))[..., :sinks]
            step, sink = np.nonzero(of_steps.any(axis=1))  # Mostly one each.
            sample = samples[start + batch.first + step]
            np.add.at(of_ends, (sample, sink), of_steps[step, :, sink])
    return of_ends


def _add(sums, more) -> None:
    """Adds arrays to those of the same structure."""
    jax.tree.map(lambda total, x: np.add(total, x, out=total), sums, more)


def _add_tiles(sums: Tables, of_tiles: Tables) -> None:
    """Adds the sums of tiles, one after the other, for any number of devices alike."""
    for k in range(len(jax.tree.leaves(of_tiles)[0])):
        _add(sums, jax.tree.map(lambda x, k=k: x[k], of_tiles))


def _that_count(size: np.ndarray) -> np.ndarray:
    """Whether a step matters: those far from a quantile sum to next to nothing."""
    return size * len(size) > _LEAST_SLOPE * size.sum()


def _through_last(
    every: Sequence[Weighting], parts: StepParts, steps: np.ndarray, block: np.ndarray
):
    """From a block of steps back to their parts, for each figure: the derivatives with respect to
    the tables of the step's factor and of residuals; with respect to each array of `StepParts`,
    `(steps, figures)`; and with respect to the threshold.
    """
    # The last step fills up a tile, with no slope: for each other length, JAX would trace anew.
    missing = -len(block) % TILE
    padded = np.append(block, np.full(missing, block[-1]))
    some, found = jax.tree.map(lambda x: x[padded], parts), []
    for one in every:
        parameters = last_tables(one.simulated.run.plan.tables), some, one.simulated.exceedance
        _, backward = vjp_on_host(_times_or_chances, parameters)
        found.append(backward(np.pad(one.slope[steps[block]], (0, missing))[None]))
    of_last, of_parts, of_exceedance = jax.tree.map(lambda *x: np.concatenate(x), *found)
    of_threshold = 0.0 if of_exceedance is None else of_exceedance.threshold
    return of_last, [x.T[: len(block)] for x in jax.tree.leaves(of_parts)], of_threshold


def _times_or_chances(parameters: tuple[LastTables, StepParts, ConditionalExceedance | None]):
    return times_or_chances(*parameters)


def _step_vjp(shared, _, ids, ends, regimes, *of_parts):
    plan, key = shared

    def forward(tables, ends):
        whole = dataclasses.replace(plan, tables=tables)
        _, parts = step_parts(whole, ends.T, ids, key, regimes)
        return eqx.filter(parts, eqx.is_inexact_array)

    parts, vjp = jax.vjp(forward, plan.tables, ends)
    of_parts = jax.tree.unflatten(jax.tree.structure(parts), of_parts)
    return jax.vmap(vjp, in_axes=1, out_axes=(0, 1))(of_parts)


def _through_replicas(run: Run, chunk: Chunk, of_ends: np.ndarray, sums: Tables) -> None:
    """Backpropagates through the replica samples that steps depend on: adds to the derivatives with
    respect to tables.

    Each pair of a sample and a deciding sink is backpropagated along one path, for all figures.
    """
    draws, kept = chunk.draws, chunk.decision.kept
    needed, sink = np.nonzero(of_ends.any(axis=2))
    figures = of_ends.shape[2]

    def inputs(first, count):
        some = slice(first, first + count)
        ids = kept.ids[needed[some]]
        weight = of_ends[needed[some], sink[some]].astype(kept.ends.dtype)
        return ids, sink[some].astype(np.int32), weight

    shared = (run.plan, draws.sampling.lead, run.key)
    options = {"per_batch": tiles_of(run.plan), "size": tile_size(len(needed), figures)}
    for batch in tiles(_replica_vjp, shared, len(needed), inputs, **options):
        _add_tiles(sums, batch.by_tile())


def _replica_vjp(shared, _, ids, sink, weight):
    plan: Plan
    plan, lead, key = shared
    sampled, _ = led(plan, lead, ids, key)

    def forward(tables):
        return replica_end(dataclasses.replace(plan, tables=tables), sampled, sink, key)

    _, vjp = jax.vjp(forward, plan.tables)
    return jax.vmap(vjp, in_axes=1)(weight)[0]
