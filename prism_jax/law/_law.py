"""The law of the step time: what `simulate` returns."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._estimate import Estimate
from .._misc import plural, quoted, whole_number
from .._summary import Column, Shown, Table, picked_attributes
from ..random import key_data
from ._compared import AbstractCompared
from ._errors import FEWEST, Errors, more_steps
from ._histogram import Histogram


# The quantiles that tables show, by name.
QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}

# Noise is of no interest if it is a tenth of what the model may be off by.
_LITTLE = 0.1
# The steps of a run whose mean is compared between sets of GPUs.
_RUN_STEPS = 10_000


@dataclasses.dataclass(frozen=True)
class Allocations:
    """The step times on several sets of GPUs, each of which was kept for equally many steps.

    **Attributes:**

    - `means`: the mean step time on each set, in seconds.
    - `std`: the standard deviation of the step time on a given set, in seconds.
    """

    means: tuple[float, ...]
    std: float

    def run_mean_std(self, num_independent: float, steps_each: float) -> float:
        """The standard deviation of the mean over the steps of a run, in seconds.

        With an integrated autocorrelation time of `t` steps, the mean over `n` steps has the
        variance of a mean over `n / t` independent steps. Source: Goodman and Weare, "Ensemble
        samplers with affine invariance" (2010); Sokal, "Monte Carlo methods in statistical
        mechanics" (1997), whose autocorrelation time is half of this one.

        **Arguments:**

        - `num_independent`: how many independent steps the run is worth. Less than one counts as
            one, because no mean varies more than a single step.
        - `steps_each`: how many independent steps each of `means` is over. Their noise makes
            `means` vary more than the sets of GPUs differ.
        """
        within = self.std**2
        between = np.var(self.means, ddof=1) - within / steps_each
        return float(np.sqrt(max(between, 0.0) + within / max(num_independent, 1.0)))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Law(Shown, AbstractCompared):
    """The law of the step time, in seconds.

    **Attributes:**

    - `requested`: how many steps were asked for; more than `num_samples` if the run was
        interrupted.
    - `mean`, `std`: the mean and the standard deviation of the step time (float64).
    - `histogram`: a [`Histogram`][] of the steps, from which `quantile` and `cdf` are computed.
    - `errors`: the [`Errors`][] from which confidence intervals are computed.
    - `allocations`: the [`Allocations`][], if `simulate` was called with `allocations`; else
        `None`.
    - `sampling`: how replica samples were drawn; see `simulate`.
    - `effective_samples`: the effective sample size of the replica samples, that is, how many
        samples of equal weight are worth as much.
    - `program`: a digest of the program that was simulated. Laws of the same program can be merged.
    - `keys`: the keys that were used.
    - `compile_s`, `run_s`: the wall time of preparing and compiling, and of the run without these,
        in seconds.

    Two laws are equal if all their fields except the wall times are equal. A law has no derivative;
    use [`estimate`][] for derivatives.
    """

    requested: int
    mean: float
    std: float
    histogram: Histogram
    errors: Errors
    effective_samples: float
    program: str
    keys: tuple[tuple[int, int], ...]
    compile_s: float = dataclasses.field(compare=False)
    run_s: float = dataclasses.field(compare=False)
    sampling: str = "plain"
    allocations: Allocations | None = None

    def __hash__(self) -> int:
        return hash((self.program, self.keys, self.num_samples))

    def summary(self, quantiles: Mapping[str, float] = QUANTILES) -> Table:
        """A row for each figure, with the interval of the simulation's noise."""
        return law_table(self, quantiles)

    def to_json(self, quantiles: Mapping[str, float] = QUANTILES) -> dict[str, Any]:
        """Its figures with their intervals, its quantiles, and how it was simulated."""
        step_time, unknown = {}, {}
        for name, (value, interval) in figures(self, quantiles=quantiles).items():
            known = interval[0] == interval[0]
            step_time |= {name: value, f"{name}_interval": list(interval) if known else None}
            if not known:
                unknown[name] = self.why_unknown(quantiles.get(name))
        step_time["confidence_level"] = 0.95
        step_time["quantiles"] = [[i / 200, self.quantile(i / 200)] for i in range(1, 200)]
        names = (
            "num_samples",
            "sampling",
            "effective_samples",
            "compile_s",
            "run_s",
            "samples_per_s",
        )
        result = {"step_time_s": step_time, **picked_attributes(self, *names)}
        result["requested_samples"] = self.requested
        if self.allocations is not None and len(self.allocations.means) > 1:
            result["allocations"] = {
                "means_s": list(self.allocations.means),
                "std_within_s": self.allocations.std,
                "run_steps": _RUN_STEPS,
                "run_mean_std_s": self.run_mean_std(_RUN_STEPS),
            }
        return result | ({"unknown_because": unknown} if unknown else {})

    def headline(self) -> str:
        """How far sets of GPUs differ, if there are several; and how many steps took how long."""
        how = (
            f"{plural(self.num_samples, 'step')} ({self.sampling} sampling); set-up "
            f"{self.compile_s:.1f} s, simulation {self.run_s:.1f} s "
            f"({self.samples_per_s:,.0f} steps/s)"
        )
        return "\n".join([*self.about_allocations(), how])

    def about_allocations(self) -> list[str]:
        """A sentence about how much sets of GPUs differ, if there are several."""
        allocations = self.allocations
        if allocations is None or len(allocations.means) < 2:
            return []
        return [
            f"{len(allocations.means)} sets of GPUs: on one set, the standard deviation of steps "
            f"is {allocations.std:.3g} s; between sets, that of the mean of {_RUN_STEPS:,} "
            f"independent steps is {self.run_mean_std(_RUN_STEPS):.3g} s"
        ]

    @property
    def num_samples(self) -> int:
        """How many steps were simulated."""
        return self.histogram.num_samples

    @property
    def samples_per_s(self) -> float:
        """How many steps a second of the run simulated."""
        return self.num_samples / max(self.run_s, 1e-9)

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped (Ctrl-C) before all of its steps were simulated."""
        return self.num_samples < self.requested

    def run_mean_std(self, num_steps: int, *, autocorrelation_time: float = 1.0) -> float:
        """The standard deviation, over runs, of the mean step time of a run, in seconds. Each run
        has GPUs of its own and keeps them for all of its steps; see `allocations` of `simulate`.

        Simulated steps on the same GPUs are independent. Steps of real runs are autocorrelated, so
        their mean varies more; give their `autocorrelation_time`.

        **Arguments:**

        - `num_steps`: the number of steps in a run.
        - `autocorrelation_time`: the integrated autocorrelation time of steps on the same GPUs, in
            steps: one plus twice the sum of their autocorrelations at all positive lags. It is
            `(1 + r) / (1 - r)` if these are `r^lag`, and one for independent steps.

        **Raises:**

        `ValueError` if the law was simulated without at least two `allocations`, or if the number
        of steps or the autocorrelation time is below one.
        """
        if not num_steps >= 1:
            raise ValueError(f"A run of `num_steps={num_steps}` must have at least 1 step.")
        if not 1 <= autocorrelation_time < math.inf:
            raise ValueError(
                f"`autocorrelation_time={autocorrelation_time}` must be finite and at least 1; "
                "give 1 for independent steps."
            )
        if self.allocations is None or len(self.allocations.means) < 2:
            raise ValueError(
                "The law does not tell allocations of GPUs apart; simulate with `allocations=` of "
                "at least 2."
            )
        steps_each = self.num_samples / len(self.allocations.means)
        independent = num_steps / autocorrelation_time
        return self.allocations.run_mean_std(independent, steps_each)

    def quantile(self, q: float | np.ndarray) -> float | np.ndarray:
        """The quantile at `q` in [0, 1], in seconds.

        That of the simulated steps: exact if they are no more than 2^17, else too low by less than
        4 millionths.
        """
        levels = _numbers(q, "The quantile `q={}` must be a number, such as 0.95 for p95.")
        if np.any(~((levels >= 0) & (levels <= 1))):
            raise ValueError(f"The quantile `q={quoted(q)}` must lie in [0, 1].")
        result = self.histogram.quantile(levels)
        return float(result) if result.ndim == 0 else result

    def cdf(self, t: float | np.ndarray) -> float | np.ndarray:
        """The probability that a step takes at most `t` seconds: a float, or an array of any shape.

        **Raises:**

        `ValueError` if `t` is `nan`.
        """
        must = "The step time `t={}` must be a number of seconds, not `nan`."
        times = _numbers(t, must)
        if np.any(np.isnan(times)):
            raise ValueError(must.format(quoted(t)))
        result = self.histogram.cdf(times)
        return float(result) if result.ndim == 0 else result

    def sample(self, n: int, key: "jax.Array") -> np.ndarray:
        """Draws step times independently: quantiles at uniform levels. They have no derivative.

        **Arguments:**

        - `n`: how many step times to draw.
        - `key`: a `jax.random` key. The same key gives the same step times.

        **Returns:**

        The times, `(n,)`, in seconds.

        **Raises:**

        `ValueError` if `n` is not a whole number of at least 1, or `key` is not a key.
        """
        whole_number(n, "n", most=2**32 - 1)
        words = np.asarray(key_data(key)).tolist()
        return self.histogram.quantile(np.random.default_rng(words).random(n))

    def exceedance(self, t: float | np.ndarray) -> float | np.ndarray:
        """The probability that a step takes longer than `t` seconds; `t` as in `cdf`."""
        return 1 - self.cdf(t)

    def mean_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the mean, in seconds. Both ends are `nan` if its error is not
        known, because fewer than 20 independent replica samples (or two allocations) are behind it.
        """
        errors = self.errors
        # Means of a few allocations are nearly normal, so Student's t holds.
        error = errors.mean if errors.known or self.allocations else float("nan")
        return Estimate(self.mean, error, errors.mean_degrees, errors.mean_skewness).interval(level)

    def std_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the standard deviation, in seconds. Both ends are `nan` if its
        error is not known, because fewer than 20 independent replica samples (or allocations) are
        behind it.
        """
        errors = self.errors
        error = errors.std if errors.known else float("nan")
        estimate = Estimate(self.std, error, errors.std_degrees, errors.std_skewness)
        low, high = estimate.interval(level)
        return float(np.maximum(low, 0.0)), high

    def quantile_interval(self, q: float, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the quantile at `q`, in seconds, by Woodruff's method: it
        inverts the confidence interval of the distribution function.

        **Returns:**

        The lower and the upper end. Both are `nan` if the error of the quantile is not known,
        because fewer than 20 independent replica samples lie beyond it. Of `K` allocations, `K q`
        or `K (1 - q)` count as beyond it, whichever are fewer.
        """
        return _quantile_intervals(self, [q], level)[0]

    def why_unknown(self, q: float | None = None) -> str | None:
        """Why the interval of the quantile at `q` is `nan` or, without `q`, why that of the mean or
        of the standard deviation is. `None` if the interval is known.
        """
        interval = self.std_interval() if q is None else self.quantile_interval(q)
        if interval[0] == interval[0]:
            return None
        beyond = self.errors.support if q is None else self.support(q)
        number, singular = f"{beyond:.3g}", f"{beyond:.3g}" == "1"
        verb = ("is" if singular else "are") if q is None else ("lies" if singular else "lie")
        of = ("allocation", "allocations"), ("independent replica sample", "steps")
        sample, units = of[not self.allocations]
        where = f"{sample}{'' if singular else 's'} {verb} {'behind' if q is None else 'beyond'} it"
        return f"only {number} {where}, and {FEWEST} are needed: {more_steps(beyond, units)}"

    def support(self, q: float) -> float:
        """How many independent replica samples, or allocations, lie beyond the quantile at `q`."""
        return float(self.errors.support_beyond(q))


def _numbers(values: object, must: str) -> np.ndarray:
    """What is given as floats. Raises a `ValueError` that says what it must be."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if np.asarray(values).dtype.kind in "iuf":
            return np.asarray(values, float)
    raise ValueError(must.format(quoted(values)))


def figures(
    law: Law, level: float = 0.95, quantiles: Mapping[str, float] = QUANTILES
) -> dict[str, tuple[float, tuple[float, float]]]:
    """The mean, the standard deviation and quantiles, each with its confidence interval."""
    values = [float(law.quantile(q)) for q in quantiles.values()]
    first = {
        "mean": (law.mean, law.mean_interval(level)),
        "std": (law.std, law.std_interval(level)),
    }
    of_quantiles = zip(values, _quantile_intervals(law, [*quantiles.values()], level), strict=True)
    return first | dict(zip(quantiles, of_quantiles, strict=True))


def _quantile_intervals(
    law: Law, quantiles: Sequence[float], level: float
) -> list[tuple[float, float]]:
    """See `Law.quantile_interval`: of several."""
    must = "The quantile `q={}` must lie between 0 and 1 to have an interval."
    for q in quantiles:
        if (number := _numbers(q, must)).ndim or not 0 < number < 1:
            raise ValueError(must.format(quoted(q)))
    levels = np.array(quantiles, float)
    known = law.errors.known & ((law.std == 0) | (law.errors.support_beyond(levels) >= FEWEST))
    ends = np.full((2, len(levels)), law.mean)
    if law.std > 0 and known.any():
        ends[:, known] = law.histogram.quantile(law.errors.interval_levels(levels[known], level))
    low, high = np.where(known, ends, np.nan).tolist()
    return [*zip(low, high, strict=True)]


def law_table(
    law: Law,
    quantiles: Mapping[str, float] = QUANTILES,
    measured: Mapping[str, float] | None = None,
    expected: Mapping[str, tuple[float, float]] | None = None,
) -> Table:
    """A row for each figure of a law.

    **Arguments:**

    - `quantiles`: the quantiles to show, by name.
    - `measured`: measured figures in seconds, by name, to show beside the predicted ones.
    - `expected`: in which interval nine of ten measurements of such runs lie, by name
        (`calibration.Epistemic.intervals`). Without it, the table shows the intervals of the
        simulation's noise.
    """
    stopped = f"{law.num_samples:,} of " if law.interrupted else ""
    steps = f"{stopped}{plural(max(law.num_samples, law.requested), 'step')}"
    rows, unknown = [], []
    for name, (value, interval) in figures(law, quantiles=quantiles).items():
        row = {"figure": name, "predicted_s": value, "interval_s": interval}
        row["expected_s"] = (expected or {}).get(name)
        rows.append({**row, "measured_s": (measured or {}).get(name)})
        if interval[0] != interval[0]:
            unknown.append(f"* {name}: {law.why_unknown(quantiles.get(name))}")
    columns = [Column("step time", "figure")]
    if expected is None:
        columns.append(Column("predicted", "predicted_s", unit="s", error="interval_s"))
        columns.append(Column("95 % noise", "interval_s", unit="s"))
    else:
        columns.append(Column("predicted", "predicted_s", ".4g", "s"))
        columns.append(Column("90 % of such runs", "expected_s", unit="s"))
    if measured:
        columns.append(Column("measured", "measured_s", unit="s"))
        columns.append(Column("error", _error, "+.1f", "%"))
    if measured and expected is not None:
        columns.append(Column("within", _within))
    title = f"Law of {steps} ({law.sampling} sampling)"
    return Table(columns, rows, title, unknown)


def about_noise(law: Law, expected: Mapping[str, tuple[float, float]]) -> str:
    """By how much more samples would change p95, compared with how far off it may be."""
    low, high = law.quantile_interval(0.95)
    if not math.isfinite(high - low):
        return f"noise of the simulation: not known of p95: {law.why_unknown(0.95)}"
    wide = (high - low) / (expected["p95"][1] - expected["p95"][0])
    advice = "more samples change nothing" if wide < _LITTLE else "more samples narrow it"
    share = 50 * (high - low) / law.quantile(0.95)
    return f"noise of the simulation: p95 +- {share:.1g} %; {advice}"


def _error(row: Mapping[str, Any]) -> float | None:
    """How far a prediction is off, in percent."""
    measured = row["measured_s"]
    return None if measured is None else 100 * (row["predicted_s"] / measured - 1)


def _within(row: Mapping[str, Any]) -> str | None:
    """Whether the measured figure lies in the expected interval."""
    if row["measured_s"] is None or row["expected_s"] is None:
        return None
    low, high = row["expected_s"]
    return "yes" if low <= row["measured_s"] <= high else "no"
