"""Runs: what is prepared of a program, and what steps consist of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import check_interrupt, working
from ..host import on_host
from ..program import Program
from ..random import KeyData, key_data
from ..replica import (
    Plan,
    make_plan,
    on_all_devices,
    structure_of,
    tables_of_each,
    tiles,
    with_tables,
    without_ops,
)
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
from ._sampling import AbstractSampling, Plain


# Probabilities are computed for so many steps at once, in little memory.
_AT_ONCE = 2**15

Advance = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Run:
    """The common data of all chunks of a run.

    **Attributes:**

    - `plan_of_steps`: what all batches of steps share, on all devices.
    - `num_replicas`: of how many samples a step takes the slowest.
    - `sampling`: how replica samples are drawn.
    """

    program: Program
    plan: Plan
    plan_of_steps: Plan
    key: KeyData
    chances: Chances
    num_replicas: int
    sampling: AbstractSampling


def prepare(program: Program, key: "jax.Array", like: Run | None = None) -> Run:
    """Checks a program and a key, and computes what is needed before any sample is drawn: of a run
    with plain sampling.

    **Arguments:**

    - `like`: the run of another program. If the programs differ in their parameters only, the runs
        share one structure, which is on all devices.

    **Raises:**

    `ValueError` if an argument is not a program or a key, or if latencies are not valid.
    """
    check_interrupt()
    check_program(program, key)
    with working():
        if like and but_for_parameters(like.program) != but_for_parameters(program):
            like = None
        plan = make_plan(program, None if like is None else like.plan.structure)
        return _checked(program, key, plan, like)


def prepare_together(
    programs: Sequence[Program], key: "jax.Array", like: Run | None = None
) -> Run | None:
    """`prepare`, for several programs at once that differ in their parameters only. The program of
    the run, its tables and those of its steps have the programs as their first axis, the first of
    these as far as parameters differ. `None` if one of them is refused, or if strata weigh
    differently in them: then each has to be prepared by itself.

    `like` is a run of programs that differ from these in their parameters only.
    """
    check_interrupt()
    with working():
        program = jax.tree.map(_joint, *programs)
        check_program(program, key)
        variability = program.variability
        of_strata = variability.network, [stall.rate for stall in variability.stalls.values()]
        if any(x.ndim for x in jax.tree.leaves(of_strata)):
            return None
        structure = structure_of(programs[0]) if like is None else like.plan.structure
        try:
            tables = tables_of_each(program, programs[0], len(programs), structure)
            return _checked(program, key, Plan(structure, tables), like)
        except (ValueError, IndexError):  # What an error says is of one program.
            return None


def _joint(first: Any, *others: Any) -> Any:
    """What a leaf of programs together is: that of one, where they are equal."""
    if all(x is first or np.array_equal(x, first) for x in others):
        return first
    return jax.device_put(np.stack([first, *others]))


def _checked(program: Program, key: "jax.Array", plan: Plan, like: Run | None) -> Run:
    check_plan(program, plan)
    if like is not None:
        of_steps = with_tables(like.plan_of_steps, plan.tables)
    else:
        of_steps = without_ops(plan)
        # The host has read it for this program; for others it is on all devices.
        plan = Plan(on_all_devices(plan.structure), plan.tables)
    chances, of_steps = chances_of(program, plan), on_all_devices(of_steps)
    return Run(program, plan, of_steps, key_data(key), chances, program.num_replicas, Plain())


def but_for_parameters(program: Program) -> tuple[Any, ...]:
    """What a program is without the values of its parameters: equal for programs that differ in
    these only.
    """
    leaves, structure = jax.tree.flatten(program)

    def fixed(x) -> tuple[Any, ...]:
        return np.shape(x), x.dtype if eqx.is_inexact_array(x) else np.asarray(x).tobytes()

    return structure, *map(fixed, leaves)


def chances(
    run: Run, parts: StepParts, exceedance: ConditionalExceedance
) -> Float[np.ndarray, " steps"]:
    """The probability of each step that it exceeds a threshold."""
    tables, probabilities = run.plan.tables, []
    for start in range(0, len(parts.barrier), _AT_ONCE):
        batch = jax.tree.map(lambda x, start=start: x[start : start + _AT_ONCE], parts)
        probabilities.append(
            on_host(times_or_chances, tables.step, tables.residuals, batch, exceedance)
        )
    return np.concatenate(probabilities).astype(np.float64)


def composed(
    run: Run, ids: np.ndarray, ends: np.ndarray, regimes: np.ndarray
) -> tuple[Float[np.ndarray, "steps sinks"], StepParts]:
    """When each sink of steps is reduced, and their parts, from the ids of the steps, the ends of
    the sinks, `(steps, sinks)` or with room for more, and the regimes of the network.
    """
    room = len(run.plan.structure.sinks.first) - ends.shape[1]

    def inputs(first: int, count: int) -> tuple[np.ndarray, ...]:
        entries = slice(first, first + count)
        return ids[entries], np.pad(ends[entries], ((0, 0), (0, room))), regimes[entries]

    shared = run.plan_of_steps, run.key
    batches = tiles(step_tile, shared, len(ids), inputs, per_batch=STEP_TILES)
    every = [batch.samples() for batch in batches]
    ready, parts = jax.tree.map(lambda *x: np.concatenate(x), *every)
    return ready[:, : run.program.sinks.number], parts


def step_tile(shared, _, ids, ends, regimes):
    """One tile: when each sink is reduced, `(steps, sinks)`, and the parts of steps."""
    plan, key = shared
    ready, of_steps = step_parts(plan, ends.T, ids, key, regimes)
    return ready.T, of_steps
