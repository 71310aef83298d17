"""Calibrating a job to the step times of runs, so that other scales can be predicted."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, cast

import msgspec
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._misc import quoted
from .._progress import progress_bar
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
from ._calibrated_job import with_laws, with_level_of, with_uncertainty, without_calibration
from ._collective_noise import noise_of_collectives, with_noise
from ._level import Level, Point, fit_level, with_level
from ._observe import Observed
from ._scale import Scale, Simulation, scale_of
from ._step_law import StepLaw, law_of_outliers, solve_spread, spread_of


Runs = Sequence[Float[np.ndarray, "_"]]


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
    """Calibrates what step times can tell of a job's kernels.

    - The level: `compute`, a factor on the means of compute kernels; `network`, one on what
        collectives do between nodes; `constant_s`, what each step takes besides; and `growth`, the
        exponent by which compute grows with the number of replicas. One scale tells the first
        alone: the rest is then what other systems have (`kernels/priors.toml`), as `uncertainty`
        says. Runs at other scales tell more of them.
    - `residual` of what replicas do together: what a step does not share with the next, as far as
        other systems have such noise. It grows with the part of a step that they take.
    - `step`: what happens to a step as a whole, relative to it: the spread of the core beyond the
        noise of kernels, and the slow outliers. Both lean on those of other systems, by more where
        runs are short. Where the core is narrower than the noise of kernels, that is made less.
    - GPUs are equal and the network has one regime: step times of a run cannot tell these from the
        level and the step. By how much runs differ is in `uncertainty`.

    How else a step changes with the scale follows from the program. An earlier calibration of the
    job is replaced.

    **Arguments:**

    - `job`: with a model and a cluster.
    - `runs`: measured step times of each run in seconds, in their order.
    - `source`: where they are from, for the file.
    - `key`: a `jax.random` key.
    - `others`: further jobs with their runs: the same software and machine at another scale or in
        another layout.
    - `num_samples`: steps simulated of each job, to see what its kernels' noise makes of the step.
    - `num_iterations`: how often.
    - `priors`: what is known of other systems; by default what is shipped.
    - `executor`: simulates jobs at the same time: any `concurrent.futures.Executor`.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A job that differs in `calibrated`, `kernels` and `measured`.

    **Raises:**

    `ValueError` for too few steps, a job without a model, or a median that the job cannot have.
    """
    scales = [
        scale_of(without_calibration(one, source), their) for one, their in [(job, runs), *others]
    ]
    priors, num_replicas = priors or load_priors(), job.layout.dp
    given = _Given(scales, num_replicas, priors, Simulation(key, num_samples, executor))
    calibration = _started(given)
    with progress_bar(num_iterations, progress, "calibration", "iteration") as advance:
        for _ in range(num_iterations):
            calibration = _improved(calibration, given)
            advance(1)
    observed = scales[0].observed
    kernels = scales[0].job.kernels
    assert kernels is not None
    laws = (calibration.law.variation(source), *_silent(source))
    job = with_laws(scales[0].job, (*laws, *calibration.laws_of(kernels)))
    job = with_level_of(job, calibration.level.values, num_replicas)
    job = with_uncertainty(job, _uncertainty(calibration.level, scales, priors))
    return msgspec.structs.replace(job, measured=_measured(observed, source))


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a calibration is made from. Levels are those of `num_replicas`."""

    scales: Sequence[Scale]
    num_replicas: int
    priors: Priors
    simulation: Simulation


@dataclasses.dataclass(frozen=True)
class _Calibration:
    """What is calibrated: the level, the law of a step, the noise of what replicas do together, and
    a factor on that of all kernels.
    """

    level: Level
    law: StepLaw
    noise: float | None
    less: float

    def laws_of(self, kernels: Kernels) -> tuple[Variation, ...]:
        """The noise of kernels, of those whose law changes."""
        laws = with_noise(kernels, self.noise)
        if self.less == 1:
            return laws
        known = replace_variations(kernels.variability, laws)
        return _narrower(msgspec.structs.replace(kernels, variability=known), self.less)


def _started(given: _Given) -> _Calibration:
    """The calibration before any steps of it are simulated."""
    scales, priors = given.scales, given.priors
    all_observed = [scale.observed for scale in scales]
    spread = float(np.mean([spread_of(observed, priors) for observed in all_observed]))
    law = law_of_outliers(all_observed, spread, priors)
    level = _level(given, np.ones(len(scales)))
    kernels = [with_level(scale.kernels, level.values, given.num_replicas) for scale in scales]
    noise = noise_of_collectives(scales, kernels, priors, given.simulation)
    return _Calibration(level, dataclasses.replace(law, sigma=spread), noise, 1.0)


def _improved(now: _Calibration, given: _Given) -> _Calibration:
    """The calibration that agrees with steps simulated by the one before."""
    scales = given.scales
    jobs = []
    for scale in scales:
        kernels = scale.kernels
        laws = replace_variations(kernels.variability, now.laws_of(kernels))
        kernels = msgspec.structs.replace(kernels, variability=laws)
        jobs.append((scale.job, with_level(kernels, now.level.values, given.num_replicas)))
    simulated, above = [], []
    for steps, scale, (_, kernels) in zip(
        given.simulation.steps_of(jobs), scales, jobs, strict=True
    ):
        median = np.median(steps * now.law.factors(len(steps)))
        above.append(median / scale.seconds(kernels))
        simulated.append(steps / np.median(steps) - 1)
    sigma, less = solve_spread(
        now.law,
        simulated,
        [spread_of(scale.observed, given.priors) for scale in scales],
        [scale.observed.num_steps for scale in scales],
    )
    law = dataclasses.replace(now.law, sigma=sigma)
    return _Calibration(_level(given, np.array(above)), law, now.noise, less * now.less)


def _level(given: _Given, above: Float[np.ndarray, " scales"]) -> Level:
    """The level at which medians agree, where a step's is so many times that of constant ops."""
    points = [
        Point(
            scale.seconds,
            scale.observed.median / factor,
            _noise(scale.observed, given.priors),
            quoted(scale.job.name or "the job"),
        )
        for scale, factor in zip(given.scales, above, strict=True)
    ]
    kernels = [scale.kernels for scale in given.scales]
    return fit_level(points, kernels, given.num_replicas, given.priors)


def _noise(observed: Observed, priors: Priors) -> float:
    """Of the logarithm of a median: of its few steps, of its few runs, and by what no level of
    several scales explains.
    """
    of_steps = 1.25 * observed.core / np.sqrt(observed.num_steps)
    of_runs = (observed.between or 0.0) / np.sqrt(observed.num_runs)
    return float(np.sqrt(of_steps**2 + of_runs**2 + priors.scale.deviation**2))


def _silent(source: str) -> tuple[Variation, ...]:
    """What the law of a step has in it already."""
    return tuple(Variation("", name, "constant", {}, source) for name in ("rank", "network"))


def _narrower(kernels: Kernels, less: float) -> tuple[Variation, ...]:
    """The noise of kernels, made less; other families than the log-normal stay as they are."""
    return tuple(
        msgspec.structs.replace(v, parameters={"sigma": less * v.parameters["sigma"]})
        for v in kernels.variability
        if v.component == "residual" and v.family == "lognormal"
    )


def _uncertainty(level: Level, scales: Sequence[Scale], priors: Priors) -> Uncertainty:
    between = max(scale.observed.between or 0.0 for scale in scales)
    number = sum(scale.observed.num_steps for scale in scales)
    spread = np.hypot(priors.spread_elsewhere.deviation, np.sqrt(0.5 / number))
    rows = tuple(tuple(float(x) for x in row) for row in level.covariance)
    return Uncertainty(
        covariance=cast(Any, rows),
        prior=level.prior,
        level=float(np.hypot(priors.scale.deviation, between)),
        spread=float(spread),
    )


def _measured(observed: Observed, source: str) -> Measured:
    steps = observed.steps
    return Measured(
        source=source,
        mean_s=float(np.mean(steps)),
        std_s=float(np.std(steps, ddof=1)),
        p50_s=observed.median,
        p95_s=float(np.quantile(steps, 0.95)),
        num_samples=observed.num_steps,
    )
