"""How much sets of GPUs differ in the mean step time."""

import numpy as np
from jaxtyping import Float

from ..replica import tiles, without_graph
from ..step import STEP_TILES
from ._prepare import Run
from ._run import step_tile
from ._sampling import slowest_ends


def gpu_set_factors(run: Run, num_sets: int, num_steps: int) -> Float[np.ndarray, " sets"]:
    """The mean step time on each of several sets of GPUs, relative to that of all.

    All sets take the same steps, with the same random numbers for all but their GPUs, so that what
    steps have in common cancels. What is left of their noise is estimated by a two-way analysis of
    variance (sets and steps), and the factors are shrunk to the variance without it.

    **Arguments:**

    - `num_sets`: at least two.
    - `num_steps`: on each set, with every replica simulated; at least two.
    """
    found = slowest_ends(run, num_sets * num_steps, lambda row: (row % num_steps, row // num_steps))
    ends, regimes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # The slowness of the step is the same on all sets, so it is left out.
    times = _without_factor(run, ends, regimes, num_steps).reshape(num_sets, num_steps)

    regimes, network = regimes[:num_steps], run.chances.network
    weights = (network / np.maximum(np.bincount(regimes, minlength=len(network)), 1))[regimes]
    weights /= weights.sum()
    means = times @ weights
    apart = times - times.mean(axis=1, keepdims=True) - times.mean(axis=0) + times.mean()
    noise = (apart**2).sum() / ((num_sets - 1) * (num_steps - 1)) * (weights**2).sum()
    variance = means.var(ddof=1)
    shrunk = np.sqrt(max(variance - noise, 0.0) / variance) if variance else 0.0
    return 1 + shrunk * (means / means.mean() - 1)


def _without_factor(
    run: Run, ends: np.ndarray, regimes: np.ndarray, num_steps: int
) -> Float[np.ndarray, " steps"]:
    """The times of steps without the factor of the step; after `num_steps`, ids begin again."""
    room = len(run.plan.structure.sinks.first)
    ends = np.pad(ends, ((0, 0), (0, room - ends.shape[1])))

    def inputs(first, count):
        some = slice(first, first + count)
        ids = np.arange(first, first + count) % num_steps
        return ids.astype(np.uint32), ends[some], regimes[some]

    shared = without_graph(run.plan), run.key
    batches = tiles(step_tile, shared, len(ends), inputs, per_batch=STEP_TILES)
    parts = [batch.samples()[2] for batch in batches]
    return np.concatenate([one.barrier + one.tail for one in parts], dtype=np.float64)
