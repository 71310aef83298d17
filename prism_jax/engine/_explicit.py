"""Runs that simulate every replica of every step, and how much sets of GPUs differ in them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..law import Law, merge_allocations
from ..random import KeyData, Stream, fold, uniforms
from ..replica import (
    Plan,
    Sampled,
    poisson_stalls,
    replica_ends,
    tiles,
    tiles_of,
    without_steps,
)
from ..step import Chances
from ._run import Run, composed
from ._sampling import AbstractSampling, Draws


@dataclasses.dataclass(frozen=True)
class Explicit(AbstractSampling):
    """All replicas of each step, by their law; see `explicit`.

    **Attributes:**

    - `allocations`: on how many sets of GPUs the steps run, each chunk on its own.
    """

    name = "plain"
    allocations: int

    def merged(self, laws: list[Law]) -> Law:
        return merge_allocations(laws)

    def compacted(self, laws: list[Law]) -> list[Law]:
        return laws

    def samples(
        self, plan: Plan, key: KeyData, draws: Sequence[Draws]
    ) -> Iterator[tuple[np.ndarray, ...]]:
        first, ends = draws[0].first, np.cumsum([chunk.steps for chunk in draws])

        def on_gpus(row):
            return first + row, np.searchsorted(ends, row, side="right")

        for latest, regimes in slowest_ends(plan, key, int(ends[-1]), on_gpus):
            yield latest, latest.max(axis=1), regimes, np.ones(len(latest), np.float32)


def explicit(run: Run, allocations: int) -> Run:
    """The run with all replicas of each step simulated. The latest end of each sink represents
    them, as if a step had a single replica, whose stalls and regime of the network are by its law.
    """
    network = run.chances.network
    by_law = Chances(np.arange(len(network)), network, np.ones(len(network)), network)
    return dataclasses.replace(run, chances=by_law, num_replicas=1, sampling=Explicit(allocations))


def slowest_ends(
    plan: Plan,
    key: KeyData,
    num_steps: int,
    on_gpus: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The latest end of each sink among all replicas of steps, `(steps, sinks)`, and the regimes of
    these, some steps at a time.

    **Arguments:**

    - `on_gpus`: gives, for the numbers of some steps, the ids of their draws, and the ids of the
        sets of GPUs that they run on.
    """
    replicas, sinks = int(plan.structure.num_replicas), int(plan.structure.sinks.number)

    def inputs(begin, count):
        step, replica = np.divmod(np.arange(begin, begin + count), replicas)
        return tuple((x * replicas + replica).astype(np.uint32) for x in on_gpus(step))

    pending = np.zeros((0, sinks), plan.dtype), np.zeros(0, np.int32)
    shared, size = (without_steps(plan), key), tiles_of(plan)
    for batch in tiles(_explicit_tile, shared, num_steps * replicas, inputs, per_batch=size):
        ends, regimes = batch.samples()
        ends = np.concatenate([pending[0], ends[:, :sinks]])
        regimes = np.concatenate([pending[1], regimes])
        steps = len(ends) // replicas
        num_samples = steps * replicas
        pending = ends[num_samples:], regimes[num_samples:]
        if steps:
            yield (
                ends[:num_samples].reshape(steps, replicas, -1).max(axis=1),
                regimes[:num_samples:replicas],
            )


def _explicit_tile(shared, _, ids, gpu_ids):
    """One tile: ends `(samples, sinks)`, and the regime of each sample's step."""
    plan, key = shared
    steps = ids // plan.structure.num_replicas
    u = uniforms(fold(key, Stream.NETWORK), steps, jnp.zeros((), jnp.uint32), plan.dtype)
    bounds = jnp.cumsum(plan.tables.network)[:-1]
    regimes = jnp.searchsorted(bounds, u, side="right").astype(jnp.int32)
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, gpu_ids=gpu_ids), key)
    return ends.T, regimes


def gpu_set_factors(run: Run, num_sets: int, num_steps: int) -> Float[np.ndarray, " sets"]:
    """The mean step time on each of several sets of GPUs, relative to that of all.

    All sets take the same steps, with the same random numbers for all but their GPUs, so that what
    steps have in common cancels. What is left of their noise is estimated by a two-way analysis of
    variance (sets and steps), and the factors are shrunk to the variance without it.

    **Arguments:**

    - `num_sets`: at least two.
    - `num_steps`: on each set, with every replica simulated; at least two.
    """
    batches = slowest_ends(
        run.plan, run.key, num_sets * num_steps, lambda row: (row % num_steps, row // num_steps)
    )
    ends, regimes = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    # The slowness of the step is the same on all sets, so it is left out.
    ids = np.arange(len(ends), dtype=np.uint32) % num_steps
    parts = composed(run, ids, ends, regimes)[1]
    times = np.asarray(parts.barrier + parts.tail, np.float64).reshape(num_sets, num_steps)

    means = times.mean(axis=1)
    apart = times - times.mean(axis=1, keepdims=True) - times.mean(axis=0) + times.mean()
    noise = (apart**2).sum() / ((num_sets - 1) * (num_steps - 1) * num_steps)
    variance = means.var(ddof=1)
    shrunk = np.sqrt(max(variance - noise, 0.0) / variance) if variance else 0.0
    return 1 + shrunk * (means / means.mean() - 1)
