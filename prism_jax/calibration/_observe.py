"""Statistics of the step times of runs: level, core, variation that steps share, outliers; and the
law of the factor of a step that follows from them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

from .._estimate import in_core
from .._misc import bisect, plural, runs_of
from ..data import Measured, Priors, Variation


# An autocovariance is significant if it is this many times that of white noise.
_SEEN = 2.5
# The longest step over the median, the longest step in seconds, and the largest share of outliers.
_LONGEST = 1000.0
_LATEST = 1e9
_MOST_OUTLIERS = 0.2
# The body may be this much wider than the core, which leaves out steps that are far off.
_WIDER = 1.25
_HALVINGS = 14


Steps = Float[np.ndarray, " steps"]
Runs = Any  # The steps of each run, or a data frame of them.


@dataclasses.dataclass(frozen=True)
class Observed:
    """Statistics of the step times of some runs of one job.

    **Attributes:**

    - `median`: the median of the runs' medians, in seconds.
    - `steps`: the steps of a typical run: at each level, the median over runs of their quantiles,
        relative to the medians of the runs.
    - `core`: the median over runs of `core_spread`.
    - `shared`: the share of its variance that a step has in common with the next step.
    - `excess`: the excess of the slow outliers over the median, in seconds.
    - `between`: the relative standard deviation of the runs' levels, without their scatter from
        short runs; `None` for one run.
    - `num_runs`, `num_steps`: the number of runs, and of all their steps.
    """

    median: float
    steps: Steps
    core: float
    shared: float
    excess: Float[np.ndarray, " outliers"]
    between: float | None
    num_runs: int
    num_steps: int

    def measured(self, source: str) -> Measured:
        """The figures of a typical run, for a job file."""
        return Measured(
            source,
            mean_s=float(np.mean(self.steps)),
            std_s=float(np.std(self.steps, ddof=1)),
            p50_s=self.median,
            p95_s=float(np.quantile(self.steps, 0.95)),
            num_samples=self.num_steps,
        )


def observe_runs(runs: Runs) -> Observed:
    """Splits step times into level, core, variation that steps share, and outliers. Runs are not
    pooled.

    **Arguments:**

    - `runs`: the step times of each run in seconds, in the order of steps.

    **Raises:**

    As `check_runs`.
    """
    runs = runs_of(runs)
    check_runs(runs)
    medians = np.array([np.median(run) for run in runs])
    longest = max(run.max() / middle for run, middle in zip(runs, medians, strict=True))
    if longest > _LONGEST:
        raise ValueError(
            f"A measured step takes {longest:.3g} times as long as the median of its run; leave "
            f"out everything that takes more than {_LONGEST:g} times as long, as a step does not."
        )
    relative = [run / middle - 1 for run, middle in zip(runs, medians, strict=True)]
    cores = [_core(steps) for steps in relative]
    weights = np.array([np.sum(~np.isnan(core)) for core in cores])
    moments = np.array([[_autocovariance(core, lag) for lag in (0, 1, 2)] for core in cores])
    pooled, lag_one, lag_two = weights @ moments / weights.sum()
    # An autoregressive factor beside white noise: its autocorrelation, and its share of the
    # variance. White noise alone shows autocovariances of this size.
    noise = pooled / np.sqrt(weights.sum())
    decay, shared = 0.0, 0.0
    if lag_one > _SEEN * noise and lag_two > _SEEN * noise:
        decay = float(np.clip(lag_two / lag_one, 0, 0.99))
        shared = float(np.clip(lag_one / decay, lag_one, pooled) / pooled)
    median = float(np.median(medians))
    pairs = zip(relative, cores, strict=True)
    slow = [steps[np.isnan(core) & (steps > 0)] for steps, core in pairs]
    share = sum(map(len, slow)) / sum(map(len, runs))
    if share > _MOST_OUTLIERS:
        raise ValueError(
            f"{share:.0%} of the measured steps are slow outliers, and up to {_MOST_OUTLIERS:.0%} "
            "can be stalls; give the steps of one state of the run, without its start, checkpoints "
            "and evaluation."
        )
    number = int(np.median([len(run) for run in runs]))
    levels = (np.arange(number) + 0.5) / number
    between = None
    if len(runs) > 1:
        inflated = shared * (1 + decay) / (1 - decay) + 1 - shared
        of_means = pooled * inflated / np.mean(weights)
        between = float(np.sqrt(max(np.var(medians, ddof=1) / median**2 - of_means, 0)))
    return Observed(
        median,
        median * (1 + np.median([_quantiles(steps, levels) for steps in relative], axis=0)),
        float(np.median([core_spread(run) for run in runs])),
        shared,
        median * np.concatenate(slow),
        between,
        len(runs),
        sum(map(len, runs)),
    )


def _quantiles(steps: Steps, levels: Float[np.ndarray, " levels"]) -> Float[np.ndarray, " levels"]:
    """As `np.quantile`, whose time is about the product of the numbers of levels and of steps."""
    return np.interp(levels * (len(steps) - 1), np.arange(len(steps)), np.sort(steps))


def check_runs(runs: Runs, where: str = "") -> None:
    """Raises a `ValueError` that begins with `where`, for fewer than 20 steps in all runs, a run of
    fewer than four steps, a step that is not a positive number, or a run whose steps are all equal.
    """
    if any(np.ndim(run) != 1 for run in runs):
        raise ValueError(
            f"{where}step times must be a list of runs, each an array of seconds; give `[steps]` "
            "for one run."
        )
    number = sum(map(len, runs))
    if number < 20 or min(map(len, runs), default=0) < 4:
        raise ValueError(
            f"{where}{plural(len(runs), 'run')} with {plural(number, 'step')} in all: too few to "
            "calibrate to; give at least 20 steps, and 4 of each run."
        )
    if not all(np.all((run > 0) & (run < _LATEST)) for run in runs):
        raise ValueError(
            f"{where}every measured step time must be a positive number of seconds below "
            f"{_LATEST:g}."
        )
    for place, run in enumerate(runs, 1):
        if np.median(np.abs(run - np.median(run))) == 0:
            raise ValueError(
                f"{where}half of the step times of run {place} are equal; give them as they were "
                "measured, without rounding."
            )


def core_spread(steps: Steps) -> float:
    """The relative standard deviation of the core: of the steps within five robust standard
    deviations of the median.
    """
    core = _core(steps - np.median(steps))
    return float(np.nanstd(core, ddof=1) / np.mean(steps[~np.isnan(core)]))


def upper_spread(steps: Steps) -> float:
    """The relative standard deviation of the normal law with this 90 % quantile over the median. It
    is that of the core where steps are normal, and larger where some are slower for a while, as at
    the start of a run.
    """
    median, high = np.quantile(steps, [0.5, 0.9])
    return float((high / median - 1) / ndtri(0.9))


def _core(deviations: Steps) -> Steps:
    """Deviations from the mean of the core, with `nan` for steps outside of it."""
    core = np.where(in_core(deviations), deviations, np.nan)
    return core - np.nanmean(core)


def _autocovariance(core: Steps, lag: int) -> float:
    products = core[lag:] * core[: len(core) - lag]
    return float(np.nanmean(products)) if np.any(~np.isnan(products)) else 0.0


@dataclasses.dataclass(frozen=True)
class StepLaw:
    """The law of the factor that all ops of a step share, relative to the median, with the names of
    parameters in files; see `Outlying`.

    **Attributes:**

    - `sigma`: the spread of the body.
    - `outlier_share`, `outlier_excess`, `outlier_sigma`: the parameters of outliers.
    """

    sigma: float
    outlier_share: float
    outlier_excess: float
    outlier_sigma: float

    def factors(self, number: int) -> Float[np.ndarray, " number"]:
        """`number` factors of mean one, evenly spaced in probability, in a fixed shuffled order."""
        slow = round(self.outlier_share * number)
        parts = [np.exp(self.sigma * _scores(number - slow))]
        parts.append(1 + self.outlier_excess * np.exp(self.outlier_sigma * _scores(slow)))
        factors = np.concatenate(parts)
        return np.random.default_rng(0).permutation(factors / factors.mean())

    def variation(self, source: str) -> Variation:
        """The law as it is written to a file."""
        return Variation("", "step", "lognormal-outliers", dataclasses.asdict(self), source)


def _scores(number: int) -> Float[np.ndarray, " number"]:
    return ndtri((np.arange(number) + 0.5) / max(number, 1))


def spread_of(observed: Observed, priors: Priors) -> float:
    """The spread of the core, shrunk in its logarithm towards that of other systems."""
    worth = priors.step_spread
    logs = np.log([observed.core, worth.value])
    return float(np.exp(np.average(logs, weights=[observed.num_steps, worth.observations])))


def law_of_steps(all_observed: Sequence[Observed], spread: float, priors: Priors) -> StepLaw:
    """The law of a step whose body has this spread, with outliers as in all runs and other systems.

    The share of outliers, and their excess relative to the step, are the same for all scales of a
    job: in MLPerf's families, neither depends on the number of GPUs.
    """
    number = sum(observed.num_steps for observed in all_observed)
    relative = [observed.excess / observed.median for observed in all_observed]
    logs = np.log(np.concatenate(relative))
    known, usual, width = priors.outlier_share, priors.outlier_excess, priors.outlier_spread

    def mean(prior: float, worth: float, total: float, number: int) -> float:
        """The mean of observations, with a prior that counts as some observations."""
        return (total + worth * prior) / (number + worth)

    share = mean(known.value, known.observations, len(logs), number)
    prior = float(np.log(usual.value * spread))
    centre = mean(prior, usual.observations, float(np.sum(logs)), len(logs))
    squares = float(np.sum((logs - centre) ** 2))
    variance = mean(width.value**2, width.observations, squares, len(logs))
    return StepLaw(spread, share, float(np.exp(centre)), float(np.sqrt(variance)))


def solve_spread(
    law: StepLaw,
    deviations: Sequence[Float[np.ndarray, " samples"]],
    wanted: Sequence[float],
    weights: Sequence[float],
) -> tuple[StepLaw, float]:
    """The law of a step with which the cores have the wanted spreads.

    **Arguments:**

    - `law`: the law, of which the outliers are used.
    - `deviations`: for each scale, the relative deviations from the median of steps that differ
        only by the noise of kernels.
    - `wanted`, `weights`: the wanted spread of the core at each scale, and its weight.

    **Returns:**

    The law with another spread of its body, and a factor for the noise of kernels. It is below one
    only if this noise alone is too wide; the body then has no spread.
    """
    goal = float(np.average(np.square(wanted), weights=weights))

    def is_narrow(sigma: float, less: float) -> bool:
        factors = dataclasses.replace(law, sigma=sigma).factors(len(deviations[0]))
        cores = [core_spread((1 + less * steps) * factors) ** 2 for steps in deviations]
        return float(np.average(cores, weights=weights)) <= goal

    sigma, less = 0.0, 1.0
    if is_narrow(0.0, 1.0):
        widest = float(np.sqrt(goal)) * _WIDER
        sigma = sum(bisect(lambda sigma: is_narrow(sigma, 1.0), 0.0, widest, _HALVINGS)) / 2
    else:
        less = sum(bisect(lambda less: is_narrow(0.0, less), 0.0, 1.0, _HALVINGS)) / 2
    return dataclasses.replace(law, sigma=sigma), less
