"""Runs: what is prepared of a program, how the samples of chunks are drawn, and what steps are."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import check_interrupt, working
from ..host import on_host
from ..program import Program
from ..random import KeyData, key_data
from ..replica import Batch, Plan, make_plan, on_all_devices, tiles, without_ops
from ..step import (
    STEP_TILES,
    Chances,
    ConditionalExceedance,
    StepParts,
    chances_of,
    step_parts,
    times_or_chances,
)
from ._check import check_plan, check_program


if TYPE_CHECKING:
    from ._sampling import AbstractSampling

# Probabilities are computed for so many steps at once, in little memory.
_AT_ONCE = 2**15

Advance = Callable[[int], object]
Inputs = Callable[[int, int], tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The common data of all chunks of a run.

    **Attributes:**

    - `sampling`: how replica samples are drawn; `None` until this is chosen.
    """

    program: Program
    plan: Plan
    key: KeyData
    chances: Chances
    sampling: "AbstractSampling | None" = None

    @ft.cached_property
    def plan_of_steps(self) -> Plan:
        """What all batches of steps share, on all devices."""
        return on_all_devices(without_ops(self.plan))


def prepare(program: Program, key: "jax.Array") -> Run:
    """Checks a program and a key, and computes what is needed before any sample is drawn.

    **Raises:**

    `ValueError` if an argument is not a program or a key, or if latencies are not valid.
    """
    check_interrupt()
    check_program(program, key)
    with working():
        plan = make_plan(program)
        check_plan(program, plan)
        return Run(program, plan, key_data(key), chances_of(program, plan))


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the samples of one chunk of a run are drawn.

    **Attributes:**

    - `sampling`: the way that they are drawn in.
    - `first`, `steps`: the first step of the chunk, and its number of steps.
    """

    sampling: "AbstractSampling"
    first: int
    steps: int

    @property
    def replicas(self) -> int:
        """How many samples are drawn."""
        return self.sampling.replicas(self.steps)


def parts(ends: np.ndarray, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Splits a range of positions in consecutive chunks: the number of each chunk, and the
    range in it.

    **Arguments:**

    - `ends`: where each chunk ends.
    """
    last = first + count
    for k in range(int(np.searchsorted(ends, first, "right")), len(ends)):
        begin = int(ends[k - 1]) if k else 0
        if begin >= last:
            return
        yield k, max(first, begin) - begin, min(last, int(ends[k])) - begin


def ids_of(draws: Sequence[Draws], first: int, count: int) -> np.ndarray:
    """The ids of a range of the samples of chunks, which stand one after the other."""
    ends = np.cumsum([mine.replicas for mine in draws])
    return np.concatenate(
        [
            np.arange(draws[k].first + begin, draws[k].first + end, dtype=np.uint32)
            for k, begin, end in parts(ends, first, count)
        ]
    )


def by_chunk(
    draws: Sequence[Draws], samples: Iterable[tuple[np.ndarray, ...]]
) -> Iterator[tuple[np.ndarray, ...]]:
    """The samples of chunks, at most one chunk at a time."""
    ends, start = np.cumsum([mine.replicas for mine in draws]), 0
    for some in samples:
        count, done = len(some[0]), 0
        for _, begin, end in parts(ends, start, count):
            mine = slice(done, done + end - begin)
            yield some if end - begin == count else tuple(x[mine] for x in some)
            done = mine.stop
        start += count


def chances(
    run: Run, parts: StepParts, exceedance: ConditionalExceedance
) -> Float[np.ndarray, " steps"]:
    """The probability of each step that it exceeds a threshold."""
    tables, found = run.plan.tables, []
    for start in range(0, len(parts.barrier), _AT_ONCE):
        some = jax.tree.map(lambda x, start=start: x[start : start + _AT_ONCE], parts)
        found.append(on_host(times_or_chances, tables.step, tables.residuals, some, exceedance))
    return np.concatenate(found).astype(np.float64)


def composed(run: Run, number: int, inputs: Inputs) -> Iterator[Batch]:
    """What `step_tile` gives for so many steps, from their ids, their ends with room for all sinks,
    and their regimes.
    """
    shared = run.plan_of_steps, run.key
    return tiles(step_tile, shared, number, inputs, per_batch=STEP_TILES)


def step_tile(shared, _, ids, ends, regimes):
    """One tile: when each sink is reduced, `(steps, sinks)`, and the parts of steps."""
    plan, key = shared
    ready, of_steps = step_parts(plan, ends.T, ids, key, regimes)
    return ready.T, of_steps
