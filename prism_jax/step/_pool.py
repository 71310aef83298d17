"""A pool: samples of one replica, of which each step takes as many as it has replicas.

A step of R replicas takes R of the n samples of its pool without replacement. The slowest of them
is the k-th slowest of the pool with the chance `C(n - k, R - 1) / C(n, R)`, so the share of steps
up to a time is unbiased for any n of at least R. The steps of a pool have evenly spread ranks, from
a random one on, and look up the sample at their rank.

Samples that weigh unlike each other, by importance sampling or because rare events are drawn more
often, are picked with replacement, by cumulated weights: the slowest lies at the share
`1 - (1 - u)^(1 / R)` of the weight, `u` uniform. This is biased as `1 / n`.

A step looks at the K slowest of its replicas, and each sink ends when the latest of these does:
where the reductions of sinks vary, another replica than the slowest may end last at some sink.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..program import Program
from ..random import KeyData, Stream, counters, fold, uniforms
from ..replica import Plan, strata_columns


# Samples are in so many groups. The error of a figure is how it moves if one is left out.
GROUPS = 32


@dataclasses.dataclass(frozen=True)
class Chances:
    """The probabilities of a program's strata and of the regimes of its network, on the host.

    **Attributes:**

    - `regime`, `share`: for each stratum, its regime and its share of the samples.
    - `weight`: for each stratum, the weight of each of its samples within the regime; one if
        samples follow the law.
    - `network`: the probability of each regime.
    """

    regime: np.ndarray
    share: np.ndarray
    weight: np.ndarray
    network: np.ndarray

    @property
    def alike(self) -> bool:
        """Whether all samples of a regime weigh the same if they are drawn by their law."""
        return len(self.regime) == len(self.network)


def chances_of(program: Program, plan: Plan) -> Chances:
    """See [`Chances`][]. Several programs, whose tables have them as first axis, have the same."""
    counts = np.atleast_2d(plan.tables.stall_counts)[0]
    network = np.atleast_2d(plan.tables.network)[0].astype(np.float64)
    regime, stalls, share = strata_columns(program)
    of_regime = (share / np.bincount(regime, share)[regime]).astype(counts.dtype)
    weight = counts[stalls] / of_regime
    return Chances(regime, share, weight.astype(np.float64), network / network.sum())


class Pool(eqx.Module):
    """Samples by regime of the network, the slowest first, and how steps pick among them. Padded,
    so that pools of many sizes share compiled code. Those of several programs have these as first
    axis of the arrays that differ.

    **Attributes:**

    - `ends`: when each sink ends, in seconds.
    - `ids`: of the samples.
    - `slowest`: which sample is the slowest replica of each step, by the ranks of these.
    - `decides`: of how many steps each sample is the slowest replica, over all first ranks.
    - `later`: for each further replica that a step looks at, minus the logarithm of the chance that
        it comes after each sample. After sample `j` it comes after `k` by
        `exp(later[j] - later[k])`.
    - `starts`: where the samples of each regime but the first start.
    - `last`: the position of the last sample.
    - `first_step`: the id of the pool's first step.
    - `all_looked_at`: whether steps look at all of their replicas of this pool.
    """

    ends: Float[Array, "... samples sinks"]
    ids: UInt32[Array, "... samples"]
    slowest: Int[Array, "... steps"]
    decides: Float[Array, "... samples"]
    later: Float[Array, "... further samples"]
    starts: Int[Array, " further_regimes"]
    last: Int[Array, ""]
    first_step: UInt32[Array, ""]
    all_looked_at: Bool[Array, ""]


class Room(NamedTuple):
    """For so many samples, sinks and steps there is room in a pool."""

    samples: int
    sinks: int
    steps: int


class Ranks(NamedTuple):
    """How the steps of a pool are ranked.

    **Attributes:**

    - `steps`: their ids.
    - `offset`: the rank of the first, in (0, 1) of the distance between steps.
    - `num_replicas`, `looks`: R and K.
    """

    steps: range
    offset: float
    num_replicas: int
    looks: int


def make_pool(
    chances: Chances,
    samples: tuple[Array | np.ndarray, ...],
    first_sample: int,
    ranks: Ranks,
    room: Room,
    *,
    by_their_law: bool,
) -> Pool:
    """The pool of some samples, on the host or a device.

    **Arguments:**

    - `samples`: the ends `(n, sinks)`, of which those beyond the room are left out, scores by which
        samples are sorted, strata and likelihoods, in the order of ids. If they have several
        programs as second axis, on a device, so have as first axis those arrays of the pool that
        differ.
    - `first_sample`: the id of the first.
    - `by_their_law`: whether no sample is likelier than by its law.
    """
    ends, score, stratum, likelihood = samples
    on_device, regimes = isinstance(score, jax.Array), len(chances.network)
    regime, sizes, several = None, (len(score),), score.ndim > 1
    alike = by_their_law and chances.alike
    if regimes > 1 or not alike:  # Only then do they come from the device.
        strata = np.asarray(stratum).reshape(len(score), -1)[:, 0]
    if regimes > 1:
        regime = chances.regime[strata].astype(np.int32)
        sizes = tuple(np.bincount(regime, minlength=regimes).tolist())
    counts = sizes
    # One replica's samples are each a step's, in any order, if its regimes are as likely as these.
    each_once = ranks.num_replicas == 1 and len(score) == len(ranks.steps)
    each_once &= alike and np.array_equal(chances.share, chances.network)
    if not each_once:
        counts = tuple(steps_by_regime(chances.network, sizes, ranks.steps))
    by_end = not (each_once and regimes == 1)
    # By strata and ids, programs with common draws share deciders, and each stratum has its steps.
    if ranks.num_replicas == 1:
        score = stratum.astype(score.dtype)
    arrange = _arrange_on_device if on_device else _arranged
    if several:
        arrange = _arrange_each_on_device
    rows, ids, order = arrange(ends, score, regime, np.uint32(first_sample), room, by_end)
    looks = min(ranks.looks, ranks.num_replicas)
    counted = sizes, counts, ranks.num_replicas, looks, room.samples
    if alike:
        picks = [_without_replacement(*counted, on_device)]
    else:
        weights = np.asarray(likelihood).reshape(len(score), -1)[:, 0]
        weights = pool_weights(chances, strata, weights)
        orders = np.asarray(order).reshape(-1, len(score))
        picks = [_by_weight(weights[of_program], *counted) for of_program in orders]
    starts = np.cumsum(sizes)[:-1].astype(np.int32)
    scalars = starts, np.int32(len(score) - 1), np.uint32(ranks.steps.start)
    scalars += (np.bool_(looks == ranks.num_replicas),)
    slowest = _slowest_on_device if on_device else _slowest
    columns = [(slowest(x, np.float32(ranks.offset), room.steps), *x[2:]) for x in picks]
    of_steps = map(np.stack, zip(*columns, strict=True)) if several and not alike else columns[0]
    return Pool(*jax.device_put((rows, ids, *of_steps, *scalars)))


def _arranged(ends, score, regime, first_sample, room: Room, by_end: bool, xp: Any = np):
    """The ends and ids of samples with room for more, as they came or `by_end`: by regime and
    the slowest first, of equals that with the lower id; and the order of these.
    """
    if not by_end:
        order = xp.arange(len(score))
    elif xp is not np:
        number = jnp.arange(len(score), dtype=jnp.int32)
        keys = (-score, number) if regime is None else (regime, -score, number)
        order = lax.sort(keys, num_keys=len(keys))[-1]
    elif score.dtype != np.float32 or score.min() < 0 or len(score) > 2**24:
        order = np.lexsort((-score,) if regime is None else (-score, regime))
    else:
        # The bits of a positive float are in its order: one sort of integers is the fastest.
        keys = (~score.view(np.uint32)).astype(np.uint64) << np.uint64(24)
        if regime is not None:
            keys |= regime.astype(np.uint64) << np.uint64(56)
        keys |= np.arange(len(score), dtype=np.uint64)
        order = (np.sort(keys) & np.uint64(2**24 - 1)).astype(np.int64)
    padding = room.samples - len(score)
    ids = first_sample + order.astype(np.uint32)
    ends = ends[:, : room.sinks]
    rows = xp.pad(ends[order], ((0, padding), (0, room.sinks - ends.shape[1])))
    return rows, xp.pad(ids, (0, padding)), order


_arrange_on_device: Any = jax.jit(ft.partial(_arranged, xp=jnp), static_argnums=(4, 5))


@ft.partial(jax.jit, static_argnums=(4, 5))
def _arrange_each_on_device(ends, score, regime, first_sample, room: Room, by_end: bool):
    """See `_arranged`: of each program, the second axis of the ends and scores."""
    arrange = ft.partial(_arranged, room=room, by_end=by_end, xp=jnp)
    return jax.vmap(arrange, in_axes=(1, 1, None, None))(ends, score, regime, first_sample)


def sample_group(ids: Any) -> Any:
    """The group of samples, by their ids. Those of a pair, of which importance sampling shifts one,
    are in one group.
    """
    return (ids // 2 % GROUPS).astype(np.int32)


def picked(
    pool: Pool,
    number: Int[Array, " steps"],
    step_ids: UInt32[Array, " steps"],
    key: KeyData,
    dtype,
) -> tuple[Int[Array, "looks steps"], Int[Array, " steps"]]:
    """The samples that steps look at, from the slowest on, and the regimes of steps.

    **Arguments:**

    - `number`: the rank of each step among those of the pool, the slowest first.
    """
    slowest = pool.slowest.at[number].get(mode="clip")
    regime = jnp.sum(slowest[None] >= pool.starts[:, None], axis=0, dtype=jnp.int32)
    stream = fold(key, Stream.REPLICAS)
    u = uniforms(stream, step_ids, counters(len(pool.later)), dtype).astype(pool.later.dtype)

    samples = [slowest]
    for after, chance in zip(pool.later, -jnp.log(u), strict=True):
        place = jnp.searchsorted(after, after[samples[-1]] + chance)
        samples.append(jnp.clip(place, samples[-1], pool.last).astype(jnp.int32))
    return jnp.stack(samples), regime


def pool_weights(
    chances: Chances, stratum: np.ndarray, likelihood: np.ndarray
) -> Float[np.ndarray, " samples"]:
    """The weight of each sample. Within a regime of the network they sum to one: the probability of
    a stratum is divided among its samples.
    """
    weights = likelihood.astype(np.float64)
    mass = np.bincount(stratum, weights, len(chances.regime))
    there = mass > 0
    regime, regimes = chances.regime, len(chances.network)
    probability = np.where(there, chances.weight * chances.share, 0)
    probability /= np.maximum(np.bincount(regime, probability, regimes), 1e-300)[regime]
    return weights * (probability / np.where(there, mass, 1))[stratum]


def steps_by_regime(
    network: Float[np.ndarray, " regimes"], sizes: Sequence[int], steps: range
) -> list[int]:
    """How many of some steps are in each regime, dealt evenly over a run. A regime without samples,
    which only runs of a handful have, has no steps.
    """
    there = np.where(np.asarray(sizes) > 0, network, 0)
    bounds = np.cumsum(there / there.sum())
    first, last = np.round(np.outer((steps.start, steps.stop), bounds)).astype(int)
    return np.diff(last - first, prepend=0).tolist()


class _Picks(NamedTuple):
    """How many steps have a slowest replica that is each sample or one before it: whole steps, and
    the chance of one more. And `decides` and `later` of [`Pool`][].
    """

    steps: Int[np.ndarray, " samples"] | Array
    part: Float[np.ndarray, " samples"] | Array
    decides: Float[np.ndarray, " samples"] | Array
    later: Float[np.ndarray, "further samples"] | Array


def _slowest(picks: _Picks, offset, room: int) -> Int[np.ndarray, " steps"]:
    """The sample that is the slowest of each step, with room for more steps."""
    reached = picks.steps + (picks.part > offset)
    samples = np.repeat(np.arange(len(reached), dtype=np.int32), np.diff(reached, prepend=0))
    return np.pad(samples, (0, room - len(samples)), mode="edge")


@ft.partial(jax.jit, static_argnums=2)
def _slowest_on_device(picks: _Picks, offset, room: int) -> Int[Array, " steps"]:
    reached = picks.steps + (picks.part > offset).astype(picks.steps.dtype)
    samples = jnp.searchsorted(reached, jnp.arange(room, dtype=reached.dtype), side="right")
    return jnp.minimum(samples, len(reached) - 1).astype(jnp.int32)


@ft.lru_cache(8)
def _without_replacement(
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    R: int,
    looks: int,
    room: int,
    on_device: bool,
) -> _Picks:
    """None of r samples of n is among the first `k + 1` by the chance `C(n - k - 1, r) / C(n, r)`,
    a product, whose logarithm is a sum.
    """
    logs = []
    for size in sizes:
        num_left = size - np.arange(size, dtype=np.float64)
        with np.errstate(divide="ignore"):
            terms = [np.log1p(-np.minimum((R - i) / num_left, 1)) for i in range(looks)]
        logs.append(np.cumsum(terms, axis=1))
    picks = _picks(logs, counts, room)
    return jax.device_put(picks) if on_device else picks


def _by_weight(
    weights: np.ndarray,
    sizes: Sequence[int],
    counts: Sequence[int],
    R: int,
    looks: int,
    room: int,
) -> _Picks:
    logs = []
    for of_regime in np.split(weights, np.cumsum(sizes)[:-1]):
        share = np.cumsum(of_regime)
        log = np.log1p(-np.minimum(share / max(share[-1:].sum(), 1e-300), 1 - 1e-16))
        logs.append(np.array([(R - i) * log for i in range(looks)]))
    return _picks(logs, counts, room)


def _picks(logs: Sequence[np.ndarray], counts: Sequence[int], room: int) -> _Picks:
    """From the logarithms of chances, for each regime `(looks, samples)`."""
    reached = []
    for before, count, log in zip(np.cumsum([0, *counts]), counts, logs, strict=False):
        chance = -np.expm1(log[0])
        chance[-1:] = 1.0
        reached.append(before + count * chance)
    steps = np.concatenate(reached)
    # The m-th further replica comes at `m` or before, and hardly `m + 60` beyond. Logarithms of a
    # further regime lie beyond any of the one before.
    most = 60.0 + 2 * len(logs[0])
    later = [np.minimum(-log[1:], most) + (most + 4) * g for g, log in enumerate(logs)]
    padding = room - len(steps)
    arrays = np.floor(steps).astype(np.int32), (steps % 1).astype(np.float32)
    decides = np.pad(np.diff(steps, prepend=0).astype(np.float32), (0, padding))
    steps, part = (np.pad(x, (0, padding), mode="edge") for x in arrays)
    later = np.concatenate(later, axis=1).astype(np.float32)
    return _Picks(steps, part, decides, np.pad(later, ((0, 0), (0, padding)), mode="edge"))
