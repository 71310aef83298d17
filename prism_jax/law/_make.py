"""Makes laws: of the steps of a pool, of several pools, and of runs with different keys."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from .._padding import AnyArray
from ._errors import (
    LEVELS,
    SHARES,
    Errors,
    errors_of_figures,
    figures_of_moments,
    pooled_errors,
    scatters,
)
from ._histogram import histogram_of, merge_histograms
from ._law import Allocations, Law


# Sums are taken over so many steps in single precision, and over these in double precision.
_ROW = 256


class Counted(NamedTuple):
    """What a law keeps of the steps of a pool, on the host or a device.

    **Attributes:**

    - `times`: of the steps, ascending, in seconds; infinite where there are no more.
    - `centre`: the median, in seconds.
    - `sums`: over rows of steps, of deviations from the centre and of their squares.
    - `quantiles`: of the steps, at `LEVELS`.
    """

    times: Float[AnyArray, " steps"]
    centre: Float[AnyArray, ""]
    sums: Float[AnyArray, "2 rows"]
    quantiles: Float[AnyArray, " levels"]


def counted(times: Float[AnyArray, " steps"], number: int, xp: Any) -> Counted:
    """What a law keeps of the first `number` of some steps, whose times are in seconds.

    **Arguments:**

    - `xp`: `numpy` or `jax.numpy`, by which this is computed.
    """
    there = xp.arange(len(times)) < number
    times = xp.sort(xp.where(there, times, xp.inf))
    centre = times[number // 2]
    # In NumPy everything is in double precision.
    wide = times.astype(np.float64) if xp is np else times
    deviation = xp.where(there, wide - centre, 0)
    rows = xp.pad(deviation, (0, -len(times) % _ROW)).reshape(-1, _ROW)
    sums = xp.stack([xp.sum(rows, axis=1), xp.sum(rows**2, axis=1)])
    # Quantiles at `LEVELS`.
    position = LEVELS * (number - 1)
    low = np.floor(position).astype(np.int32)
    share = (position - low).astype(times.dtype)
    high = np.minimum(low + 1, number - 1)
    quantiles = times[low] + share * (times[high] - times[low])
    return Counted(times, centre, sums, quantiles)


def law_of(counts: Counted, number: int, errors: Errors, **fields: Any) -> Law:
    """The law of `number` steps.

    **Arguments:**

    - `errors`: of its figures.
    - `fields`: further ones of the law, of which the program and the times may come later.
    """
    fields = {"program": "", "compile_s": 0.0, "run_s": 0.0} | fields
    shift, square = np.sum(np.asarray(counts.sums, np.float64), axis=1) / number
    return Law(
        mean=float(np.float64(counts.centre) + shift),
        std=float(np.sqrt(max(square - shift**2, 0.0))),
        histogram=histogram_of(np.asarray(counts.times)[:number]),
        errors=errors,
        **fields,
    )


def merge_laws(laws: Iterable[Law]) -> Law:
    """Merges laws of the same program with different keys into the law of all their steps. If each
    has allocations, the law has all of them.

    **Raises:**

    `ValueError` if there are no laws, if they are of different programs, or if they share a key.
    """
    laws = list(laws) if isinstance(laws, Iterable) else []
    if not laws or not all(isinstance(law, Law) for law in laws):
        raise ValueError("Give a list of at least one law to merge, from `simulate` or `load_law`.")
    if len({law.program for law in laws}) > 1:
        raise ValueError(
            "The laws are of different programs and cannot be merged; merge those of one program "
            "with the same parameters."
        )
    keys = [key for law in laws for key in law.keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            "The laws share a key, so they hold the same samples; simulate each with a key of its "
            "own."
        )
    merged = _pool(laws, keys)
    sets = [law.allocations for law in laws if law.allocations is not None]
    if len(sets) < len(laws):
        return merged
    means = tuple(mean for allocations in sets for mean in allocations.means)
    sizes = [law.num_samples for law in laws]
    std = np.sqrt(np.average([allocations.std**2 for allocations in sets], weights=sizes))
    return dataclasses.replace(merged, allocations=Allocations(means, float(std)))


def merge_chunks(laws: Sequence[Law]) -> Law:
    """Merges the laws of the chunks of one run."""
    return laws[0] if len(laws) == 1 else _pool(laws, laws[0].keys)


def merge_allocations(laws: Sequence[Law]) -> Law:
    """Merges the laws of the steps on several allocations of GPUs. Allocations are the independent
    samples: if they differ more than the steps on each, most lie wholly on one side of a quantile.
    """
    law, count = merge_chunks(laws), len(laws)
    if count < 2:
        scatter = np.tile([np.nan, 0.0, np.inf], (2 + len(LEVELS), 1))
    else:
        apart = _contributions(law, laws)
        # Of all allocations, from those at hand, as in an unbiased variance.
        scatter = scatters((apart - apart.mean(axis=0)) / np.sqrt(count * (count - 1)))
    errors = errors_of_figures(scatter, float(count), count * SHARES)
    return dataclasses.replace(law, errors=errors, allocations=_allocations(laws))


def _allocations(laws: Sequence[Law]) -> Allocations:
    sizes, variances = np.array([(law.num_samples, law.std**2) for law in laws]).T
    within = sizes @ variances / max(sizes.sum() - len(laws), 1)
    return Allocations(tuple(law.mean for law in laws), float(np.sqrt(within)))


def _contributions(merged: Law, laws: Sequence[Law]) -> np.ndarray:
    """What each of several laws contributes to the mean, the standard deviation and the levels of
    the law of all, by the jackknife: how far the figure moves without it, times the number of the
    others. Columns are figures.
    """
    quantiles = np.asarray(merged.quantile(LEVELS))
    sizes = np.array([[law.num_samples] for law in laws])
    shift = np.array([[law.mean] for law in laws]) - merged.mean
    square = np.array([[law.std] for law in laws]) ** 2 + shift**2
    below = np.array([law.cdf(quantiles) for law in laws])

    sums = sizes * np.hstack([shift, square, below])
    total, number = sums.sum(axis=0, keepdims=True), sizes.sum()
    of_others = figures_of_moments((total - sums) / (number - sizes))
    return (len(laws) - 1) * (figures_of_moments(total / number) - of_others)


def _pool(laws: Sequence[Law], keys) -> Law:
    sizes = np.array([law.num_samples for law in laws], float)
    shares = sizes / sizes.sum()
    means, stds = np.array([law.mean for law in laws]), np.array([law.std for law in laws])
    mean = float(shares @ means)
    std = float(np.sqrt(shares @ (stds**2 + (means - mean) ** 2)))

    added = ("requested", "effective_samples", "compile_s", "run_s")
    samplings = {law.sampling for law in laws}
    return dataclasses.replace(
        laws[0],
        **{name: sum(getattr(law, name) for law in laws) for name in added},
        mean=mean,
        std=std,
        histogram=merge_histograms([law.histogram for law in laws]),
        errors=pooled_errors([law.errors for law in laws], shares),
        keys=tuple(keys),
        sampling=samplings.pop() if len(samplings) == 1 else "mixed",
        allocations=None,
    )
