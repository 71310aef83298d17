"""Whether a measured step time is normal, and what explains it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from scipy.special import stdtr

from .._misc import check_unit, plural, runs_of
from .._summary import Column, Shown, Table, picked_attributes
from ..calibration import STEP_LEVELS, Epistemic, possible_runs
from ..data import Job, load_priors
from ..lowering import job_parts
from ..prediction import throughput
from ..trace import RankWhere, median_step_times
from ..workload import has_experts
from ._changes import (
    EFFECTS,
    TELLS,
    UP_TO_TWO,
    Change,
    Explained,
    cheapest_changes,
    explained,
    simulated,
)
from ._evidence import (
    OfRanks,
    StepSeries,
    log_shapes,
    log_student,
    odds,
    of_ranks,
    series_of,
    shares_of_ranks,
    shares_of_series,
    student,
)


# Below this percentile of such runs, nothing that makes steps longer is looked for.
_FASTER = 5.0
# A probability that is called small. A priori, "nothing" is as likely as all causes together.
_SMALL = 0.2
# Likelihoods within this factor are not told apart, if they are worth a line: if the probability,
# times the number of causes, is at least this.
_ALIKE, _LEAST = 3.0, 0.3
_TIE = 1.25  # Within this factor of the best, the most usual cause is first.
# Widths of the kernels of a density of the spread and of slow steps, in logarithms: what a cause
# does to slow steps is known within a factor of three.
_WIDTHS = np.array([0.4, 1.2])
_MOST_STEPS = 400
_EVERY = 6  # Of so many effects, this density is found of one.
_TAIL = 3.0  # Degrees of freedom: no law of steps is known further than this.


@dataclasses.dataclass(frozen=True)
class Cause:
    """**Attributes:**

    - `name`: such as `slow-rank`.
    - `odds`: how much likelier what was measured is with it than without any cause.
    - `explains`: how many seconds it adds to the mean of a step, if it is the cause.
    - `parameter`, `value`: what it was fitted by, and the fitted value.
    - `probability`: that it is the cause, among all and none.
    - `indistinguishable`: whether its odds are within a factor of three of the best, and its
        probability is at least 0.3 over the number of causes.
    """

    name: str
    odds: float
    explains: float
    parameter: str
    value: float | None
    probability: float = 0.0
    indistinguishable: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The result of `diagnose`.

    **Attributes:**

    - `normal`: whether the median lies between the 2.5 % and the 97.5 % quantile of such runs, and
        all causes together have a probability of at most 0.8.
    - `measured`, `num_steps`: the median of the measured steps, in seconds, and their number.
    - `nothing`: the probability that nothing is wrong except the prediction.
    - `causes`: the most probable first, and of those that are as probable the most usual; none if
        steps are faster than 95 of 100 such runs, or slower than any cause makes them. Then
        `nothing` is `None`.
    - `ranks`: what the traces of ranks show.
    - `predicted`, `interval_90`: the median of such runs, in seconds, and where nine of ten lie.
    - `percentile`: how many of a hundred such runs are faster.
    - `changes`: what could be set otherwise, the cheapest first.
    - `mfu`: the share of the peak FLOP/s that the measured steps would reach.
    - `sites`: by how much sites of one machine differ, and whether that is part of the interval.

    Without a model there is no prediction: `predicted`, `interval_90`, `percentile`, `mfu` and
    `sites` are `None`.
    """

    normal: bool
    measured: float
    num_steps: int
    nothing: float | None
    causes: tuple[Cause, ...]
    ranks: OfRanks | None
    predicted: float | None = None
    interval_90: tuple[float, float] | None = None
    percentile: float | None = None
    changes: tuple[Change, ...] = ()
    mfu: float | None = None
    sites: str | None = None

    def sentence(self) -> str:
        """What was measured beside what was predicted, and whether that is normal."""
        verdict = "normal" if self.normal else "not normal"
        beside = ""
        if self.interval_90 is not None:
            low, high = self.interval_90
            form = f".{max(0, 2 - math.floor(math.log10(high)))}f"  # Three digits.
            beside = f"; predicted {self.predicted:.4g} (90 %: {low:{form}} .. {high:{form}})"
        return f"You measured {self.measured:.4g} s{beside}: {verdict}."

    def to_json(self) -> dict[str, Any]:
        """Its fields, and what would tell causes apart."""
        return picked_attributes(self, *self.__dataclass_fields__, "tell")

    def headline(self) -> str:
        normal, steps = "normal" if self.normal else "not normal", plural(self.num_steps, "step")
        lines = [f"measured: p50 {self.measured:.4g} s of {steps}: {normal}"]
        if self.interval_90 is not None:
            low, high = self.interval_90
            text = f"such runs: p50 {self.predicted:.4g} s, 90 % within {low:.4g} .. {high:.4g} s"
            lines += [f"{text}; {self.percentile:.0f} of 100 are faster"]
            lines += [] if self.sites is None else [self.sites]
        if self.ranks is not None:
            lines.append(f"traces: {self.ranks}")
        if self.nothing is None and (self.percentile or 0) > 50:
            why = "longer than any cause here makes a step"
            lines.append(f"{why}: check the unit, and how the job is described")
        elif self.nothing is None:
            reached = "" if self.mfu is None else f"{self.mfu:.0%} of the peak FLOP/s: "
            lines.append(
                f"faster than {100 - (self.percentile or 0):.3g} of 100 such runs: {reached}the "
                "step has fewer tokens, the model is smaller, the device is another, or the time "
                "is in another unit or not of a whole step"
            )
        return "\n".join(lines)

    @property
    def tell(self) -> dict[str, str]:
        """Of steps that are not normal, the measurements that would tell which cause it is."""
        causes = () if self.normal or self.ranks is not None else self.causes
        return {cause.name: TELLS[cause.name] for cause in causes if cause.indistinguishable}

    def summary(self) -> Table:
        """The causes; if none can be, an empty table that says so."""
        rows, title = [*self.causes], "What explains the measured steps"
        if self.nothing is None:
            title = f"No cause here explains a step of {self.measured:.4g} s"
        else:
            why = "only the error of the prediction"
            rows.append(Cause("nothing", 1.0, 0.0, why, None, self.nothing))
        notes = [f"{name}: {tell}." for name, tell in self.tell.items()]
        if notes:
            head = "Not told apart, and what would tell:" if len(notes) > 1 else "What would tell:"
            notes = [head, *notes]
        columns = (
            Column("cause", "name"),
            Column("probability", form=".2f"),
            Column("explains", form="+.3g", unit="s"),
            Column("fitted", "value", ".3g"),
            "parameter",
        )
        return Table(columns, rows, title, notes)

    def changes_tables(self) -> list[Table]:
        """A table of the cheapest changes, if there are any."""
        falls = (Column(name, form=".3g", unit="s") for name in ("p50", "p95"))
        columns = (Column("set", lambda change: " ".join(change.set)), "cost", *falls)
        title = "The cheapest changes, and by how much a step falls"
        return [Table(columns, self.changes, title)] if self.changes else []


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """What step times of a job are weighed against.

    **Attributes:**

    - `job`: the job.
    - `mean_s`: its mean step, in seconds.
    - `future`: the steps of possible runs of it.
    - `causes`: what each cause would do to them.
    - `changes`: see [`Diagnosis`][prism_jax.diagnosis.Diagnosis].
    - `mfu`: the share of the peak FLOP/s that steps of the mean reach, if that is known.
    """

    job: Job
    mean_s: float
    future: Epistemic
    causes: tuple[Explained, ...]
    changes: tuple[Change, ...]
    mfu: float | None = None


def hypotheses(job: Job, *, num_samples: int = 1024, key: "jax.Array") -> Hypotheses:
    """Simulates the steps of a job as they should be, with each cause, and with each change, with
    common random numbers.

    **Arguments:**

    - `job`: from `load_job`, with a model and a cluster.
    - `num_samples`: how many steps of each to simulate.
    - `key`: a `jax.random` key.

    **Raises:**

    `ValueError` for a job without a model.
    """
    usual = simulated(job, num_samples, key)
    steps = np.quantile(usual.steps, STEP_LEVELS)
    future = possible_runs(job, steps, float(np.median(steps)))
    causes, changes = tuple(explained(usual)), cheapest_changes(usual)
    reached = throughput(job, float(steps.mean()))
    mfu = None if reached is None else reached.mfu
    return Hypotheses(job, float(steps.mean()), future, causes, changes, mfu)


def diagnose(of: Hypotheses, runs: Any = (), ranks: Sequence[RankWhere] = ()) -> Diagnosis:
    """Says whether measured steps are normal, which causes explain them, and what to change.

    The likelihood of a cause is that of the level, the spread, the slow steps and the trend of the
    measured steps, if the cause changes the predicted steps by any value of its one parameter, and
    the prediction has the errors of its class. "Nothing" is a hypothesis too. Traces of ranks add
    whose work is long, and what runs under compute.

    **Arguments:**

    - `of`: from `hypotheses`.
    - `runs`: measured step times in seconds, in the order of steps; of fewer than twelve steps only
        the median is used; or a data frame, as of `calibrate`. By default those of the traces.
    - `ranks`: `by_rank` of `trace.contents`, or the contents themselves of one rank.

    **Raises:**

    `ValueError` if nothing was measured, if a step is not a positive number, or if steps are more
    than 200 times as long or short as predicted.
    """
    if not len(runs) and not ranks:
        raise ValueError("Nothing was measured; give step times, or traces of ranks.")
    measured = runs_of(runs) or [median_step_times(ranks)]
    for run in measured:
        if run.ndim != 1 or not len(run) or not np.all((run > 0) & (run < np.inf)):
            raise ValueError("Each measured run must be a list of positive step times, in seconds.")
    series, future = series_of(measured), of.future
    check_unit(series.level, float(np.median(future.levels)))
    seen = of_ranks(ranks, of.job) if ranks else None
    odds_of = {name: odds(name, *x) for name, x in (shares_of_ranks(seen) if seen else {}).items()}
    unchanged = np.ones((1, future.shapes.shape[1]))
    nothing = Explained("nothing", "", np.zeros(1), unchanged, np.zeros(1))
    (none,) = _log_likelihood(nothing, series, of)
    weighed = []
    of_series = shares_of_series(series)
    causes = [
        cause
        for cause in of.causes
        if len(cause.values) and (cause.name != "drift" or len(series.steps))
    ]
    logs = [_log_likelihood(cause, series, of) for cause in causes]
    # Relative to the most likely of all, since a narrow law makes most of them too small.
    most = max([none, *map(np.max, logs)])
    for cause, log in zip(causes, logs, strict=True):
        likelihoods, number = np.exp(log - most), len(cause.values)
        total = max(float(likelihoods.sum()), 1e-300)
        longer, value = (float(likelihoods @ x / total) for x in (EFFECTS[:number], cause.values))
        explains = longer * of.mean_s
        if cause.name == "stalls" and of_series:  # What slow steps take is seen.
            explains = of_series["stalls"][0] * series.level
        ratio = total / UP_TO_TWO / max(float(np.exp(none - most)), 1e-300)
        here = ratio * odds_of.get(cause.name, 1.0)
        weighed.append(Cause(cause.name, here, explains, cause.parameter, value))
    nothing, causes = _ranked(weighed)
    middle, error = float(np.median(future.levels)), future.error
    percentile = 100 * float(stdtr(error.degrees, np.log(series.level / middle) / error.spread))
    interval = future.intervals({"p50": 0.5})["p50"]
    faster = percentile < _FASTER
    normal = bool((faster or nothing >= _SMALL) and 2.5 <= percentile <= 97.5)
    if faster or series.level > (1 + EFFECTS[-1]) * interval[1]:
        nothing, causes = None, ()
    steps = (series.level, series.number, nothing, causes, seen)
    mfu = None if of.mfu is None else of.mfu * of.mean_s / series.level
    expected = middle, interval, percentile, of.changes, mfu, error.about_sites()
    return Diagnosis(normal, *steps, *expected)


def diagnose_ranks(job: Job, ranks: Sequence[RankWhere]) -> Diagnosis:
    """As `diagnose`, from traces alone: of a job without a model no step is predicted."""
    series, seen = series_of([median_step_times(ranks)]), of_ranks(ranks, job)
    shares = shares_of_ranks(seen) | shares_of_series(series)
    parameter, level = "share of a step in the traces", series.level
    causes = [
        Cause(name, odds(name, share, error), share * level, parameter, share)
        for name, (share, error) in shares.items()
    ]
    nothing, ranked = _ranked(causes)
    return Diagnosis(nothing >= _SMALL, series.level, series.number, nothing, ranked, seen)


def _ranked(causes: Sequence[Cause]) -> tuple[float, tuple[Cause, ...]]:
    """The probability of no cause, and the causes with theirs, the most probable first."""
    odds = sum(cause.odds for cause in causes) / len(causes)
    nothing, best = 1 / (1 + odds), max(cause.odds for cause in causes)
    ranked = []
    # Causes that are about as likely as the best stay in the order of `explained`.
    for cause in sorted(causes, key=lambda cause: -min(cause.odds, best / _TIE)):
        share = nothing * cause.odds / len(causes)
        alike = share * len(causes) >= _LEAST and cause.odds * _ALIKE >= best
        ranked.append(dataclasses.replace(cause, probability=share, indistinguishable=alike))
    return nothing, tuple(ranked)


def _log_likelihood(
    cause: Explained, series: StepSeries, of: Hypotheses
) -> Float[np.ndarray, " values"]:
    """The log likelihood of what was measured, for each value of the parameter of a cause."""
    future, error = of.future, of.future.error
    is_single = not len(series.steps)  # A single figure is a mean.
    factor = (np.mean if is_single else np.median)(cause.factors, axis=1)
    off = np.log(series.level / np.median(future.levels) / factor)
    # A narrower law would fall between two values of the grid.
    apart = np.abs(np.gradient(np.log(factor))) / 2 if len(factor) > 1 else 0.0
    spread = np.maximum(error.spread, apart)
    level = log_student(off / spread, error.degrees) - np.log(spread)
    if is_single:
        return level
    priors = load_priors()
    drift = priors.drift_experts if has_experts(job_parts(of.job).model) else priors.drift
    scale = np.hypot(2 * series.trend_error, drift.deviation)
    # Steps usually get faster in their first hour: the prior is of the first over the last.
    trend = log_student((series.trend + drift.mean - cause.trend) / scale, 1.0)
    number = min(len(series.steps), _MOST_STEPS)
    rng = np.random.default_rng(0)  # The same steps for all causes.
    places = rng.integers(0, len(STEP_LEVELS), (len(future.shapes), number))
    seen = log_shapes(series.steps[None])
    near, chosen = [], np.arange(0, len(cause.factors), _EVERY)
    for factor in cause.factors[chosen]:
        steps = np.take_along_axis(future.shapes * factor, places, axis=1)
        unlike = (log_shapes(steps) - seen) / _WIDTHS
        near.append(np.mean(np.prod(student(unlike, _TAIL), axis=1)))
    shape = np.interp(np.arange(len(cause.factors)), chosen, near) if near else 1.0
    return level + trend + np.log(np.maximum(shape, 1e-300))
