"""Steps on GPUs whose factors are known: each replica is simulated by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from ..engine import Run, check_num_samples, prepare
from ..program import Program
from ..replica import (
    Sampled,
    poisson_stalls,
    replica_ends,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import SILVER, step_parts


@dataclasses.dataclass(frozen=True)
class Placed:
    """What some steps have in common, whatever GPUs their replicas run on.

    **Attributes:**

    - `run`: the simulation.
    - `regimes`: `(steps,)`, of the network.
    - `factor`, `tail`: `(steps,)`; a step takes `factor * slowest + tail` seconds, where `slowest`
        is the latest of its replicas. The tail has the factor already.
    """

    run: Run
    regimes: Int[np.ndarray, " steps"]
    factor: Float[np.ndarray, " steps"]
    tail: Float[np.ndarray, " steps"]

    @property
    def num_steps(self) -> int:
        return len(self.factor)


def placed(program: Program, *, num_samples: int, key: PRNGKeyArray) -> Placed:
    """Draws what steps have in common."""
    num_samples = check_num_samples(num_samples)
    run = prepare(program, key)
    # Each of the regimes in its share of any run of steps.
    place = np.modf(np.arange(num_samples) * SILVER)[0]
    regimes = np.searchsorted(np.cumsum(run.chances.network)[:-1], place, "right").astype(np.int32)

    def inputs(first, count):
        return (regimes[first : first + count],)

    last = _all(run, _last_tile, (without_graph(run.plan), run.key), num_samples, inputs)
    return Placed(run, regimes, *last.T.astype(np.float64))


def replicas_ready(
    steps: Placed, slowest: Float[np.ndarray, "n ranks"], noise: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n steps"]:
    """When some replicas have reduced their gradients, in each step.

    **Arguments:**

    - `steps`: from `placed`.
    - `slowest`: of each replica, the factor of the slowest GPU of each pipeline rank, relative to
        the mean one.
    - `noise`: of each replica, which random numbers are its own: below `2**32 / num_steps`.

    **Returns:**

    Seconds, before the factor of the step.
    """
    number = steps.num_steps

    def inputs(first, count):
        row, step = np.divmod(np.arange(first, first + count), number)
        return _inputs(steps, slowest[row], noise[row], step)

    found = _all(steps.run, _ready_tile, _shared(steps), len(noise) * number, inputs)
    return found.reshape(-1, number)


def ready_slopes(
    steps: Placed,
    slowest: Float[np.ndarray, "n ranks"],
    noise: Int[np.ndarray, " n"],
    step: Int[np.ndarray, " n"],
) -> Float[np.ndarray, "n ranks"]:
    """The derivative of what `replicas_ready` gives for each replica, in one step each, with
    respect to `slowest`, in seconds.
    """

    def inputs(first, count):
        some = slice(first, first + count)
        return _inputs(steps, slowest[some], noise[some], step[some])

    number = len(noise)
    found = _all(steps.run, _slope_tile, _shared(steps), number, inputs)
    return found[:, : steps.run.program.num_ranks]


def _shared(steps: Placed) -> tuple[Any, ...]:
    return steps.run.plan, steps.run.key, np.uint32(steps.num_steps)


def _inputs(steps: Placed, slowest, noise, step) -> tuple[np.ndarray, ...]:
    plan = steps.run.plan
    room = np.ones((len(slowest), plan.structure.ranks - slowest.shape[1]))
    slowest = np.concatenate([slowest, room], axis=1).astype(plan.dtype)
    return slowest, noise.astype(np.uint32), step.astype(np.uint32), steps.regimes[step]


def _all(run: Run, function: Callable[..., Any], shared, number: int, inputs) -> np.ndarray:
    """All that a function gives for so many samples."""
    options = {"per_batch": tiles_of(run.plan), "size": tile_size(number)}
    batches = tiles(function, shared, number, inputs, **options)
    return np.concatenate([batch.samples() for batch in batches])


def _last_tile(shared, ids, regimes):
    plan, key = shared
    ends = jnp.zeros((len(plan.structure.sinks.first), len(ids)), plan.dtype)
    _, parts = step_parts(plan, ends, ids, key, regimes)
    return jnp.stack([parts.factor, parts.factor * parts.tail], axis=1)


def _ready_tile(shared, _, slowest, noise, step, regimes):
    plan, key, number = shared
    ids = noise * number + step
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, slowest=slowest.T), key)
    return step_parts(plan, ends, step, key, regimes)[1].barrier


def _slope_tile(shared, _, slowest, *rest):
    return jax.grad(lambda slowest: jnp.sum(_ready_tile(shared, None, slowest, *rest)))(slowest)
