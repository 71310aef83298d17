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
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..host import on_host
from ..program import Program
from ..replica import (
    Packed,
    Plan,
    Tables,
    gradients_of,
    led,
    packed_of,
    replica_ends,
    tiles_of,
    without_graph,
)
from ..step import (
    BLOCK,
    STEP_TILES,
    AbstractOneDecides,
    ConditionalExceedance,
    VectorRule,
    last_tables,
    step_parts,
    times_or_chances,
)
from ._run import Chunk, Inputs, Run, composed
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
) -> Float[np.ndarray, "figures kept sinks"]:
    """Backpropagates through the composition of the steps of chunk `k`: adds to the derivatives
    with respect to tables and thresholds, and returns those with respect to the ends of kept
    samples.
    """
    run, kept = every[0].simulated.run, every[0].simulated.chunks[k].decision.kept
    sinks = run.program.sinks.number
    of_ends = np.zeros((len(every), *kept.ends.shape))
    figure, needed = np.nonzero(np.stack([_that_count(one.relevance()[mine]) for one in every]))
    slopes = np.stack([one.slope[mine] for one in every])[figure, needed]
    samples = np.concatenate([_samples(one, k)[needed[figure == f]] for f, one in enumerate(every)])
    regimes = every[0].simulated.chunks[k].decision.systematic.regimes(0, mine.stop - mine.start)
    exceedances = [one.simulated.exceedance for one in every]
    thresholds = np.array([0.0 if one is None else one.threshold for one in exceedances])
    last = None if exceedances[0] is None else exceedances[0].last
    # Some at a time, so that memory holds few of their parts.
    for packed in packed_of(figure, len(every)).pieces(BLOCK):

        def inputs(first, count, packed=packed):
            some = packed.entries[first : first + count]
            at = needed[some]
            ends = np.zeros((count, len(run.plan.structure.sinks.first)), run.plan.dtype)
            ends[:, :sinks] = kept.ends[samples[some]]
            return (kept.first + at).astype(np.uint32), ends, regimes[at]

        slope = np.where(packed.entries >= 0, slopes[packed.entries], 0).astype(run.plan.dtype)
        of_figure = figure[packed.entries]
        # Figures differ by their thresholds.
        exceedance = (
            None
            if last is None
            else ConditionalExceedance(thresholds[of_figure].astype(run.plan.dtype), last)
        )
        of_last, of_parts, of_threshold = _through_last(run, packed, inputs, exceedance, slope)
        np.add.at(of_thresholds, of_figure, of_threshold)
        packed.add((sums.step, sums.residuals), (of_last.step, of_last.residuals))

        def all_inputs(first, count, inputs=inputs, of_parts=of_parts):
            return *inputs(first, count), *(x[first : first + count] for x in of_parts)

        shared = (without_graph(run.plan), run.key)
        for batch in packed.tiles(_step_vjp, shared, all_inputs, per_batch=STEP_TILES):
            packed.add(sums, batch.by_tile(operator.itemgetter(0)), batch.first)
            of_steps = batch.samples(operator.itemgetter(1))
            step, sink = np.nonzero(of_steps[:, :sinks])  # Mostly one each.
            some = packed.entries[batch.first + step]
            np.add.at(of_ends, (figure[some], samples[some], sink), of_steps[step, sink])
    return of_ends


def _samples(one: Weighting, k: int) -> np.ndarray:
    """The sample that decides each step of chunk `k`."""
    chunk = one.simulated.chunks[k]
    assert isinstance(chunk.decision, AbstractOneDecides)
    return chunk.decision.samples(0, chunk.steps)


def _that_count(size: np.ndarray) -> np.ndarray:
    """Whether a step matters: those far from a quantile sum to next to nothing."""
    return size * len(size) > _LEAST_SLOPE * size.sum()


def _through_last(
    run: Run,
    packed: Packed,
    inputs: Inputs,
    exceedance: ConditionalExceedance | None,
    slope: np.ndarray,
):
    """From steps back to their parts: the derivatives with respect to the tables of the step's
    factor and of residuals, by tile; with respect to each array of `StepParts`; and with respect to
    each threshold.
    """
    batches = composed(run, len(packed.entries), inputs)
    parts = [batch.samples(operator.itemgetter(2)) for batch in batches]
    parts = jax.tree.map(lambda *x: np.concatenate(x).reshape(-1, packed.size), *parts)
    by_tile = jax.tree.map(lambda x: x.reshape(-1, packed.size), (exceedance, slope))
    of_last, *of_each = on_host(_last_vjp, last_tables(run.plan.tables), parts, *by_tile)
    of_parts, of_threshold = jax.tree.map(lambda x: np.asarray(x).reshape(-1), of_each)
    return of_last, jax.tree.leaves(of_parts), of_threshold


def _last_vjp(last, parts, exceedance: ConditionalExceedance | None, slope):
    def of_tile(parts, exceedance, slope):
        real, rest = eqx.partition((last, parts, exceedance), eqx.is_inexact_array)
        _, vjp = jax.vjp(lambda real: times_or_chances(*eqx.combine(real, rest)), real)
        of_last, of_parts, of_exceedance = vjp(slope)[0]
        return of_last, of_parts, slope * 0 if exceedance is None else of_exceedance.threshold

    return jax.vmap(of_tile)(parts, exceedance, slope)


def _step_vjp(shared, _, ids, ends, regimes, *of_parts):
    plan, key = shared

    def forward(tables, ends):
        whole = dataclasses.replace(plan, tables=tables)
        _, parts = step_parts(whole, ends.T, ids, key, regimes)
        return eqx.filter(parts, eqx.is_inexact_array)

    parts, vjp = jax.vjp(forward, plan.tables, ends)
    return vjp(jax.tree.unflatten(jax.tree.structure(parts), of_parts))


def _through_replicas(run: Run, chunk: Chunk, of_ends: np.ndarray, sums: Tables) -> None:
    """Backpropagates through the replica samples that steps depend on: adds to the derivatives with
    respect to tables.

    Each pair of a sample and a deciding sink is backpropagated along one path.
    """
    draws, kept = chunk.draws, chunk.decision.kept
    figure, needed, sink = np.nonzero(of_ends)
    given, packed = draws.given(run), packed_of(figure, len(of_ends))

    def inputs(first, count):
        some = packed.entries[first : first + count]
        ids = kept.ids[needed[some]]
        weight = np.where(some >= 0, of_ends[figure[some], needed[some], sink[some]], 0)
        return ids, sink[some].astype(np.int32), weight.astype(kept.ends.dtype), *given(ids)

    shared = (run.plan, draws.sampling.lead, run.key)
    for batch in packed.tiles(_replica_vjp, shared, inputs, per_batch=tiles_of(run.plan)):
        packed.add(sums, batch.by_tile(), batch.first)


def _replica_vjp(shared, _, ids, sink, weight, *points):
    plan: Plan
    plan, lead, key = shared
    sampled, _ = led(plan, lead, ids, key, *points)

    def forward(tables):
        return replica_ends(dataclasses.replace(plan, tables=tables), sampled, key)

    ends, vjp = jax.vjp(forward, plan.tables)
    mine = jnp.arange(len(ends), dtype=jnp.int32)[:, None] == sink[None, :]
    return vjp(jnp.where(mine, weight[None, :], 0))[0]
