"""The law of a step of a future run, including the uncertainty of the calibration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

from .._summary import Shown
from ..data import Job, Priors, load_priors
from ..law import QUANTILES, Law
from ..lowering import job_parts
from ..prediction import ExpectedError, expected_error, levels_of_law
from ..workload import has_experts
from ._observe import StepLaw, upper_spread


# Equally likely points: of the steps of a run, of its level, of its spread.
STEP_LEVELS, _LEVELS, _SPREADS = ((np.arange(n) + 0.5) / n for n in (500, 51, 15))
# The number of systems that are drawn for a job without calibration.
_SYSTEMS = 128
# The largest share of outliers, which is above that of any measured system.
_MOST_OUTLIERS = 0.2


@dataclasses.dataclass(frozen=True, repr=False)
class Epistemic(Shown):
    """Laws of the steps of possible runs, each a level times a shape. All levels are equally
    likely, and so are all shapes.

    **Attributes:**

    - `error`: the expected error of the job's prediction.
    - `spread`: the standard deviation of the logarithm of the spread of a run's steps.
    - `levels`: medians of runs, in seconds.
    - `shapes`: quantiles of the steps over their median, at the same levels in each row.
    """

    error: ExpectedError
    spread: float
    levels: Float[np.ndarray, " levels"]
    shapes: Float[np.ndarray, "shapes steps"]

    @property
    def steps(self) -> Float[np.ndarray, "runs steps"]:
        """The quantiles of the steps of all runs, in seconds."""
        return (self.levels[:, None, None] * self.shapes).reshape(-1, self.shapes.shape[1])

    def quantile(self, q: float) -> float:
        """The quantile at `q` of a step of any run."""
        return float(np.quantile(self.steps, q))

    def intervals(
        self, quantiles: Mapping[str, float] = QUANTILES, level: float = 0.9
    ) -> dict[str, tuple[float, float]]:
        """The intervals in which figures of a run lie with probability `level`, in seconds.

        **Arguments:**

        - `quantiles`: quantiles of a run's steps, by name. Those further in a tail than the shapes
            reach have no interval.
        - `level`: the probability.

        **Returns:**

        The intervals of `mean`, of `std` and of the quantiles.
        """
        far = 1 / self.shapes.shape[1]
        figures = {"mean": self.shapes.mean(axis=1), "std": self.shapes.std(axis=1)} | {
            name: np.quantile(self.shapes, q, axis=1)
            for name, q in quantiles.items()
            if far <= q <= 1 - far
        }
        ends = ((1 - level) / 2, (1 + level) / 2)
        return {
            name: (float(low), float(high))
            for name, figure in figures.items()
            for low, high in [np.quantile(np.outer(self.levels, figure), ends)]
        }

    def to_json(self) -> dict[str, Any]:
        intervals = self.intervals()
        return {
            "level_std": self.error.std,
            "spread_std": self.spread,
            **{name: self.quantile(q) for name, q in QUANTILES.items()},
            "p50_interval_90": list(intervals["p50"]),
            "p95_interval_90": list(intervals["p95"]),
            "quantiles": [[i / 200, self.quantile(i / 200)] for i in range(1, 200)],
        }

    def headline(self) -> str:
        return (
            f"with the uncertainty of the model (--epistemic): 90 % of steps take "
            f"{self.quantile(0.05):.5g} .. {self.quantile(0.95):.5g} s; the p50 of a run has a "
            f"standard deviation of {100 * self.error.std:.2g} %"
        )


def epistemic(job: Job, law: Law) -> Epistemic:
    """The law of a job's step, including the uncertainty of its calibration. For a job that is not
    calibrated, the level has the errors of published predictions of its class, with their bias;
    each is of another run, so that differences between runs are part of them. Steps vary around it
    by as much more or less than the law as in other systems.

    The spread is log-normal, and so is the level of a calibrated job: its variance is propagated
    linearly from the covariance of the calibration, by the derivatives of this job's step; the
    variance between runs and scales is added. Other levels are those of [`expected_error`][].

    **Arguments:**

    - `job`: a job with a model and a cluster.
    - `law`: the law of its step, from `simulate`.

    **Raises:**

    `ValueError` for a job without a model.
    """
    return possible_runs(job, np.asarray(law.quantile(STEP_LEVELS)), float(law.quantile(0.5)))


def possible_runs(job: Job, steps: Float[np.ndarray, " steps"], median: float) -> Epistemic:
    """As `epistemic`, from the quantiles of a step at `STEP_LEVELS`, and its median."""
    error, priors = expected_error(job), load_priors()
    uncertainty = None if job.calibrated is None else job.calibrated.uncertainty
    if uncertainty is None:
        spread = priors.system_spread.deviation
        laws = laws_of_systems(priors, upper_spread(steps), _SYSTEMS)
        factors = np.stack([law.factors(len(steps)) for law in laws])
        shapes = factors / np.median(factors, axis=1, keepdims=True)
    else:
        spread = uncertainty.spread
        relative = steps / median - 1
        shapes = 1 + np.exp(spread * ndtri(_SPREADS))[:, None] * relative
    levels = median * levels_of_law(error, _LEVELS)
    return Epistemic(error, spread, levels, shapes)


def level_of_runs(job: Job) -> tuple[float, float]:
    """By how much runs of one system differ, and by how much a run gets faster in its first hour.

    **Arguments:**

    - `job`: a job with a model. For one that is calibrated, the first figure is its own.

    **Returns:**

    The standard deviation of the logarithm of a run's median, and the share that a step takes
    longer at the start of a run than later; below zero if it gets slower. Both are those of systems
    whose models have experts, or do not, in MLPerf Training (`kernels/priors.toml`).

    **Raises:**

    `ValueError` if the job has no model.
    """
    priors, model = load_priors(), job_parts(job).model
    level, drift = priors.level, priors.drift
    if has_experts(model):
        level, drift = priors.level_experts, priors.drift_experts
    uncertainty = None if job.calibrated is None else job.calibrated.uncertainty
    return level.deviation if uncertainty is None else uncertainty.level, float(
        np.expm1(drift.mean)
    )


def laws_of_systems(priors: Priors, usual: float, number: int) -> list[StepLaw]:
    """The laws of steps of `number` systems, drawn with a constant key.

    Spreads are log-normal around `usual`, the `upper_spread` of steps that is predicted for the
    system. Shares of outliers are log-normal too. The excess of an outlier is relative to the
    spread, and smaller if outliers are frequent. Because the parameters come from few systems,
    draws follow Student's law.
    """
    rng = np.random.default_rng(0)
    of, excess = priors.system_spread, priors.system_excess
    spreads = usual * np.exp(_drawn(of.deviation, of.number, rng, number))
    known = priors.system_shares
    shares = known.mean + _drawn(known.deviation, known.number, rng, number)
    logs = excess.mean + excess.slope * (shares - known.mean)
    logs = logs + excess.deviation * rng.standard_normal(number)
    columns = (spreads, np.minimum(np.exp(shares), _MOST_OUTLIERS), spreads * np.exp(logs))
    width = priors.outlier_spread.value
    return [
        StepLaw(float(spread), float(share), float(excess), width)
        for spread, share, excess in zip(*columns, strict=True)
    ]


def _drawn(
    deviation: float, systems: int, rng: np.random.Generator, number: int
) -> Float[np.ndarray, " number"]:
    """How far further systems are from the mean, if it and the deviation were estimated."""
    return deviation * np.sqrt(1 + 1 / systems) * rng.standard_t(systems - 1, number)
