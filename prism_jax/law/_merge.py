"""Laws of stretches of a run, or of runs with other keys, as one law."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ._law import LEVELS, NUM_EXTREMES, Law


def merge_laws(laws: Iterable[Law]) -> Law:
    """One law of the steps of several, which must be of the same program and of different keys.

    **Raises:**

    `ValueError` if they are of different programs, or share a key.
    """
    laws = list(laws)
    if not laws or not all(isinstance(law, Law) for law in laws):
        raise ValueError("Give a list of at least one law to merge, from `simulate` or `load_law`.")
    if len({law.program for law in laws}) > 1:
        raise ValueError(
            "The laws are of different programs and cannot be merged; merge those of one program "
            "with the same parameters."
        )
    if len({law.edges for law in laws}) > 1:
        raise ValueError(
            "The laws were counted in different bins, on other software or another machine, and "
            "cannot be merged; simulate them in one place."
        )
    keys = [key for law in laws for key in law.keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            "The laws share a key, so they hold the same samples; simulate each with a key of its "
            "own."
        )
    return _pool(laws, keys)


def merge_stretches(laws: Sequence[Law]) -> Law:
    """One law of the stretches of one run."""
    return laws[0] if len(laws) == 1 else _pool(laws, laws[0].keys)


def merge_randomisations(laws: Sequence[Law]) -> Law:
    """One law of randomisations of the same points, whose standard errors are those of the mean of
    independent randomisations: how much these scatter.
    """
    law = merge_stretches(laws)
    count = len(laws)
    if count < 2:
        return dataclasses.replace(law, mean_support=0.0, level_support=0 * law.level_support)

    def error(values):
        return np.std(values, axis=0, ddof=1) / np.sqrt(count)

    quantiles = np.asarray(law.quantile(LEVELS))
    levels = np.array([one.cdf(quantiles) for one in laws])
    return dataclasses.replace(
        law,
        mean_error=float(error([one.mean for one in laws])),
        std_error=float(error([one.std for one in laws])),
        level_errors=error(levels),
        degrees=count - 1.0,
    )


def merge_allocations(laws: Sequence[Law]) -> Law:
    """One law of the steps on several allocations of GPUs, which are known to scatter as their
    means do.
    """
    means = tuple(law.mean for law in laws)
    std = float(np.sqrt(np.mean([law.std**2 for law in laws])))
    return dataclasses.replace(
        merge_randomisations(laws), allocation_means=means, allocation_std=std
    )


def _pool(laws: Sequence[Law], keys) -> Law:
    sizes = np.array([law.num_samples for law in laws], float)
    shares = sizes / sizes.sum()
    means, stds = np.array([law.mean for law in laws]), np.array([law.std for law in laws])
    mean = float(shares @ means)
    std = float(np.sqrt(shares @ (stds**2 + (means - mean) ** 2)))

    def error(name):
        errors = np.array([getattr(law, name) for law in laws])
        return np.sqrt(np.tensordot(shares**2, errors**2, 1))

    def common(name):
        values = {getattr(law, name) for law in laws}
        return values.pop() if len(values) == 1 else "mixed"

    def total(name):
        return sum(getattr(law, name) for law in laws)

    low = np.sort(np.concatenate([law.smallest for law in laws]))
    high = np.sort(np.concatenate([law.largest for law in laws]))
    return Law(
        num_samples=total("num_samples"),
        requested=total("requested"),
        mean=mean,
        std=std,
        edges=laws[0].edges,
        counts=np.sum([law.counts for law in laws], axis=0),
        smallest=low[:NUM_EXTREMES],
        largest=high[-NUM_EXTREMES:],
        mean_error=float(error("mean_error")),
        std_error=float(error("std_error")),
        mean_support=total("mean_support"),
        level_errors=error("level_errors"),
        level_support=np.sum([law.level_support for law in laws], axis=0),
        effective_samples=total("effective_samples"),
        program=laws[0].program,
        keys=tuple(keys),
        compile_s=total("compile_s"),
        run_s=total("run_s"),
        degrees=min(law.degrees for law in laws),
        sampling=common("sampling"),
        replicas=common("replicas"),
    )
