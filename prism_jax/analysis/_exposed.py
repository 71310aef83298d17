"""The exposed data-parallel communication of simulated steps."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ..cluster import COLLECTIVES
from ..collapse import Sides
from ..engine import Plain, SimulatedSteps, exposed_reductions, prepare, steps_of_run
from ..program import Program


# The most steps that are simulated, which is enough for a share of a step.
_MOST_STEPS = 2**13


def exposed_data_parallel(
    program: Program, *, num_samples: int = _MOST_STEPS, key: PRNGKeyArray
) -> Float[np.ndarray, " steps"]:
    """How long steps wait for data-parallel communication, in seconds: from the end of the last
    backward to the end of the last reduction of gradients, and in the tail for parameters.

    **Arguments:**

    - `program`: the step.
    - `num_samples`: how many steps; no more than 8,192 are simulated.
    - `key`: a `jax.random` key.

    **Returns:**

    The exposed seconds of each step, by the vector rule of replicas. Of the tail, the mean share of
    communication counts.
    """
    number = min(num_samples, _MOST_STEPS)
    if (program.sinks.reduction.value < 0).all() and not communication_shares(program)["tail"]:
        return np.zeros(number)
    # Far tails do not matter here, and plain sampling needs no pilot of its own.
    run = dataclasses.replace(prepare(program, key), sampling=Plain())
    return exposed_of(steps_of_run(run, num_samples=number))


def exposed_of(simulated: SimulatedSteps) -> Float[np.ndarray, " steps"]:
    """`exposed_data_parallel`, from steps that are already simulated."""
    waited, ended = exposed_reductions(simulated)
    in_tail = communication_shares(simulated.run.program)["tail"]
    return waited + in_tail * np.maximum(simulated.steps - ended, 0)


def communication_shares(program: Program) -> dict[str, Any]:
    """The share of communication in the mean latency of each op, and in the tail."""
    table, blocks = program.latencies, program.blocks
    mean = np.asarray(table.mean, np.float64)
    collective = np.array([kind in COLLECTIVES for kind in table.kinds])[table.kind.value]
    runs = blocks.segments.value @ mean
    exposed = blocks.class_collectives.value @ mean
    whole = blocks.class_segments.value @ runs + exposed
    for sides in (blocks.branches, blocks.outer_branches):
        # A block that lies within another has no block within it.
        inner = (runs, 0 * runs) if sides is blocks.branches else (whole, exposed)
        ends, left = (sides.classes.value @ one for one in _ends(sides, *inner, mean))
        whole, exposed = whole + ends, exposed + left
    direct = blocks.direct.value
    single = direct >= 0
    whole = np.where(single, mean[direct], whole)
    exposed = np.where(single, (mean * collective)[direct], exposed)
    share = exposed / np.where(whole > 0, whole, 1)
    of_ops = share[program.rows.class_.value[program.ops.row.value]]
    return {"ops": of_ops, "tail": share[program.tail] if program.tail >= 0 else 0.0}


def _ends(sides: Sides, whole, exposed, mean) -> tuple[np.ndarray, np.ndarray]:
    """How long branches of constant kernels take, and for how much of this nothing computes."""
    compute, inner = sides.compute.value @ whole, sides.compute.value @ exposed
    longest = (sides.communication.value @ mean).max(axis=1, initial=0)
    alpha, beta = sides.slowdowns.value.T
    end = np.maximum(longest + beta * compute, compute + alpha * longest)
    return end, end - (compute - inner)
