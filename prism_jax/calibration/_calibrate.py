"""Calibrates a job to the step times of runs, so that its step can be predicted at other scales:
finds its level (the factors on its kernels' latencies, and the added constant) and its spread.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, cast

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import quoted
from .._progress import progress_bar
from ..data import (
    LEVEL,
    Job,
    Priors,
    Uncertainty,
    Variation,
    load_priors,
    replace_variations,
)
from ..prediction import LEVEL_STEPS, class_of, slopes_of_level, with_level
from ._observe import Runs, StepLaw, law_of_steps, solve_spread, spread_of
from ._scale import (
    Problem,
    noise_of_collectives,
    scale_of,
    with_calibrated,
    with_laws,
    with_noise,
    without_calibration,
)


# A larger factor on compute means a mistake in the job or in the unit.
_FURTHEST = 10.0
_ITERATIONS = 12
# Steps determine a parameter if they reduce its uncertainty below this share of the prior's.
_TOLD = 0.7


def calibrate(
    job: Job,
    runs: Runs,
    *,
    source: str,
    key: "jax.Array",
    others: Sequence[tuple[Job, Runs]] = (),
    num_samples: int = 8192,
    num_iterations: int = 2,
    priors: Priors | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Job:
    """Calibrates the kernels of a job to measured step times.

    - The level has four parameters: `compute`, a factor on the mean latency of compute kernels;
        `network`, a factor on the parts of collectives between nodes; `constant_s`, the time that
        each step takes besides its kernels; and `growth`, the exponent by which compute grows with
        the number of replicas. Runs at one scale determine only the first. The others then have
        the values of other systems (`kernels/priors.toml`), as `uncertainty` says. Runs at other
        scales determine more of them.
    - `residual` of the collectives between replicas: the variation that a step does not share with
        the next, as far as the prior for this noise allows. Its effect on a step grows with the
        share of the step that these collectives take.
    - `step`, relative to the step time: the spread of the core of the steps beyond the noise of
        kernels, and the slow outliers. Both are shrunk towards those of other systems, more so if
        runs are short. If the core is narrower than the noise of kernels, this noise is reduced.
    - All GPUs become equal, and the network gets one regime: the step times of a run cannot
        separate these from the level and the factor of a step. How much runs differ is in
        `uncertainty`.

    All other changes of a step with the scale follow from the program. An earlier calibration of
    the job is replaced.

    **Arguments:**

    - `job`: a job with a model and a cluster.
    - `runs`: the measured step times of each run, in seconds, in the order of the steps; or a data
        frame with columns `step_time_s` and perhaps `run` and `step`.
    - `source`: where the step times are from; it is written to the job file.
    - `key`: a `jax.random` key.
    - `others`: further jobs with their runs, on the same software and machine, at another scale or
        in another layout.
    - `num_samples`: how many steps to simulate of each job, to find how the noise of kernels
        affects the step.
    - `num_iterations`: how often to simulate and adjust the calibration.
    - `priors`: what is known of other systems; by default the shipped priors.
    - `executor`: simulates several jobs in parallel: any `concurrent.futures.Executor`.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    The job with new `calibrated`, `kernels` and `measured`.

    **Raises:**

    `ValueError` for too few steps, for a job without a model, or for a median that the job cannot
    reach.
    """
    pairs, num_replicas = [(job, runs), *others], job.layout.dp
    scales = [
        scale_of(without_calibration(at_scale, source), its_runs) for at_scale, its_runs in pairs
    ]
    problem = Problem(scales, num_replicas, priors or load_priors(), key, num_samples, executor)
    calibration = _started(problem)
    with progress_bar(num_iterations, progress, "calibration", "iteration") as advance:
        for _ in range(num_iterations):
            calibration = _improved(calibration, problem)
            advance(1)
    first = scales[0]
    plain, level = first.job.calibrated, calibration.level
    assert plain is not None
    # The components that are already part of the law of a step do not vary.
    silent = [Variation("", name, "constant", {}, source) for name in ("rank", "network")]
    noise = with_noise(first.kernels, calibration.noise, calibration.less)
    laws = (calibration.law.variation(source), *silent, *noise)
    changes = msgspec.structs.replace(
        with_level(plain, level.values, num_replicas),
        variability=replace_variations(plain.variability, laws),
        uncertainty=_uncertainty(calibration, problem, class_of(job)),
    )
    calibrated = with_calibrated(first.job, changes)
    return msgspec.structs.replace(calibrated, measured=first.observed.measured(source))


@dataclasses.dataclass(frozen=True)
class Level:
    """The parameters of the level, and their uncertainty.

    **Attributes:**

    - `values`: the logarithms of the factors on compute and on communication between nodes, the
        constant of a step in seconds, and the exponent of the replicas.
    - `covariance`: the covariance of these parameters.
    - `prior`: the names of those that the steps hardly determine.
    """

    values: Float[np.ndarray, "4"]
    covariance: Float[np.ndarray, "4 4"]
    prior: tuple[str, ...]


def fit_level(
    problem: Problem, medians: Float[np.ndarray, " scales"], noise: Float[np.ndarray, " scales"]
) -> Level:
    """The most likely level, by Gauss-Newton steps. Compute has no prior; the other parameters have
    priors from other systems.

    **Arguments:**

    - `medians`: what the step of each job without variability should be, in seconds.
    - `noise`: the standard errors of their logarithms.

    **Raises:**

    `ValueError` if no factor on compute of up to ten explains a median.
    """
    priors, shortest = problem.priors, float(np.min(medians))
    largest = priors.constant_share.value * shortest
    with_prior = (priors.network, priors.constant_s, priors.growth)
    mean = np.array([0.0, *(prior.mean for prior in with_prior)])
    deviation = np.array([np.inf, *(prior.deviation for prior in with_prior)])
    mean[2], deviation[2] = min(mean[2], largest), min(deviation[2], largest)
    wanted = np.log(medians)
    apart = LEVEL_STEPS * np.array([1, 1, shortest, 1])

    def logs(values: Float[np.ndarray, "4"]) -> Float[np.ndarray, " scales"]:
        pairs = zip(problem.scales, problem.kernels_at(values), strict=True)
        return np.log([scale.seconds(kernels) for scale, kernels in pairs])

    values, precision = mean, np.diag([0, *deviation[1:] ** -2.0])
    first = predicted = logs(values)
    information = precision
    for _ in range(_ITERATIONS):
        slope = slopes_of_level(logs, values, predicted, apart)
        information = slope.T @ (slope / noise[:, None] ** 2) + precision
        gradient = slope.T @ ((predicted - wanted) / noise**2) + precision @ (values - mean)
        step = -np.linalg.solve(information, gradient)
        # Far from the solution the logarithm is not linear, so a step is at most a factor of e.
        values = values + step / max(1.0, float(np.max(np.abs(step[:2]))))
        if abs(values[0]) > np.log(_FURTHEST):
            far = int(np.argmax(np.abs(wanted - first)))
            name = quoted(problem.scales[far].job.name or "the job")
            raise ValueError(
                f"{name}: the measured median of {medians[far]:.4g} s is too far from the job's "
                f"{np.exp(first[far]):.4g} s: no factor of up to {_FURTHEST:g} on compute explains "
                "it; check the unit of the step times, and the job."
            )
        predicted = logs(values)
        if np.max(np.abs(step)) < 1e-5:
            break
    values[2] = max(values[2], 0.0)
    covariance = np.linalg.inv(information)
    is_certain = np.sqrt(np.diag(covariance))[1:] < _TOLD * deviation[1:]
    names = (name for name, told in zip(LEVEL[1:], is_certain, strict=True) if not told)
    return Level(values, covariance, tuple(names))


@dataclasses.dataclass(frozen=True)
class _Calibration:
    """A calibration: the level, and how much longer than a step without variability the median of
    the first job's steps was taken to be for it, as a share; the law of a step, the noise of
    collectives over replicas, and a factor on the noise of all kernels.
    """

    level: Level
    variability: float
    law: StepLaw
    noise: float | None
    less: float


def _started(problem: Problem) -> _Calibration:
    """The first calibration, before any steps are simulated."""
    scales, priors = problem.scales, problem.priors
    observed = [scale.observed for scale in scales]
    spread = float(np.mean([spread_of(of_scale, priors) for of_scale in observed]))
    level = _level(problem, np.ones(len(scales)))
    noise = noise_of_collectives(problem, problem.kernels_at(level.values))
    return _Calibration(level, 0.0, law_of_steps(observed, spread, priors), noise, 1.0)


def _improved(now: _Calibration, problem: Problem) -> _Calibration:
    """A better calibration, from steps simulated with the one before."""
    jobs, above = [], []
    for scale, kernels in zip(problem.scales, problem.kernels_at(now.level.values), strict=True):
        noise = with_noise(kernels, now.noise, now.less)
        jobs.append((scale.job, with_laws(kernels, noise)))
    simulated = problem.steps_of(jobs)
    for steps, scale, (_, kernels) in zip(simulated, problem.scales, jobs, strict=True):
        median = np.median(steps * now.law.factors(len(steps)))
        above.append(median / scale.seconds(kernels))
    deviations = [steps / np.median(steps) - 1 for steps in simulated]
    wanted = [spread_of(scale.observed, problem.priors) for scale in problem.scales]
    weights = [scale.observed.num_steps for scale in problem.scales]
    law, less = solve_spread(now.law, deviations, wanted, weights)
    level = _level(problem, np.array(above))
    return _Calibration(level, float(above[0] - 1), law, now.noise, less * now.less)


def _level(problem: Problem, above: Float[np.ndarray, " scales"]) -> Level:
    """The level at which medians agree. `above` is the median over the step without variability."""
    observed, noise = [scale.observed for scale in problem.scales], []
    for of_scale in observed:
        # The standard error of the logarithm of a median: from its few steps, from its few runs,
        # and from differences between scales that no level explains.
        of_steps = 1.25 * of_scale.core / np.sqrt(of_scale.num_steps)
        of_runs = (of_scale.between or 0.0) / np.sqrt(of_scale.num_runs)
        noise.append(np.sqrt(of_steps**2 + of_runs**2 + problem.priors.scale.deviation**2))
    medians = np.array([of_scale.median for of_scale in observed]) / above
    return fit_level(problem, medians, np.array(noise))


def _uncertainty(calibration: _Calibration, problem: Problem, of: tuple[str, ...]) -> Uncertainty:
    level = calibration.level
    between = max(scale.observed.between or 0.0 for scale in problem.scales)
    number = sum(scale.observed.num_steps for scale in problem.scales)
    spread = np.hypot(problem.priors.spread_elsewhere.deviation, np.sqrt(0.5 / number))
    return Uncertainty(
        covariance=cast(Any, tuple(map(tuple, level.covariance.tolist()))),
        prior=level.prior,
        level=float(np.hypot(problem.priors.scale.deviation, between)),
        spread=float(spread),
        variability=calibration.variability,
        num_steps=number,
        of=of,
    )
