"""Runs as rows of pools: draws the samples of each, lets its steps pick, and counts these."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._interrupt import interruptible
from .._misc import dot
from .._padding import bucket
from ..law import Counted, Errors, counted, errors_by_group, group_sums
from ..replica import Batch, on_accelerator, tile_size, tiles
from ..step import (
    GROUPS,
    STEP_TILES,
    Composed,
    Decided,
    Pool,
    Ranks,
    Room,
    decided_steps,
    make_pool,
    pool_weights,
    sample_group,
)
from ._explicit import Explicit
from ._run import Advance, Run
from ._sampling import Draws, Plain, by_chunk


# A step looks at two of its replicas, to know its time without the slowest; if the last of those
# that it looks at decides more steps than this, at four times as many: at 1 %, p5 would be low by a
# third of its standard error.
_LOOKS, _MORE, MOST_LAST = 2, 4, 0.001
# A pool has so many samples or fewer if they have many sinks, up to twice as many. A run has at
# least so many for each replica of a step, which rests on some `2 n / R` of them, up to a bound.
_SAMPLES, _ENDS = 2**18, 2**22
# An accelerator takes so many times as many, 512 tiles: between pools it waits for the host.
_MORE_WIDE = 8
_SAMPLES_A_REPLICA, _MOST = 64, 2**19
# The room of small pools.
_ROOM = 2**14


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The samples of a pool: ends `(n, sinks)`, scores, strata and likelihoods, in the order of
    ids, perhaps with several programs as second axis; and how many steps they decide, fewer than
    requested after Ctrl-C.
    """

    draws: Draws
    samples: tuple[Any, ...]
    steps: int


def drawn_pools(
    run: Run, draws: Sequence[Draws], advance: Advance = lambda steps: None
) -> Iterator[Drawn]:
    """Draws the samples of pools, one after the other.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, after a last pool of the samples drawn so far.
    """
    samples = by_chunk(draws, run.sampling.samples(run.plan, run.key, draws))
    with interruptible():
        for pool in draws:
            parts, number, interrupted = [], 0, False
            try:
                while number < pool.replicas:
                    parts.append(part := next(samples))
                    number += len(part[1])
                    advance(len(part[1]) * pool.steps // pool.replicas)
            except KeyboardInterrupt:
                interrupted = True
            if number:
                steps = max(pool.steps * number // pool.replicas, 1)
                yield Drawn(pool, joined(parts), steps)
            if interrupted:
                raise KeyboardInterrupt


def joined(parts: Sequence[Any]) -> Any:
    """Arrays, or trees of these, one after the other."""
    if len(parts) == 1:
        return parts[0]
    on_device = isinstance(jax.tree.leaves(parts[0])[0], jax.Array)
    return (_joined_on_device if on_device else _joined_by)(*parts)


def _joined_by(*parts: Any, xp: Any = np) -> Any:
    return jax.tree.map(lambda *x: xp.concatenate(x), *parts)


_joined_on_device = jax.jit(ft.partial(_joined_by, xp=jnp))


def pool_draws(run: Run, num_steps: int) -> list[Draws]:
    """How the pools of a run are drawn. Of a run of few steps the one pool has more samples than
    steps if there are many replicas, of which each step takes the slowest.
    """
    sampling = run.sampling
    number, fewest = max(sampling.replicas(num_steps) // _samples(run), 1), 0
    if isinstance(sampling, Explicit):
        number = sampling.allocations
    elif number == 1 and isinstance(sampling, Plain):
        replicas = run.program.num_replicas
        fewest = max(min(_SAMPLES_A_REPLICA * replicas, _MOST), 2 * replicas)
    draws = []
    for i in range(number):
        first, last = num_steps * i // number, num_steps * (i + 1) // number
        steps = last - first
        draws.append(Draws(first, steps, max(sampling.replicas(steps), fewest)))
    return draws


def _samples(run: Run) -> int:
    """The samples of a pool, where there are more: a power of two."""
    replicas, sinks = run.program.num_replicas, len(run.plan.structure.sinks.first)
    wider = _MORE_WIDE if on_accelerator() else 1
    fewest = max(bucket(_SAMPLES_A_REPLICA * replicas, 1) // 2, _ROOM)
    most = max(wider * _SAMPLES, bucket(2 * replicas, 1))
    return min(max(wider * _ENDS // sinks, fewest), most)


def room_of(run: Run, draws: Sequence[Draws]) -> Room:
    """Room for any of some pools: few sizes, for which code is compiled."""
    _, steps, replicas = map(max, zip(*draws, strict=True))
    samples = _ROOM if replicas <= _ROOM else bucket(replicas, 2 * _samples(run))
    return Room(samples, bucket(run.program.sinks.number, 1), bucket(steps, samples))


def looks_of(run: Run) -> list[int]:
    """At how many of its replicas a step looks: at each number if the one before is too few."""
    sinks, replicas = run.program.sinks, run.program.num_replicas
    numbers = [min(_LOOKS, replicas)]
    # Unless no other replica than the slowest ends last at any sink that decides a step.
    while sinks.number > 1 and (sinks.reduction >= 0).any() and numbers[-1] < replicas:
        numbers.append(min(_MORE * numbers[-1], replicas))
    return numbers


def steps_that_look(run: Run, steps_of: Callable[[int], "PooledSteps"]) -> "PooledSteps":
    """Steps that look at as many of their replicas as they need. `steps_of` gives them for any
    number.
    """
    numbers = looks_of(run)
    steps = steps_of(numbers[0])
    for looks in numbers[1:]:
        if np.mean(steps.of("last")) <= MOST_LAST:
            break
        steps = steps_of(looks)
    return steps


def pool_of(run: Run, drawn: Drawn, looks: int, room: Room, number: int = 0) -> Pool:
    """The pool of drawn samples.

    **Arguments:**

    - `looks`: how many of its replicas a step looks at.
    - `room`: as of `room_of`.
    - `number`: of the pool in a run: over pools, the ranks of their first steps are evenly spread.
    """
    first = drawn.draws.first
    seed = np.random.Philox(key=np.asarray(run.key).tolist())
    offset = (np.random.Generator(seed).random() + _reversed(number)) % 1
    steps = range(first, first + drawn.steps)
    return make_pool(
        run.chances,
        drawn.samples,
        first,
        Ranks(steps, offset, run.num_replicas, looks),
        room,
        by_their_law=run.sampling.lead is None,
    )


def _reversed(number: int) -> float:
    """The radical inverse in base 2."""
    return int(f"{number:064b}"[::-1], 2) / 2**64


@dataclasses.dataclass(frozen=True)
class PooledSteps:
    """The `number` steps of a pool, or of several that meet, on the host, or on the device that
    computed them.
    """

    pools: tuple[Pool, ...]
    number: int
    batches: tuple[Batch, ...]

    def of(self, name: str) -> Any:
        """An array of [`Decided`][], of all steps in order."""
        return joined([batch.kept(lambda x: getattr(x[0], name)) for batch in self.batches])

    def on_host(self) -> tuple[Decided, Composed]:
        """All of them."""
        return joined([batch.samples() for batch in self.batches])

    def counted(self) -> Counted:
        """What a law keeps of them."""
        times = self.of("times")
        if isinstance(times, jax.Array):
            return _counted_on_device(times, self.number)
        return counted(times, self.number, np)

    def errors(self, part: Counted) -> Errors:
        """The errors of their law."""
        times, decider = map(self.of, ("times", "decider"))
        without = self.of("without") if len(self.pools[0].later) else None
        sums = _sums_on_device if isinstance(times, jax.Array) else sums_of_steps
        pool = self.pools[0].ids, self.pools[0].starts
        of_law = sums(times, without, decider, *pool, part.centre, part.quantiles)
        return errors_by_group(jax.tree.map(lambda x: np.asarray(x)[None], of_law))[0]


def pooled_steps(
    run: Run,
    pools: tuple[Pool, ...],
    number: int,
    ranks: Sequence[np.ndarray] = (),
) -> PooledSteps:
    """So many steps of a pool, or of several: see `decided_steps`. Ctrl-C ends the run after these:
    the first of them are the slowest, so that a law needs all.
    """
    shared, first = (run.plan_of_steps, pools, run.key), int(pools[0].first_step)
    batches = []

    def inputs(begin: int, count: int) -> tuple[np.ndarray, ...]:
        return tuple(x[begin - first : begin - first + count] for x in ranks)

    with interruptible() as interrupt:
        came = False
        size = tile_size(number)
        for batch in tiles(
            _step_tile, shared, number, inputs, first=first, per_batch=STEP_TILES, size=size
        ):
            batches.append(batch)
            came |= interrupt.take()
        interrupt.came |= came
    return PooledSteps(pools, number, tuple(batches))


def sums_of_steps(times, without, decider, ids, starts, centre, quantiles, xp: Any = np):
    """See `group_sums`: of the samples that decide steps."""
    ids, starts = xp.asarray(ids), xp.asarray(starts)
    regime = xp.sum(decider[None] >= starts[:, None], axis=0, dtype=np.int32)
    group = sample_group(ids[decider]) + np.int32(GROUPS) * regime
    shape = len(starts) + 1, GROUPS
    return group_sums(times, without, group, centre, quantiles, shape, xp=xp)


_counted_on_device = jax.jit(ft.partial(counted, xp=jnp), static_argnums=1)
_sums_on_device = jax.jit(ft.partial(sums_of_steps, xp=jnp))


def _step_tile(shared, ids, *ranks) -> tuple[Decided, Composed]:
    """One function for all that is asked of steps, because it takes seconds to compile."""
    plan, pools, key = shared
    return decided_steps(plan, pools, ids, key, *ranks)


def effective_samples(run: Run, drawn: Drawn) -> float:
    """The effective sample size for the mean of replica samples: the square of the sum of their
    weights over the sum of the squares.
    """
    chances = run.chances
    _, score, stratum, likelihood = drawn.samples
    if chances.alike and len(chances.network) == 1 and run.sampling.lead is None:
        return float(len(score))
    # Those of several programs are the same.
    stratum = np.asarray(stratum).reshape(len(score), -1)[:, 0]
    weights = pool_weights(chances, stratum, np.asarray(likelihood).reshape(len(score), -1)[:, 0])
    weights *= chances.network[chances.regime[stratum]]
    return float(weights.sum() ** 2 / dot(weights, weights))
