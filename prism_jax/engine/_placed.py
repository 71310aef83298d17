"""Steps on GPUs whose factors are known: each replica is simulated by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from ..program import Program
from ._check import check_num_samples, check_plan, check_program
from ._decide import SILVER, chances
from ._plan import Plan
from ._random import KeyData, key_data
from ._replica import poisson_stalls, replica_ends
from ._simulate import make_plan_jit
from ._step import barriers, last_draws
from ._tiles import map_tiles, tiles_of, untile


@dataclasses.dataclass(frozen=True)
class Placed:
    """What some steps have in common, whatever GPUs their replicas run on.

    **Attributes:**

    - `plan`, `key`: of the simulation.
    - `regimes`: `(steps,)`, of the network.
    - `factor`, `tail`: `(steps,)`; a step takes `factor * slowest + tail` seconds, where `slowest`
        is the latest of its replicas.
    """

    plan: Plan
    key: KeyData
    regimes: Int[np.ndarray, " steps"]
    factor: Float[np.ndarray, " steps"]
    tail: Float[np.ndarray, " steps"]

    @property
    def num_steps(self) -> int:
        return len(self.factor)


def placed(program: Program, *, num_samples: int, key: PRNGKeyArray) -> Placed:
    """Draws what steps have in common.

    **Raises:**

    `ValueError` for a program whose kernels are drawn one by one: its members have GPUs of their
    own.
    """
    check_program(program, key)
    if program.resolution == "kernel":
        raise ValueError(
            'Known GPUs go with whole blocks; compile the program without `resolution="kernel"`.'
        )
    num_samples = check_num_samples(num_samples)
    plan = make_plan_jit(program)
    check_plan(plan)
    words = key_data(key)
    likely = chances(program).network
    # Each of the regimes in its share of any run of steps.
    place = np.modf(np.arange(num_samples) * SILVER)[0]
    regimes = np.searchsorted(np.cumsum(likely)[:-1], place, "right").astype(np.int32)

    def inputs(first, count):
        return (regimes[first : first + count],)

    last = _run(_last_tile, (plan, words), num_samples, inputs)
    return Placed(plan, words, regimes, *last.T.astype(np.float64))


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

    return _run(_ready_tile, _shared(steps), len(noise) * number, inputs).reshape(-1, number)


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

    return _run(_slope_tile, _shared(steps), len(noise), inputs)


def _shared(steps: Placed) -> tuple[Any, ...]:
    return steps.plan, steps.key, np.uint32(steps.num_steps)


def _inputs(steps: Placed, slowest, noise, step) -> tuple[np.ndarray, ...]:
    dtype = steps.plan.mean.dtype
    which = noise.astype(np.uint32), step.astype(np.uint32), steps.regimes[step]
    return slowest.astype(dtype), *which


def _run(function: Callable[..., Any], shared, number: int, inputs) -> np.ndarray:
    """All that a function gives for so many samples."""
    found: list[np.ndarray] = []
    finished = map_tiles(
        function,
        shared,
        number,
        lambda first, count, result: found.append(untile(result)),
        inputs,
        tiles=tiles_of(shared[0].program.num_ops),
    )
    if not finished:
        raise KeyboardInterrupt
    return np.concatenate(found)


def _last_tile(shared, ids, regimes):
    plan, key = shared
    return last_draws(plan, ids, key, regimes).T


def _ready_tile(shared, _, slowest, noise, step, regimes):
    plan, key, number = shared
    ids = noise * number + step
    stalls = poisson_stalls(plan.program, ids, key)
    ends = replica_ends(plan, ids, key, regimes, stalls, slowest=slowest.T)
    return jnp.max(barriers(plan, ends, step, key, regimes)[0], axis=0)


def _slope_tile(shared, _, slowest, *rest):
    return jax.grad(lambda slowest: jnp.sum(_ready_tile(shared, None, slowest, *rest)))(slowest)
