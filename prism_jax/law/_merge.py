"""Merges laws: of the stretches of one run, or of runs with different keys."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ._allocations import Allocations
from ._errors import LEVELS, pooled_errors
from ._histogram import merge_histograms
from ._law import Law


def merge_laws(laws: Iterable[Law]) -> Law:
    """Merges laws of the same program with different keys into the law of all their steps.

    **Raises:**

    `ValueError` if there are no laws, if they are of different programs, if they share a key, or if
    they were simulated on different software or machines, so that their bins differ.
    """
    laws = list(laws)
    if not laws or not all(isinstance(law, Law) for law in laws):
        raise ValueError("Give a list of at least one law to merge, from `simulate` or `load_law`.")
    if len({law.program for law in laws}) > 1:
        raise ValueError(
            "The laws are of different programs and cannot be merged; merge those of one program "
            "with the same parameters."
        )
    if len({law.histogram.edges for law in laws}) > 1:
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
    """Merges the laws of the stretches of one run."""
    return laws[0] if len(laws) == 1 else _pool(laws, laws[0].keys)


def merge_randomisations(laws: Sequence[Law]) -> Law:
    """Merges the laws of independent randomisations of the same points. The scatter of the
    randomisations gives the standard errors.
    """
    law = merge_stretches(laws)
    count = len(laws)
    if count < 2:
        none = 0 * law.errors.level_support
        unknown = dataclasses.replace(law.errors, support=0.0, level_support=none)
        return dataclasses.replace(law, errors=unknown)

    def error(values):
        return np.std(values, axis=0, ddof=1) / np.sqrt(count)

    # What each contributes to the variance of all steps, including the scatter of the means.
    means, stds = np.array([one.mean for one in laws]), np.array([one.std for one in laws])
    squares = (means - law.mean) ** 2 + stds**2 - law.std**2
    quantiles = np.asarray(law.quantile(LEVELS))
    errors = dataclasses.replace(
        law.errors,
        mean=float(error([one.mean for one in laws])),
        std=float(error(squares / (2 * law.std))) if law.std > 0 else 0.0,
        mean_skewness=0.0,
        std_skewness=0.0,
        levels=error(np.array([one.cdf(quantiles) for one in laws])),
        level_skewness=np.zeros(len(LEVELS)),
        mean_degrees=count - 1.0,
        std_degrees=count - 1.0,
        level_degrees=np.full(len(LEVELS), count - 1.0),
    )
    return dataclasses.replace(law, errors=errors)


def merge_allocations(laws: Sequence[Law]) -> Law:
    """Merges the laws of the steps on several allocations of GPUs. The scatter of the allocations
    gives the standard errors.
    """
    means = tuple(law.mean for law in laws)
    std = float(np.sqrt(np.mean([law.std**2 for law in laws])))
    return dataclasses.replace(merge_randomisations(laws), allocations=Allocations(means, std))


def _pool(laws: Sequence[Law], keys) -> Law:
    sizes = np.array([law.num_samples for law in laws], float)
    shares = sizes / sizes.sum()
    means, stds = np.array([law.mean for law in laws]), np.array([law.std for law in laws])
    mean = float(shares @ means)
    std = float(np.sqrt(shares @ (stds**2 + (means - mean) ** 2)))

    def common(name):
        values = {getattr(law, name) for law in laws}
        return values.pop() if len(values) == 1 else "mixed"

    def total(name):
        return sum(getattr(law, name) for law in laws)

    return Law(
        requested=total("requested"),
        mean=mean,
        std=std,
        histogram=merge_histograms([law.histogram for law in laws]),
        errors=pooled_errors([law.errors for law in laws], shares),
        effective_samples=total("effective_samples"),
        program=laws[0].program,
        keys=tuple(keys),
        compile_s=total("compile_s"),
        run_s=total("run_s"),
        sampling=common("sampling"),
        replicas=common("replicas"),
    )
