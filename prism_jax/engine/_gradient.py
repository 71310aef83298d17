"""Derivatives of figures of the step time with respect to a program's parameters.

A parameter acts on a step in three ways: through the end of the sample that decides it; through the
step's own draws (factor, reductions, tail); and through the weights of samples, which depend on
stall rates and the network. Samples are not stored; they are drawn again, and each pair of a sample
and a sink that decides is backpropagated along one path.

All sums are by segments of the steps, such as the groups of the samples that decide them: a tile
holds the steps of one segment, so that all segments take one pass.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..op_law import Tables
from ..replica import (
    led,
    replica_end,
    stall_entries,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import GROUPS, STEP_TILES, step_parts, times_or_chances
from ._simulated_steps import SimulatedSteps


# Steps that matter less than this share of the mean are left out of derivatives.
_LEAST = 1e-4


class Derivatives(NamedTuple):
    """Derivatives of a sum over steps, by segments of the steps, which are the first axis.

    **Attributes:**

    - `tables`: with respect to the tables of the plan.
    - `threshold`: with respect to that of probabilities, or zero.
    """

    tables: Tables
    threshold: Float[np.ndarray, " segments"]


def through_paths(
    simulated: SimulatedSteps,
    slope: Float[np.ndarray, " n"],
    relevance: Float[np.ndarray, " n"],
    segment: Int[np.ndarray, " n"],
    segments: int,
) -> Derivatives:
    """Through the samples that decide steps and the steps' own draws.

    **Arguments:**

    - `slope`: the derivative of the sum with respect to each step.
    - `relevance`: how much each step matters, at least zero: those that matter least are left out.
    - `segment`: of each step, below `segments`.
    """
    run, deciders = simulated.run, simulated.deciders
    sums = jax.tree.map(lambda x: np.zeros((segments, *x.shape)), run.plan.tables)
    derivatives = Derivatives(sums, np.zeros(segments))
    steps = np.flatnonzero(relevance * len(relevance) > _LEAST * relevance.sum())
    if not len(steps):
        return derivatives
    sink, owner = deciders.sink[steps], segment[steps]
    ends, regimes = deciders.ends[steps, sink], deciders.regime[steps]
    columns = steps.astype(np.uint32), ends, sink, regimes, slope[steps].astype(ends.dtype)
    shared = without_graph(run.plan), simulated.exceedance, run.key
    of_ends = _by_segment(_step_vjp, shared, columns, owner, derivatives, STEP_TILES)
    # What the steps that a sample decides at a sink matter sums up before it is drawn again.
    sinks = run.program.sinks.number
    pair = (owner.astype(np.int64) * sinks + sink) << 32 | deciders.ids[steps]
    pairs, inverse = np.unique(pair, return_inverse=True)
    weights = np.bincount(inverse, of_ends).astype(ends.dtype)
    owner, sink = np.divmod(pairs >> 32, sinks)
    columns = (pairs & 0xFFFFFFFF).astype(np.uint32), sink.astype(np.int32), weights
    shared = run.plan, run.sampling.lead, run.key
    _by_segment(_replica_vjp, shared, columns, owner, derivatives, tiles_of(run.plan))
    return derivatives


def _by_segment(
    function: Callable[..., Any],
    shared: Any,
    columns: tuple[np.ndarray, ...],
    owner: Int[np.ndarray, " entries"],
    derivatives: Derivatives,
    per_batch: int,
) -> Float[np.ndarray, " entries"]:
    """Adds the sums of tiles that hold entries of one segment each to the derivatives, one after
    the other, for any number of devices alike; and returns what the function gives for entries.

    **Arguments:**

    - `columns`: what each entry consists of; the last is its weight.
    - `owner`: the segment of each.
    """
    # Of one segment or of each group: one size of tiles, which is compiled once.
    segments, size = len(derivatives.threshold), tile_size(len(owner) // GROUPS)
    order, counts = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=segments)
    number = -(-counts // size)
    before = np.cumsum(number * size) - number * size - (np.cumsum(counts) - counts)
    slots = np.arange(len(owner)) + before[owner[order]]
    entries = np.full(number.sum() * size, -1)
    entries[slots] = order
    of_tiles, values = np.repeat(np.arange(segments), number), np.zeros(len(owner))

    def inputs(first: int, count: int) -> tuple[np.ndarray, ...]:
        entry = entries[first : first + count]
        *columns_of_entries, weights = (x[entry] for x in columns)
        return *columns_of_entries, np.where(entry >= 0, weights, 0)

    for batch in tiles(function, shared, len(entries), inputs, per_batch=per_batch, size=size):
        sums = batch.by_tile(operator.itemgetter(0))
        of_batch = of_tiles[batch.first // size :]
        for total, x in zip(jax.tree.leaves(derivatives), jax.tree.leaves(sums), strict=True):
            for to, of_tile in zip(of_batch, x, strict=False):
                total[to] += of_tile
        entry = entries[batch.first : batch.first + batch.count]
        values[entry[entry >= 0]] = batch.samples(operator.itemgetter(1))[entry >= 0]
    return values


def _step_vjp(shared, _, ids, end, sink, regimes, slope):
    """Of one tile: the derivatives of the sum of steps by tables and threshold, and of each by its
    end.
    """
    plan, exceedance, key = shared
    numbers = jnp.arange(len(plan.structure.sinks.first), dtype=sink.dtype)
    other_sinks = numbers[:, None] != sink[None]

    def forward(tables, exceedance, end):
        ends = jnp.where(other_sinks, jnp.finfo(end.dtype).min / 4, end[None])
        changed = dataclasses.replace(plan, tables=tables)
        parts = step_parts(changed, ends, ids, key, regimes)[1]
        return times_or_chances(tables.step, tables.residuals, parts, exceedance)

    _, vjp = jax.vjp(forward, plan.tables, exceedance, end)
    of_tables, of_exceedance, of_end = vjp(slope)
    return (of_tables, 0.0 if exceedance is None else of_exceedance.threshold), of_end


def _replica_vjp(shared, _, ids, sink, weight):
    """Of one tile: the derivatives of the sum of ends by tables."""
    plan, lead, key = shared
    sampled, _ = led(plan, lead, ids, key)

    def forward(tables):
        return replica_end(dataclasses.replace(plan, tables=tables), sampled, sink, key)

    _, vjp = jax.vjp(forward, plan.tables)
    return (*vjp(weight), jnp.zeros((), weight.dtype)), weight


def through_weights(
    simulated: SimulatedSteps,
    influence: Float[np.ndarray, " n"],
    lost: Float[np.ndarray, " n"],
    segment: Int[np.ndarray, " n"],
    segments: int,
) -> Derivatives:
    """Through how likely stalls of each kind, and a congested network, are.

    If the law `p` of a replica becomes `p (1 + e s)`, the mean of a function of the slowest moves
    by `e` times the mean of `s`, at the sample that decides, times what the function loses without
    this sample: all other terms have a mean of zero.

    **Arguments:**

    - `influence`: the derivative of the figure with respect to the weight of each step.
    - `lost`: the same without what it is without the sample that decides the step.
    """
    run, regime = simulated.run, simulated.deciders.regime
    sums = jax.tree.map(lambda x: np.zeros((segments, *x.shape)), run.plan.tables)
    derivatives, strata = Derivatives(sums, np.zeros(segments)), run.program.strata
    if len(strata) == 1:
        return derivatives

    def total(x: np.ndarray, place: np.ndarray, number: int) -> np.ndarray:
        return np.bincount(segment * number + place, x, segments * number).reshape(-1, number)

    chances, network = run.chances, len(run.chances.network)
    sums.network[:] = total(influence, regime, network) / chances.network
    # The weights of samples sum to one in each regime.
    share = chances.weight * chances.share
    share = share / np.bincount(chances.regime, share, network)[chances.regime]
    of_stratum = total(lost, simulated.deciders.stratum, len(strata))
    of_stratum -= total(lost, regime, network)[:, chances.regime] * share
    stalls = np.array([stratum.stalls for stratum in strata])
    likely = np.asarray(run.plan.tables.stall_counts, np.float64)
    for number in np.flatnonzero(likely > 0):
        sums.stall_counts[:, number] = of_stratum[:, stalls == number].sum(axis=1) / likely[number]
    if sums.stall_shares is not None:
        sums.stall_shares[:] = _through_entries(simulated, stalls, lost, segment, segments)
    return derivatives


def _through_entries(
    simulated: SimulatedSteps,
    stalls: np.ndarray,
    lost: np.ndarray,
    segment: np.ndarray,
    segments: int,
) -> Float[np.ndarray, "segments entries"]:
    """Through which op each stall of a sample pauses, given how many there are: of the logarithm of
    a sample's likelihood, the derivative with respect to an entry's share is how many of its stalls
    are that entry, over the share.
    """
    run, deciders = simulated.run, simulated.deciders
    share = np.asarray(run.plan.tables.stall_shares, np.float64)
    number = stalls[deciders.stratum].astype(np.int32)
    steps, counts = np.flatnonzero((number > 0) & (lost != 0)), np.zeros((segments, len(share)))

    def inputs(first: int, count: int) -> tuple[np.ndarray, ...]:
        at = steps[first : first + count]
        return deciders.ids[at], number[at]

    shared = run.plan, run.key
    for batch in tiles(_entries_tile, shared, len(steps), inputs, per_batch=STEP_TILES):
        entries = batch.samples()
        step, stall = np.nonzero(entries >= 0)
        at = steps[batch.first + step]
        np.add.at(counts, (segment[at], entries[step, stall]), lost[at])
    return np.divide(counts, share, out=np.zeros_like(counts), where=share > 0)


def _entries_tile(shared, _, ids, stalls):
    plan, key = shared
    return stall_entries(plan, ids, stalls, key).T
