"""Figures of the steps of many jobs, from common random numbers."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..analysis import MARGIN, AbstractObjective, Bootstrapped, Mean, Quantile, bootstrapped
from ..data import Job
from ..engine import simulated_steps
from ..program import compile_job
from ..random import key_data
from ._enumerate import schedule_of


FIGURES = ("objective", "mean", "p95", "p99")
# Jobs of a chunk, at most; and how many chunks there are, at least, so that all workers have work.
_MOST = 8
_CHUNKS = 16


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Jobs, preferably of one schedule, whose programs share compiled code, and how to simulate
    them. It can be pickled.

    **Attributes:**

    - `numbers`: the positions of these jobs among all jobs.
    - `num_samples`: steps of each.
    - `key`: the two words that a `jax.random` key is to the engine.
    """

    numbers: tuple[int, ...]
    jobs: tuple[Job, ...]
    objective: AbstractObjective
    num_samples: int
    key: tuple[int, ...]


def simulate_chunk(chunk: Chunk) -> list[Bootstrapped | str]:
    """The `FIGURES` of each job of a chunk; of one that cannot be simulated, why.

    All have the same key and ids of steps, so that what the steps of two jobs share, such as the
    step's own factor and the network's regime, cancels in their difference.
    """
    key = jax.random.wrap_key_data(jnp.asarray(chunk.key, jnp.uint32), impl="threefry2x32")
    return [_figures(job, chunk, key) for job in chunk.jobs]


def _figures(job: Job, chunk: Chunk, key: PRNGKeyArray) -> Bootstrapped | str:
    try:
        program = compile_job(job)
        simulated = simulated_steps(program, num_samples=chunk.num_samples, key=key, margin=MARGIN)
    except ValueError as error:
        return str(error)
    return bootstrapped(simulated, [chunk.objective, Mean(), Quantile(0.95), Quantile(0.99)])


def chunks(
    numbers: Sequence[int],
    jobs: Sequence[Job],
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
) -> Iterator[Chunk]:
    """Some of the jobs, schedule after schedule, a few at a time."""
    most = min(max(len(numbers) // _CHUNKS, 1), _MOST)
    how = (objective, num_samples, tuple(int(word) for word in key_data(key)))
    for one in dict.fromkeys(schedule_of(jobs[i]) for i in numbers):
        mine = [i for i in numbers if schedule_of(jobs[i]) == one]
        for start in range(0, len(mine), most):
            few = mine[start : start + most]
            yield Chunk(tuple(few), tuple(jobs[i] for i in few), *how)
