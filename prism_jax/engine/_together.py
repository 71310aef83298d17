"""Laws of many programs: several that differ in their parameters only are simulated together. Their
tables have the programs as an axis, so the host and the devices work once for all of them, and
random numbers are drawn once.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._padding import array_fields, bucket
from ..law import Counted, GroupSums, Law, counted, errors_by_group, law_of
from ..program import Program
from ..replica import TILE, Batch, Plan, on_all_devices, tiles
from ..step import STEP_TILES, Decided, Pool, decided_steps
from ._check import check_num_samples
from ._pools import (
    MOST_LAST,
    Drawn,
    PooledSteps,
    drawn_pools,
    effective_samples,
    joined,
    looks_of,
    pool_draws,
    pool_of,
    room_of,
    sums_of_steps,
)
from ._run import Run, but_for_parameters, prepare, prepare_together
from ._sampling import Draws, plain_samples
from ._simulate import law_of_pools


# So many programs are simulated together, or twice as many where there are more; of fewer than the
# least each by itself, because to fill up costs more than it saves.
_TOGETHER, _LEAST = 8, 5
# Samples of programs together have at most so many ends, because those of two groups are held.
_MOST_ENDS = 2**24
# How many axes each array of a pool has, but for that of programs.
_NDIMS = [len(axes or ()) for _, axes, *_ in array_fields(Pool)]


def simulate_each(
    programs: Iterable[Program], *, num_samples: int, key: "jax.Array"
) -> Iterator[Law]:
    """The law of each program, as `simulate` gives it (on an accelerator to rounding), but without
    its digest and times. Five to sixteen next to each other that differ in their parameters only,
    and whose steps take one pool, are simulated together.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, because a law would be of fewer steps.
    """
    num_samples, failures = check_num_samples(num_samples), list[Exception]()

    def until_failure() -> Iterator[Program]:
        try:
            yield from programs
        except Exception as error:  # Those before a program that cannot be made are not lost.
            failures.append(error)

    laws = iter(())
    for _, alike in it.groupby(until_failure(), but_for_parameters):
        run = None
        while group := [*it.islice(alike, 2 * _TOGETHER)]:
            # While devices draw the samples of some programs, the host prepares the next ones.
            try:
                run, laws_of_group = _drawn(group, num_samples, key, run)
            except Exception:
                yield from laws
                raise
            yield from laws
            laws = laws_of_group
    yield from laws
    if failures:
        raise failures[0]


def _drawn(
    programs: Sequence[Program], num_samples: int, key: "jax.Array", like: Run | None
) -> tuple[Run | None, Iterator[Law]]:
    """The laws of programs that differ in their parameters only, whose samples devices draw from
    now on if they can be drawn together; and a run whose structure the next ones may share.
    """
    if len(programs) >= _LEAST:
        # The last ones are filled up to the number of those before, so that code is compiled once.
        number = bucket(len(programs), _TOGETHER if like is None else _num_programs(like))
        filled = [*programs, *[programs[-1]] * (number - len(programs))]
        if (run := prepare_together(filled, key, like)) is not None:
            draws, *further_draws = pool_draws(run, num_samples)
            ends = number * draws.replicas * len(run.plan.structure.sinks.first)
            if not further_draws and ends <= _MOST_ENDS:
                batches = [*plain_samples(run.plan, number, run.key, draws)]
                return run, _laws_together(run, draws, batches, len(programs))
    return like, _laws_apart(programs, num_samples, key, like)


def _num_programs(run: Run) -> int:
    """The length of the first axis of the tables of a run of several programs."""
    return len(run.plan.tables.mean)


def _laws_apart(
    programs: Sequence[Program], num_samples: int, key: "jax.Array", run: Run | None
) -> Iterator[Law]:
    for program in programs:
        run = prepare(program, key, run)
        draws = pool_draws(run, num_samples)
        yield _whole(law_of_pools(run, draws, drawn_pools(run, draws)))


def _laws_together(run: Run, draws: Draws, batches: Sequence[Batch], number: int) -> Iterator[Law]:
    """The laws of the first programs of a run, whose samples have the programs as second axis."""
    samples = joined([batch.kept() for batch in batches])
    if isinstance(samples[0], jax.Array):
        yield from _laws_on_device(run, Drawn(draws, samples, draws.steps), number)
        return
    tables = jax.tree.map(np.asarray, run.plan_of_steps.tables)
    for i in range(number):
        of_program = jax.tree.map(lambda x, i=i: x[i], tables)
        plan = on_all_devices(Plan(run.plan_of_steps.structure, of_program))
        drawn = Drawn(draws, tuple(x[:, i] for x in samples), draws.steps)
        # What composes steps of several programs rounds in another way.
        of_run = dataclasses.replace(run, plan_of_steps=plan)
        yield _whole(law_of_pools(of_run, [draws], [drawn]))


def _whole(law: Law) -> Law:
    if law.interrupted:
        raise KeyboardInterrupt
    return law


def _laws_on_device(run: Run, drawn: Drawn, number: int) -> list[Law]:
    """The laws of the first programs of a run, equal to those of `simulate` to rounding."""
    draws, laws = drawn.draws, dict[int, Law]()
    fields: Any = {"keys": (tuple(np.asarray(run.key).tolist()),), "sampling": run.sampling.name}
    fields |= {"requested": draws.steps, "effective_samples": effective_samples(run, drawn)}
    for looks in (numbers := looks_of(run)):
        pool = pool_of(run, drawn, looks, room_of(run, [draws]))
        steps = _steps(run, pool, draws)
        times, last, decider = map(steps.of, ("times", "last", "decider"))
        without = steps.of("without") if pool.later.shape[-2] else None
        figures = _figures_on_device(times, without, decider, pool.ids, pool.starts)
        counts, sums = jax.device_get(figures)
        errors = errors_by_group(sums)
        is_done = (np.mean(last, axis=0) <= MOST_LAST) | (looks == numbers[-1])
        for i in np.flatnonzero(is_done[:number]).tolist():
            part = Counted(*(x[i] for x in counts))
            laws.setdefault(i, law_of(part, draws.steps, errors[i], **fields))
        if len(laws) == number:
            break
    return [laws[i] for i in range(number)]


def _steps(run: Run, pool: Pool, draws: Draws) -> PooledSteps:
    shared, size = (run.plan_of_steps, pool, run.key), TILE // _num_programs(run)
    batches = tiles(
        _steps_of_plans, shared, draws.steps, first=draws.first, per_batch=STEP_TILES, size=size
    )
    return PooledSteps((pool,), draws.steps, tuple(batches))


def _steps_of_plans(shared, ids) -> tuple[Decided]:
    """One tile of the steps of each of several tables and pools: the second axis."""
    plan, pool, key = shared
    # How steps pick may be the same for all.
    arrays, of_pool = jax.tree.flatten(pool)
    axes = [0 if x.ndim > ndim else None for x, ndim in zip(arrays, _NDIMS, strict=True)]

    def of_tables(tables, pool):
        return decided_steps(dataclasses.replace(plan, tables=tables), (pool,), ids, key)[:1]

    return jax.vmap(of_tables, in_axes=(0, of_pool.unflatten(axes)), out_axes=1)(plan.tables, pool)


@jax.jit
@ft.partial(jax.vmap, in_axes=(1, 1, 1, 0, None))
def _figures_on_device(times, without, decider, ids, starts) -> tuple[Counted, GroupSums]:
    """What the law of each program keeps of its steps, and the sums for its errors."""
    counts = counted(times, len(times), jnp)
    of_steps = times, without, decider, ids, starts, counts.centre, counts.quantiles
    return counts, sums_of_steps(*of_steps, xp=jnp)
