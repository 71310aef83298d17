"""The law of a whole training run, the derivatives of its mean, and closed forms, by which runs are
refused that would not end.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import lambertw, pdtrc

from .._estimate import Estimate
from .._summary import Shown, Table, picked_attributes, plain
from ._cycles import RunCosts, Runs
from ._rates import WEEK, Hazards


DAY = 86_400.0
# Of a central difference in the logarithm of a cost, and the runs that it is taken of.
_APART = 0.1
_DIFFERENCE_RUNS = 16_384
# More interruptions than any run survives in practice; each takes a pass over all runs.
_MOST_INTERRUPTIONS = 1e5
# The chance of what no simulated run will meet.
_RARE = 1e-9


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunLaw(Shown):
    """The law of the length of a training run, from many simulated runs.

    **Attributes:**

    - `days`: the days that each run takes, or quantiles of them, sorted.
    - `parts`: the mean days of a run by what they are spent on: `work`, `evaluation`, `checkpoint`,
        `lost` (work that is done again), `down` (detection and restart), `waiting` (for a spare
        node) and `slow` (what slow events add to the work).
    - `interruptions`: the mean number of interruptions by cause.
    - `interval_s`: the work between two checkpoints, in seconds.
    - `best_interval_s`: the interval that minimises the mean time of a run, in seconds.
    - `derivatives`: the derivative of the mean, in days, with respect to the logarithm of each cost
        and of the rate of each cause (such as `rate of gpu`). A hundredth of it is the effect of an
        increase by one per cent.
    - `num_runs`, `requested`: how many runs were simulated, and how many were asked for.
    - `step_error`: the standard error of the mean of a step, as a share of it; `nan` if it is not
        known. A run takes as many times longer as its steps do.
    - `finding_saves_days`: by how many days finding slow nodes makes a run shorter, on average;
        `None` if they are not looked for.
    """

    days: Float[np.ndarray, "runs"]
    parts: dict[str, float]
    interruptions: dict[str, float]
    interval_s: float
    best_interval_s: float
    derivatives: dict[str, Estimate]
    num_runs: int
    requested: int
    step_error: float
    finding_saves_days: Estimate | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the simulation was stopped (Ctrl-C) before all runs were simulated."""
        return self.num_runs < self.requested

    @property
    def mean(self) -> Estimate:
        """The mean of the days, with its standard error: of the runs and of the step's mean."""
        mean = float(self.days.mean())
        of_runs = float(self.days.std(ddof=1)) / math.sqrt(self.num_runs)
        return Estimate(mean, math.hypot(of_runs, mean * self.step_error))

    @property
    def goodput(self) -> float:
        """The share of a run's time that is spent on steps that count."""
        return self.parts["work"] / sum(self.parts.values())

    def quantile(self, q: float) -> float:
        """The quantile of the days at `q`.

        **Raises:**

        `ValueError` if `q` is not between 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"The quantile `q={q}` must lie in [0, 1].")
        return float(np.quantile(self.days, q))

    def probability(self, deadline_days: float) -> Estimate:
        """The probability that a run takes at most `deadline_days`.

        **Raises:**

        `ValueError` if the deadline is not positive.
        """
        if not deadline_days > 0:
            raise ValueError(
                f"The deadline of {deadline_days:g} days must be positive; give the days from the "
                "first step to the last."
            )
        number, chance = self.num_runs, self._chance(deadline_days)
        # With one more run on each side, so that a certainty has an error too.
        share = (chance * number + 1) / (number + 2)
        # Two standard errors of the step's mean reach as far as two of the probability, on the side
        # where that is more: with steps that a run is a sum of, it rises from 0 to 1 within few.
        longer = 1 + 2 * self.step_error
        sides = self._chance(deadline_days * longer), self._chance(deadline_days / longer)
        of_step = max(abs(side - chance) for side in sides) / 2
        return Estimate(chance, math.sqrt(share * (1 - share) / number + of_step**2))

    def _chance(self, deadline_days: float) -> float:
        if math.isnan(deadline_days):
            return math.nan
        return float(np.searchsorted(self.days, deadline_days, side="right")) / len(self.days)

    def at_levels(self, levels: Float[np.ndarray, " levels"]) -> "RunLaw":
        """The law of runs whose steps take as many times as long as one of the levels, all of which
        are equally likely. 2,000 quantiles stand for the simulated runs. The other figures stay.
        The levels of a job are those of `expected_error`, by `prediction.levels_of_law`.
        """
        quantiles = np.quantile(self.days, (np.arange(2_000) + 0.5) / 2_000)
        longer = (self.parts["work"] + self.parts["slow"]) * (np.asarray(levels) - 1)
        days = np.sort((quantiles[:, None] + longer).reshape(-1))
        return dataclasses.replace(self, days=days)

    @property
    def figures(self) -> dict[str, float]:
        """The mean of the days and some quantiles, by name."""
        quantiles = {f"p{round(100 * q)}": self.quantile(q) for q in (0.05, 0.5, 0.95)}
        return {"mean": self.mean.value, **quantiles}

    def to_json(self) -> dict[str, Any]:
        """Its figures, without each run and without derivatives."""
        names = ("goodput", "interruptions", "interval_s", "best_interval_s", "finding_saves_days")
        days = {"days": self.figures, "parts_days": self.parts}
        numbers = {"num_runs": self.num_runs, "requested_runs": self.requested}
        return plain(days) | picked_attributes(self, *names) | numbers

    def summary(self) -> Table:
        number = sum(self.interruptions.values())
        causes = ", ".join(f"{name} {n:.3g}" for name, n in self.interruptions.items() if n)
        best = f"the best interval is {self.best_interval_s:.4g} s"
        _, *quantiles = self.figures.items()
        rows = [("mean", f"{self.mean} days")]
        rows += [(name, f"{days:.4g} days") for name, days in quantiles]
        rows += [
            ("goodput", f"{100 * self.goodput:.4g} % of the time is spent in steps that count"),
            ("days by part", ", ".join(f"{k} {d:.3g}" for k, d in self.parts.items() if d > 1e-8)),
            ("interruptions", f"{number:.4g}{f': {causes}' if number else ''}"),
            (
                "checkpoints",
                f"after each {self.interval_s:.4g} s of work; "
                f"{best if number else 'no run was interrupted'}",
            ),
        ]
        if self.finding_saves_days is not None:
            rows.append(("finding slow nodes", f"saves {self.finding_saves_days} days"))
        return Table((), rows, f"Law of a training run, of {self.num_runs:,} simulated")


def of_rates(runs: Runs, names: Sequence[str]) -> dict[str, Estimate]:
    """The derivatives of the mean length in the logarithm of each rate, in days, by the score of
    the law of the interruptions: a Poisson process over the seconds of a run, each weighted by the
    factor of its week.
    """
    score = runs.interruptions - runs.rates * runs.exposed[:, None]
    centred = (runs.seconds - runs.seconds.mean()) / DAY
    return {
        f"rate of {name}": mean_of(centred * score[:, i])
        for i, name in enumerate(names)
        if runs.rates[:, i].any()
    }


def of_costs(
    simulate: Callable[[RunCosts, int], Runs], costs: RunCosts, num_runs: int
) -> dict[str, Estimate]:
    """The derivatives of the mean length in the logarithm of each cost that is not zero, in days,
    by central differences: `simulate` has the same random numbers for all costs.
    """
    number, derivatives = min(num_runs, _DIFFERENCE_RUNS), {}
    for name, value in dataclasses.asdict(costs).items():
        if value > 0:
            less, more = (
                simulate(dataclasses.replace(costs, **{name: value * math.exp(apart)}), number)
                for apart in (-_APART, _APART)
            )
            derivatives[name] = mean_of((more.seconds - less.seconds) / (2 * _APART) / DAY)
    return derivatives


def mean_of(values: np.ndarray) -> Estimate:
    """The mean with its standard error."""
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


def expected_seconds(
    work_s: float,
    interval_s: float,
    blocking_s: float,
    downs: Sequence[tuple[float, float]],
    announced: float = 0.0,
) -> float:
    """The expected time of a run that saves a checkpoint after each interval of work, in seconds.

    Each interval is done again until nothing interrupts it; restarts can be interrupted too.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", equation 13, here for several causes. With announced interruptions, which save the work
    and begin a new interval, it holds for many intervals.

    **Arguments:**

    - `work_s`, `interval_s`: the work of the run and between checkpoints.
    - `blocking_s`: of one checkpoint.
    - `downs`: for each cause, its rate per second of the whole job and the seconds that the job is
        down after it.
    - `announced`: the sum of the rates of the causes that are announced.
    """
    rate = sum(down_rate for down_rate, _ in downs)
    if rate == 0:
        return work_s * (1 + blocking_s / interval_s)
    again = sum(down_rate * -math.expm1(-rate * down) for down_rate, down in downs) / rate
    # What is saved while the job is up, over the rate: in whole intervals, and when announced.
    cycle = interval_s * math.exp(-rate * (interval_s + blocking_s))
    part = -math.expm1(-rate * interval_s) / rate
    saved = float((rate - announced) * cycle + announced * part)
    try:
        return work_s * -math.expm1(-rate * (interval_s + blocking_s)) / saved / (1 - again)
    except ZeroDivisionError:
        return math.inf


def waiting_share(rate: float, repair_s: float, num_spares: int) -> float:
    """The share of a long run's time in which it waits for a spare.

    A run waits while more nodes are in repair than it has spares. Nodes are taken at a constant
    rate, so their number in repair is Poisson. Source: Palm 1943, the queue M/D/infinity.

    **Arguments:**

    - `rate`: of the interruptions that take a node, per second of the whole job.
    - `repair_s`: until such a node can be used as a spare, in seconds.
    - `num_spares`: the number of spare nodes.
    """
    return float(pdtrc(num_spares, rate * repair_s))


def best_interval(rate: float, blocking_s: float) -> float:
    """The interval of work between checkpoints that makes a run shortest, in seconds.

    It does not depend on how long a restart takes. For short checkpoints it is Young's
    `sqrt(2 blocking_s / rate)`. Source: the minimum of Daly's equation 13, by Lambert's function.

    **Arguments:**

    - `rate`: of interruptions that lose work, per second of the whole job; if there are none, the
        interval is infinite.
    - `blocking_s`: of one checkpoint; if it costs nothing, the interval is zero.
    """
    if not (rate and blocking_s):
        return math.inf if blocking_s else 0.0
    # Near -1/e the function is as its root: what rounding leaves of it, perhaps no number, is no
    # shorter than Young's.
    product = np.nan_to_num(1 + lambertw(-math.exp(-1 - rate * blocking_s)).real)
    return float(max(product / rate, math.sqrt(2 * blocking_s / rate) - blocking_s))


def never_waits(hazards: Hazards, repair_s: float) -> bool:
    """Whether no more nodes than the spares will be in repair, in the worst week of any run."""
    worst = 1.0 if hazards.weeks is None else np.diff(hazards.weeks, axis=1).max() / WEEK
    taken = float((hazards.rates @ hazards.takes_node).max())
    spares = hazards.num_spares
    return spares is None or waiting_share(worst * taken, repair_s, spares) <= _RARE


def check_ends(work: float, costs: RunCosts, hazards: Hazards, slowness: float = 1.0) -> None:
    """Refuses interruptions that some run would not survive, by the rates that runs have drawn.
    Slow events make the work of a run longer by at most the factor `slowness`.
    """
    rates = hazards.rates[hazards.rates.sum(axis=1).argmax()]
    downs = (costs.restart_s + hazards.detection_s).tolist()
    pairs = list(zip(rates.tolist(), downs, strict=True))
    work, interval = work * slowness, costs.interval_s * slowness
    interval = min(interval + costs.background_s, work)
    announced = float(rates @ hazards.announced)
    seconds = expected_seconds(work, interval, costs.blocking_s, pairs, announced)
    if seconds * rates.sum() > _MOST_INTERRUPTIONS:
        raise ValueError(
            f"An interruption comes every {1 / rates.sum():.4g} s, more than "
            f"{_MOST_INTERRUPTIONS:,.0f} times in the run; save checkpoints more often than every "
            f"{costs.interval_s:.4g} s, restart faster than in {max(downs):.4g} s, or train for "
            "fewer steps."
        )
    if never_waits(hazards, min(costs.repair_s, seconds)):
        return
    # A wait lengthens a run, so more nodes fail while it lasts.
    taken = float((hazards.rates @ hazards.takes_node).max())
    spares = hazards.num_spares or 0
    works = 1 - waiting_share(taken, costs.repair_s, spares)
    if seconds * rates.sum() > _MOST_INTERRUPTIONS * works:
        raise ValueError(
            f"With `num_spares={spares}` and repairs of {costs.repair_s:.4g} s, a run that "
            f"waits for a spare is interrupted more than {_MOST_INTERRUPTIONS:,.0f} times; give "
            "more spares or shorter repairs."
        )
