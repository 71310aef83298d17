"""A pool: samples of one replica, and the steps that they decide. A prototype of one rule and one
error for all of `step`; `pool.py` shows what it does.

A step takes R of the n samples of its pool without replacement, and looks at the K slowest of them:
each sink ends when the latest of these does. Samples are in 32 groups. The error of a figure is how
it moves when a group is left out: a step then ends without the replicas that it took from there.
So a step has two times, with all it looks at, and without the group of the one that decided it.
"""

import functools as ft
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from prism_jax._estimate import Scatter
from prism_jax.engine._run import Run
from prism_jax.law import LEVELS, Errors, errors_of_figures
from prism_jax.random import KeyData, counters, uniforms
from prism_jax.random._threefry import threefry
from prism_jax.replica import (
    Plan,
    led,
    mean_reductions,
    replica_ends,
    stratum_of,
    tiles,
    tiles_of,
    without_ops,
    without_steps,
)
from prism_jax.step import step_parts


GROUPS = 32
# A figure is known if so many groups have steps on either side of it.
FEWEST_GROUPS = 10
# So many of 32 contributions do not tell more: beyond it Hall's transformation has no bound.
_SKEWED = 0.3
# A pool has so many samples for each replica of a step, so that its slowest decide enough.
SAMPLES_A_REPLICA = 64
# If the last of the K replicas decides more steps than this, twice as many are looked at. At 1 % p5
# would be low by a third of its standard error.
_LAST = 0.001
# Streams of random numbers that the engine has no use for: where ranks begin, and further picks.
_OFFSET, _PICKS = 300, 301


class Pool(eqx.Module):
    """Samples of one replica: those of each regime of the network in turn, the slowest first.

    **Attributes:**

    - `ends`: when each sink ends.
    - `ids`: the ids of the samples.
    - `weight`: the likelihood of each; one if samples are drawn by their law.
    - `size`: how many samples there are of each regime. Static.
    """

    ends: Float[Array, "samples sinks"]
    ids: UInt32[Array, " samples"]
    weight: Float[Array, " samples"]
    size: tuple[int, ...] = eqx.field(static=True)


class Picks(eqx.Module):
    """By which chance a step takes a sample.

    **Attributes:**

    - `steps`, `part`: how many steps have a slowest replica that is each sample or one before it:
        the whole steps, and the chance of one more.
    - `later`: for the second and further replicas, the logarithm of the chance that it is none of
        the samples up to each. After sample `j`, it comes after `k` by `exp(later[k] - later[j])`.
    """

    steps: Int[Array, " samples"]
    part: Float[Array, " samples"]
    later: Float[Array, "K-1 samples"]


class Steps(eqx.Module):
    """Steps of a pool.

    **Attributes:**

    - `times`, `without`: in seconds; without the replicas of the group that decided it, `nan` if a
        step looked at no other.
    - `group`: the group of the sample that decided it.
    - `sample`, `other`: the position of this sample, and of that which decides without its group.
    - `sink`, `other_sink`: the sink that each of these two times waits for.
    - `first`: the position of the slowest replica that it looked at.
    - `last`: whether the last of the K replicas decided it: then more should be looked at.
    """

    times: Float[Array, " steps"]
    without: Float[Array, " steps"]
    group: Int[Array, " steps"]
    sample: Int[Array, " steps"]
    other: Int[Array, " steps"]
    sink: Int[Array, " steps"]
    other_sink: Int[Array, " steps"]
    first: Int[Array, " steps"]
    last: Bool[Array, " steps"]


def draw(run: Run, first: int, count: int, *, on_host: bool = True) -> Pool:
    """A pool of so many samples. On a CPU NumPy sorts them, in a tenth of XLA's time."""
    lead = run.sampling and run.sampling.lead
    shared, size = (without_steps(run.plan), lead, run.key), tiles_of(run.plan)
    batches = list(tiles(_replica_tile, shared, count, first=first, per_batch=size))
    ends, score, regime, weight = (
        np.concatenate(parts) for parts in zip(*(b.samples() for b in batches), strict=True)
    )
    ends = ends[:, : run.program.sinks.number]
    ids = np.arange(first, first + count, dtype=np.uint32)
    number = np.bincount(regime, minlength=len(run.chances.network))
    order = (order_on_host if on_host else order_on_device)(score, regime)
    ends, ids, weight = (jnp.asarray(x[order]) for x in (ends, ids, weight))
    return Pool(ends, ids, weight, tuple(number.tolist()))


def _replica_tile(shared, ids):
    plan, lead, key = shared
    sampled, likelihood = led(plan, lead, ids, key)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    strata = plan.structure.strata
    return ends.T, score, strata.regime[stratum_of(strata, ids)], likelihood


def order_on_host(score: np.ndarray, regime: np.ndarray) -> np.ndarray:
    """By regime, then the slowest first; of equals that with the lower id."""
    # The bits of a positive float are in its order.
    key = (~np.asarray(score, np.float32).view(np.uint32)).astype(np.uint64) << np.uint64(24)
    key |= np.asarray(regime, np.uint64) << np.uint64(56)
    key |= np.arange(len(score), dtype=np.uint64)
    return (np.sort(key) & np.uint64(2**24 - 1)).astype(np.int64)


@jax.jit
def order_on_device(score: Float[Array, " n"], regime: Int[Array, " n"]) -> Int[Array, " n"]:
    """As `order_on_host`."""
    number = jnp.arange(len(score), dtype=jnp.int32)
    return jax.lax.sort((regime, -score, number), num_keys=3)[2]


def picks_of(
    run: Run, pool: Pool, number: int, most: int, num_replicas: int | None = None
) -> Picks:
    """How `number` steps pick among the samples of a pool, and look at `most` of their replicas."""
    R = num_replicas or run.program.num_replicas
    most = min(most, R)
    if (np.asarray(pool.weight) == 1).all():
        return _equal(pool.size, steps_by_regime(run, number), R, most)
    tables = []
    for start, size, steps in zip(
        np.cumsum((0, *pool.size)), pool.size, steps_by_regime(run, number), strict=False
    ):
        share = np.cumsum(np.asarray(pool.weight[start : start + size], np.float64))
        one = np.log1p(-np.minimum(share / share[-1], 1 - 1e-16))
        tables.append((steps, np.array([(R - i) * one for i in range(most)])))
    return _picks(tables)


@ft.lru_cache(16)
def _equal(sizes: tuple[int, ...], steps: tuple[int, ...], R: int, most: int) -> Picks:
    """Without replacement: none of r samples of n is among the first `k + 1` by the chance
    `C(n - k - 1, r) / C(n, r)`, a product, whose logarithm is a sum.
    """
    tables = []
    for size, number in zip(sizes, steps, strict=True):
        left = size - np.arange(size, dtype=np.float64)
        with np.errstate(divide="ignore"):
            each = [np.log1p(-np.minimum((R - i) / left, 1)) for i in range(most)]
        tables.append((number, np.cumsum(each, axis=1)))
    return _picks(tables)


def _picks(tables: list[tuple[int, np.ndarray]]) -> Picks:
    """From the number of steps of each regime, and the logarithms of chances."""
    reached, later, before = [], [], 0
    for g, (number, logs) in enumerate(tables):
        chance = -np.expm1(logs[0])
        chance[-1] = 1.0
        reached.append(before + number * chance)
        # Each regime below the one before it, so that one search finds a place in its own.
        later.append(np.maximum(logs[1:], -60) - 64 * g)
        before += number
    every = np.concatenate(reached)
    whole = np.floor(every)
    single = np.concatenate(later, axis=1).astype(np.float32)
    part = jnp.asarray(every - whole, jnp.float32)
    return Picks(jnp.asarray(whole, jnp.int32), part, jnp.asarray(single))


def steps_by_regime(run: Run, number: int) -> tuple[int, ...]:
    """How many of so many steps are in each regime of the network, dealt evenly."""
    bounds = np.cumsum(np.asarray(run.chances.network))
    return tuple(np.diff(np.round(number * bounds / bounds[-1]).astype(int), prepend=0).tolist())


@ft.partial(eqx.filter_jit)
def steps_of(
    plan: Plan, key: KeyData, pool: Pool, picks: Picks, ids: UInt32[Array, " steps"]
) -> Steps:
    """Steps of a pool; `ids` are those of their own draws."""
    number, dtype = len(ids), plan.dtype
    samples = _pick(picks, key, ids, dtype)
    group = (pool.ids[samples] // 2 % GROUPS).astype(jnp.int32)
    ends = jnp.pad(pool.ends, ((0, 0), (0, len(plan.structure.sinks.first) - pool.ends.shape[1])))
    ends = ends[samples]  # `(K, steps, sinks)`.
    bounds = np.cumsum(pool.size)[:-1].astype(np.int32)
    regime = jnp.sum(samples[0][None] >= bounds[:, None], axis=0, dtype=jnp.int32)

    def times(ends):
        ready, parts = step_parts(plan, jnp.max(ends, axis=0).T, ids, key, regime)
        sink = jnp.argmax(ready, axis=0)
        of_sink = jnp.take_along_axis(ends, sink[None, :, None], axis=2)[..., 0]
        return parts.times(), sink, jnp.argmax(of_sink, axis=0)

    every, sink, which = times(ends)
    column = jnp.arange(number)
    decided = group[which, column]
    gone = group == decided[None]
    without, other_sink, other = times(jnp.where(gone[..., None], -jnp.inf, ends))
    return Steps(
        times=every,
        without=jnp.where(jnp.all(gone, axis=0), jnp.nan, without),
        group=decided,
        sample=samples[which, column],
        other=samples[other, column],
        sink=sink,
        other_sink=other_sink,
        first=samples[0],
        last=which == len(samples) - 1,
    )


def _pick(picks: Picks, key: KeyData, ids, dtype) -> Int[Array, "K steps"]:
    """The samples that steps look at, from the slowest on. Of as many equal parts of (0, 1) as
    there are steps, each has the rank of one.
    """
    number, last = len(ids), len(picks.steps) - 1
    offset = uniforms(_key(key, _OFFSET), ids[:1], counters(1), dtype)[0, 0]
    reached = picks.steps + (picks.part > offset.astype(picks.part.dtype)).astype(jnp.int32)
    counts = jnp.zeros(number + 1, jnp.int32).at[reached].add(1, mode="clip")
    first = jnp.minimum(jnp.cumsum(counts, dtype=jnp.int32)[:number], last)
    stream = _key(key, _PICKS)
    u = uniforms(stream, ids, counters(len(picks.later)), picks.later.dtype)

    def following(before, one):
        later, u = one
        found = jnp.searchsorted(-later, -(later[before] + jnp.log(u)))
        found = jnp.clip(found, before, last).astype(jnp.int32)
        return found, found

    _, others = jax.lax.scan(following, first, (picks.later, u))
    return jnp.concatenate([first[None], others])


def _key(key: KeyData, stream: int) -> KeyData:
    return jnp.stack(threefry(key, jnp.uint32(stream), jnp.uint32(0)))


class Sums(NamedTuple):
    """Sums over steps. Those of several pools add up.

    **Attributes:**

    - `decided`, `without`: of the steps that each group decided, and of these without it:
        `(groups, 3)`, their number, and the sums of deviations from a centre and of their squares;
        and `(groups, thresholds + 1)`, how many are between each two thresholds.
    - `picks`: by how much the differences between these two scatter among steps of equal rank:
        `(2, 2)` for the sums of deviations and squares, and `(thresholds,)` for how many are below.
    - `own`: the same of steps themselves.
    """

    decided: tuple[Array, Array]
    without: tuple[Array, Array]
    picks: tuple[Array, Array]
    own: tuple[Array, Array]


@jax.jit
def sums_of(
    steps: Steps, centre: Float[Array, ""], thresholds: Float[Array, " thresholds"]
) -> Sums:
    """The sums of some steps, whose ranks are ascending. Those next to each other make pairs."""
    there, kinds = ~jnp.isnan(steps.without), len(thresholds) + 1
    both = jnp.stack([steps.times, jnp.where(there, steps.without, 0)])
    bucket = jnp.searchsorted(thresholds, both).astype(jnp.int32)
    # Steps before and after they lose a group, by deviation and by its square.
    powers = jnp.stack([both - centre, (both - centre) ** 2], axis=-1)

    def by_group(of, there):
        one = there.astype(powers.dtype)
        values = jnp.concatenate([one[:, None], powers[of] * one[:, None]], axis=1)
        moments = jnp.zeros((GROUPS, 3), powers.dtype).at[steps.group].add(values)
        counts = jnp.zeros(GROUPS * kinds, jnp.int32)
        counts = counts.at[steps.group * kinds + bucket[of]].add(there.astype(jnp.int32))
        return moments, counts.reshape(GROUPS, kinds)

    def of_pairs(x):
        return x[:-1:2], x[1::2]

    def between(low, high, weight):
        """For each threshold, the weight of pairs of which it is between the two."""
        weight = jnp.where(low < high, weight.astype(jnp.int32), 0)
        counts = jnp.zeros(kinds + 1, jnp.int32)
        return jnp.cumsum(counts.at[low].add(weight).at[high].add(-weight), dtype=jnp.int32)[:-2]

    def products(x, weight):
        return jnp.einsum("ia,ib,i->ab", x, x, weight.astype(x.dtype))

    there, group, first = (of_pairs(x) for x in (there, steps.group, steps.first))
    whole = there[0] & there[1]
    same_rank = whole & (first[0] == first[1])
    same_group = same_rank & (group[0] == group[1])
    (high, low), (one, other) = bucket, of_pairs(powers[0])
    (low_1, low_2), (high_1, high_2) = of_pairs(low), of_pairs(high)
    lost_1, lost_2 = of_pairs(powers[0] - powers[1])
    # (a - b)^2 where both are of a group, else a^2 + b^2.
    picks = products(lost_1 - lost_2, same_group)
    apart = same_rank & ~same_group
    picks = picks + products(lost_1, apart) + products(lost_2, apart)
    counts = between(low_1, high_1, same_rank) + between(low_2, high_2, same_rank)
    shared = between(jnp.maximum(low_1, low_2), jnp.minimum(high_1, high_2), same_group)
    crossed = between(jnp.minimum(high_1, high_2), jnp.maximum(high_1, high_2), whole)
    return Sums(
        by_group(0, jnp.ones(len(steps.times), bool)),
        by_group(1, ~jnp.isnan(steps.without)),
        (picks, counts - 2 * shared),
        (products(one - other, whole), crossed),
    )


class Moved(NamedTuple):
    """How figures move: the mean, the standard deviation, and the share of steps up to each
    threshold.

    **Attributes:**

    - `figures`: of all steps.
    - `apart`: `(groups, figures)`, how much each group of samples adds to a figure.
    - `noise`: the variance that the picks of steps add to that of `apart`, and the variance of the
        own draws of steps, which it lacks: `(2, figures)`.
    - `groups`: how many groups have steps on both sides.
    """

    figures: Float[np.ndarray, " figures"]
    apart: Float[np.ndarray, "groups figures"]
    noise: Float[np.ndarray, "2 figures"]
    groups: Float[np.ndarray, " figures"]

    def scatter(self, figure: int) -> Scatter:
        """The scatter of a figure, by the jackknife of groups."""
        apart = self.apart[:, figure]
        square = float(apart @ apart)
        by_picks, own = self.noise[:, figure].tolist()
        variance = max(square - by_picks, square / 4) + own
        if variance == 0:
            return Scatter(0.0)
        skewness = float(np.sum(apart**3)) / variance**1.5
        degrees = (GROUPS - 1) * (variance / square) ** 2 if square else float("inf")
        return Scatter(variance**0.5, min(max(skewness, -_SKEWED), _SKEWED), degrees)


def moved(sums: Sums, centre: float) -> Moved:
    """The figures of sums, and how they move."""
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
    decided, without = (
        np.concatenate([moments, np.cumsum(counts, axis=1)[:, :-1]], axis=1)
        for moments, counts in (sums.decided, sums.without)
    )
    total = decided.sum(axis=0)
    # Steps that looked at no other group are replaced by the average step.
    missing = decided[:, :1] - without[:, :1]
    left = total - decided + without + missing * total / total[0]
    number = total[0]

    def figures(x):
        shift, square = x[..., 1] / number, x[..., 2] / number
        std = np.sqrt(np.maximum(square - shift**2, 0))
        return np.column_stack([centre + shift, std, x[..., 3:] / number])

    all_steps = figures(total[None])[0]
    apart = figures(left)
    apart = (apart.mean(axis=0) - apart) * np.sqrt(GROUPS / (GROUPS - 1))
    shift, std = all_steps[0] - centre, all_steps[1]
    slope = np.array([-shift, 0.5]) / std if std else np.zeros(2)  # Of the standard deviation.
    noise = [
        np.concatenate([[products[0, 0], slope @ products @ slope], counts])
        for products, counts in (sums.picks, sums.own)
    ]
    sides = np.array([decided[:, 3:], decided[:, :1] - decided[:, 3:]])
    on_both = (sides > 0).sum(axis=1).min(axis=0)
    return Moved(
        all_steps, apart, np.array(noise) / number**2, np.array([GROUPS, GROUPS, *on_both], float)
    )


def errors_of(moved: Moved) -> Errors:
    """The errors of a law."""
    found = [moved.scatter(figure) for figure in range(len(moved.figures))]
    return errors_of_figures(found, float(GROUPS), np.full(len(LEVELS), float(GROUPS)))


class Pooled(NamedTuple):
    """Some steps, their figures, and the share of steps that the last replica decided."""

    steps: Steps
    moved: Moved
    last: float


def looked_at(run: Run, steps: int = 4096) -> int:
    """How many of its replicas a step looks at: two, for the time without a group, and more where
    reductions vary and each sink has its own slowest replica.
    """
    R, most = run.program.num_replicas, 2
    samples = max(steps, SAMPLES_A_REPLICA * R // 4)
    while most < R and simulate_pool(run, samples=samples, steps=steps, most=most).last > _LAST:
        most *= 2
    return min(most, R)


def simulate_pool(
    run: Run, *, samples: int, steps: int, most: int, num_replicas: int | None = None
) -> Pooled:
    """Steps of one pool, and their figures at the quantiles at `LEVELS`."""
    pool = draw(run, 0, samples)
    picks = picks_of(run, pool, steps, most, num_replicas)
    ids = jnp.arange(steps, dtype=jnp.uint32)
    found = steps_of(without_ops(run.plan), run.key, pool, picks, ids)
    times = np.sort(np.asarray(found.times))
    centre = times.mean(dtype=np.float64)
    thresholds = np.quantile(times, LEVELS)
    sums = sums_of(found, np.asarray(centre, times.dtype), thresholds.astype(times.dtype))
    return Pooled(found, moved(sums, float(centre)), float(jnp.mean(found.last)))
