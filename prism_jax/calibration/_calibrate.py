"""Calibrates a job to the step times of runs, so that its step can be predicted at other scales."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, cast

import msgspec
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._interrupt import progress_bar
from .._misc import quoted
from ..data import (
    Job,
    Kernels,
    Measured,
    Priors,
    Uncertainty,
    Variation,
    load_priors,
    replace_variations,
)
from ..prediction import class_of, with_level
from ._most_likely import Level, Point, fit_level, noise_of_collectives, with_noise
from ._observe import Runs, StepLaw, law_of_outliers, solve_spread, spread_of
from ._scale import Scale, Simulation, scale_of, with_calibrated, with_laws, without_calibration


def calibrate(
    job: Job,
    runs: Runs,
    *,
    source: str,
    key: PRNGKeyArray,
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
    - `runs`: the measured step times of each run, in seconds, in the order of the steps.
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
    scales = [scale_of(without_calibration(one, source), their) for one, their in pairs]
    simulation = Simulation(key, num_samples, executor)
    given = _Given(scales, num_replicas, priors or load_priors(), simulation)
    calibration = _started(given)
    with progress_bar(num_iterations, progress, "calibration", "iteration") as advance:
        for _ in range(num_iterations):
            calibration = _improved(calibration, given)
            advance(1)
    first = scales[0]
    plain, level = first.job.calibrated, calibration.level
    assert plain is not None
    # The components that are already part of the law of a step do not vary.
    silent = [Variation("", name, "constant", {}, source) for name in ("rank", "network")]
    laws = (calibration.law.variation(source), *silent, *calibration.laws_of(first.kernels))
    changes = msgspec.structs.replace(
        with_level(plain, level.values, num_replicas),
        variability=replace_variations(plain.variability, laws),
        uncertainty=_uncertainty(level, given, class_of(job)),
    )
    steps = first.observed.steps
    measured = Measured(
        source=source,
        mean_s=float(np.mean(steps)),
        std_s=float(np.std(steps, ddof=1)),
        p50_s=first.observed.median,
        p95_s=float(np.quantile(steps, 0.95)),
        num_samples=first.observed.num_steps,
    )
    return msgspec.structs.replace(with_calibrated(first.job, changes), measured=measured)


@dataclasses.dataclass(frozen=True)
class _Given:
    """The inputs of a calibration. Its level is that of jobs with `num_replicas` replicas."""

    scales: Sequence[Scale]
    num_replicas: int
    priors: Priors
    simulation: Simulation


@dataclasses.dataclass(frozen=True)
class _Calibration:
    """A calibration: the level, the law of a step, the noise of collectives over replicas, and a
    factor on the noise of all kernels.
    """

    level: Level
    law: StepLaw
    noise: float | None
    less: float

    def laws_of(self, kernels: Kernels) -> tuple[Variation, ...]:
        """The new laws of the noise of those kernels for which it changes."""
        laws = with_noise(kernels, self.noise)
        if self.less == 1:
            return laws
        # Laws of other families than the log-normal do not change.
        return tuple(
            msgspec.structs.replace(v, parameters={"sigma": self.less * v.parameters["sigma"]})
            for v in with_laws(kernels, laws).variability
            if v.component == "residual" and v.family == "lognormal"
        )


def _started(given: _Given) -> _Calibration:
    """The first calibration, before any steps are simulated."""
    scales, priors = given.scales, given.priors
    all_observed = [scale.observed for scale in scales]
    spread = float(np.mean([spread_of(observed, priors) for observed in all_observed]))
    law = law_of_outliers(all_observed, spread, priors)
    level = _level(given, np.ones(len(scales)))
    kernels = [with_level(scale.kernels, level.values, given.num_replicas) for scale in scales]
    noise = noise_of_collectives(scales, kernels, priors, given.simulation)
    return _Calibration(level, dataclasses.replace(law, sigma=spread), noise, 1.0)


def _improved(now: _Calibration, given: _Given) -> _Calibration:
    """A better calibration, from steps simulated with the one before."""
    jobs, above = [], []
    for scale in given.scales:
        kernels = with_laws(scale.kernels, now.laws_of(scale.kernels))
        jobs.append((scale.job, with_level(kernels, now.level.values, given.num_replicas)))
    simulated = given.simulation.steps_of(jobs)
    for steps, scale, (_, kernels) in zip(simulated, given.scales, jobs, strict=True):
        median = np.median(steps * now.law.factors(len(steps)))
        above.append(median / scale.seconds(kernels))
    deviations = [steps / np.median(steps) - 1 for steps in simulated]
    wanted = [spread_of(scale.observed, given.priors) for scale in given.scales]
    weights = [scale.observed.num_steps for scale in given.scales]
    sigma, less = solve_spread(now.law, deviations, wanted, weights)
    law = dataclasses.replace(now.law, sigma=sigma)
    return _Calibration(_level(given, np.array(above)), law, now.noise, less * now.less)


def _level(given: _Given, above: Float[np.ndarray, " scales"]) -> Level:
    """The level at which medians agree. `above` is the median over the step without variability."""
    points = []
    for scale, factor in zip(given.scales, above, strict=True):
        observed, name = scale.observed, quoted(scale.job.name or "the job")
        # The standard error of the logarithm of a median: from its few steps, from its few runs,
        # and from differences between scales that no level explains.
        of_steps = 1.25 * observed.core / np.sqrt(observed.num_steps)
        of_runs = (observed.between or 0.0) / np.sqrt(observed.num_runs)
        noise = float(np.sqrt(of_steps**2 + of_runs**2 + given.priors.scale.deviation**2))
        points.append(Point(scale.seconds, observed.median / factor, noise, name))
    kernels = [scale.kernels for scale in given.scales]
    return fit_level(points, kernels, given.num_replicas, given.priors)


def _uncertainty(level: Level, given: _Given, of: tuple[str, ...]) -> Uncertainty:
    between = max(scale.observed.between or 0.0 for scale in given.scales)
    number = sum(scale.observed.num_steps for scale in given.scales)
    spread = np.hypot(given.priors.spread_elsewhere.deviation, np.sqrt(0.5 / number))
    return Uncertainty(
        covariance=cast(Any, tuple(map(tuple, level.covariance.tolist()))),
        prior=level.prior,
        level=float(np.hypot(given.priors.scale.deviation, between)),
        spread=float(spread),
        num_steps=number,
        of=of,
    )
