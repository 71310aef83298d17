"""The law of a whole training run."""

import dataclasses

import numpy as np
from jaxtyping import Float

from .._estimate import Estimate
from .._summary import Shown, Table


DAY = 86_400.0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunLaw(Shown):
    """The law of the length of a training run, from many simulated runs.

    **Attributes:**

    - `days`: the days that each run takes, sorted.
    - `parts`: the mean days of a run by what they are spent on: `work`, `evaluation`, `checkpoint`,
        `lost` (work that is done again), `down` (detection and restart), `waiting` (for a spare
        node) and `slow` (what slow events add to the work).
    - `interruptions`: the mean number of interruptions by cause.
    - `interval_s`: the work between two checkpoints, in seconds.
    - `best_interval_s`: the interval that minimises the mean time of a run, in seconds.
    - `derivatives`: the derivative of the mean, in days, with respect to the logarithm of each cost
        and of the rate of each cause (such as `rate of gpu`). A hundredth of it is the effect of an
        increase by one per cent.
    - `requested`: how many runs were asked for.
    - `finding_saves_days`: by how many days finding slow nodes makes a run shorter, on average;
        `None` if they are not looked for.
    """

    days: Float[np.ndarray, "runs"]
    parts: dict[str, float]
    interruptions: dict[str, float]
    interval_s: float
    best_interval_s: float
    derivatives: dict[str, Estimate]
    requested: int
    finding_saves_days: Estimate | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the simulation was stopped (Ctrl-C) before all runs were simulated."""
        return len(self.days) < self.requested

    @property
    def mean(self) -> Estimate:
        """The mean of the days, with its standard error."""
        error = self.days.std(ddof=1) / np.sqrt(len(self.days))
        return Estimate(float(self.days.mean()), float(error))

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
        number = len(self.days)
        within = int(np.searchsorted(self.days, deadline_days, side="right"))
        # With one more run on each side, so that a certainty has an error too.
        share = (within + 1) / (number + 2)
        return Estimate(within / number, float(np.sqrt(share * (1 - share) / number)))

    def at_levels(self, levels: Float[np.ndarray, " levels"]) -> "RunLaw":
        """The law of runs whose steps take as many times as long as one of the levels, all of which
        are equally likely. 2,000 quantiles stand for the simulated runs. The other figures stay.
        """
        few = np.quantile(self.days, (np.arange(2_000) + 0.5) / 2_000)
        longer = (self.parts["work"] + self.parts["slow"]) * (np.asarray(levels) - 1)
        days = np.sort((few[:, None] + longer).reshape(-1))
        return dataclasses.replace(self, days=days, requested=len(days))

    def summary(self) -> Table:
        number = sum(self.interruptions.values())
        causes = ", ".join(f"{name} {n:.3g}" for name, n in self.interruptions.items() if n)
        best = f"the best interval is {self.best_interval_s:.4g} s"
        rows = [("mean", f"{self.mean} days")]
        rows += [(f"p{round(100 * q)}", f"{self.quantile(q):.4g} days") for q in (0.05, 0.5, 0.95)]
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
        return Table((), rows, f"Law of a training run, of {len(self.days):,} simulated")
