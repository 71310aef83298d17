"""The result of a search for layouts, and how it is made."""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from .._estimate import Estimate
from .._installed import needed
from .._misc import plural
from .._summary import GIB, Column, Shown, Table, picked_attributes, plain
from ..analysis import Jackknifed, combined
from ..data import Job
from ..prediction import Prediction, memory, rate_form
from ._search import Search


@dataclasses.dataclass(frozen=True)
class RankedLayout:
    """A layout and its figures, in seconds.

    **Attributes:**

    - `job`: the job with this layout. Its name describes the layout.
    - `prediction`: the prediction of its step without variability.
    - `value`: the value of the objective, of a step. Without simulation, it and `mean` are the
        prediction, and other figures are `nan`.
    - `behind`: by how much the objective is above that of the best layout, for as many tokens as a
        step of the first job has. Its standard error is that of the difference, which is small
        because both use the same random numbers.
    - `mean`, `p95`, `p99`: figures of the step time.
    - `per_unit`: seconds of the objective per unit of the ranking: a step, a token or a sample.
    - `rank`, `rank_by_mean`: its rank by the objective and by the mean, from 1.
    """

    job: Job
    prediction: Prediction
    value: Estimate
    behind: Estimate
    mean: Estimate
    p95: Estimate
    p99: Estimate
    per_unit: float
    rank: int
    rank_by_mean: int

    def to_json(self) -> dict[str, Any]:
        """Its job without what all jobs share, and its figures."""
        figures = ("gpus", "rank", "rank_by_mean", "value", "behind", "mean", "p95", "p99", "mfu")
        rates = ("per_unit", "tokens_per_s", "samples_per_s", "memory_bytes")
        return {
            "name": self.job.name,
            **picked_attributes(self.job, "layout", "schedule"),
            **picked_attributes(self.job.training, "microbatch_size", "zero", "recompute"),
            **picked_attributes(self, *figures, *rates),
            "predicted_s": self.prediction.mean,
        }

    @property
    def gpus(self) -> int:
        return self.job.layout.world_size

    @functools.cached_property
    def memory_bytes(self) -> float:
        """The memory of the fullest GPU."""
        return memory(self.job).fullest.bytes

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilisation in the mean step."""
        return self.prediction.mfu * self.prediction.mean / self.mean.value

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job in the mean step; `nan` without words."""
        return self.prediction.tokens_per_s * self.prediction.mean / self.mean.value

    @property
    def samples_per_s(self) -> float:
        """Sequences, or other samples, per second of the whole job in the mean step."""
        return self.prediction.samples_per_s * self.prediction.mean / self.mean.value


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Shown):
    """The result of `rank_layouts`.

    **Attributes:**

    - `objective`: the figure by which layouts are ranked.
    - `layouts`: the layouts that were simulated, the best first.
    - `num_given`, `num_simulated`: how many layouts were given, and how many were simulated.
    - `num_samples`: how many steps of each were simulated; 0 for a ranking by predictions.
    - `unit`: what the ranked times are for: a `step`, or a `token` or a `sample` if steps have
        different numbers of tokens.
    - `yours`: the job that is always ranked, if there is one and it fits.
    - `loss`: by how much the objective of the layout with the shortest mean is above that of the
        best layout.
    - `ended`: why the search was ended before its end: `budget` or `interrupted`, or empty.
    - `notes`: warnings about the figures, and what was left out.
    """

    objective: str
    layouts: tuple[RankedLayout, ...]
    num_given: int
    num_simulated: int
    num_samples: int
    unit: str
    loss: Estimate
    yours: RankedLayout | None = None
    ended: str = ""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RankedLayout:
        return self.layouts[0]

    @property
    def best_by_mean(self) -> RankedLayout:
        """The layout with the shortest mean step time."""
        return min(self.layouts, key=lambda layout: layout.rank_by_mean)

    @property
    def rate(self) -> str:
        """What all jobs do in a second: `tokens`, or `samples` if a model has no words."""
        words = all(layout.job.unit == "token" for layout in self.layouts)
        return "tokens" if words else "samples"

    def table(self) -> Any:
        """A polars frame with a row for each layout, the best first."""
        pl = needed("polars")
        rows = [
            {
                "layout": layout.job.name,
                "GPUs": layout.gpus,
                f"{self.objective} [s]": layout.value.value,
                "behind [s]": layout.behind.value,
                "error of it [s]": layout.behind.standard_error,
                "mean [s]": layout.mean.value,
                "p95 [s]": layout.p95.value,
                "p99 [s]": layout.p99.value,
                "memory [GB]": layout.memory_bytes / 1e9,
                "MFU [%]": 100 * layout.mfu,
                f"{self.rate}/s": getattr(layout, f"{self.rate}_per_s"),
                "rank": layout.rank,
                "rank by mean": layout.rank_by_mean,
            }
            for layout in self.layouts
        ]
        return pl.DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        """Its layouts, the best by mean, and the rank of yours."""
        names = ("objective", "unit", "num_simulated", "num_samples", "ended", "notes")
        layouts = picked_attributes(self, "layouts", "best_by_mean")
        yours = self.yours and {"rank": self.yours.rank, "behind_s": self.yours.behind.value}
        numbers = {"num_layouts": self.num_given, "loss_of_best_by_mean": plain(self.loss)}
        return picked_attributes(self, *names) | layouts | numbers | {"yours": yours}

    def summary(self, top: int | None = None, more: Sequence[Column] = ()) -> Table:
        """A row for each of the `top` layouts, with `more` columns. It says how much longer the
        objective of the best by mean is, and that of yours.
        """
        simulated, best = self.num_samples > 0, self.best_by_mean
        rate, rows = f"{self.rate}_per_s", self.layouts[:top]
        form = rate_form(min(getattr(layout, rate) / layout.gpus for layout in rows))
        by_unit = Column(f"per {self.unit}", "per_unit", ".4g", "µs", scale=1e6)
        columns = (
            Column("rank"),
            *([Column("by mean", "rank_by_mean")] if simulated else []),
            Column("layout", "job.name"),
            Column("GPUs", "gpus"),
            _rounded("objective" if simulated else self.objective, "value"),
            *([by_unit] if self.unit != "step" else []),
            Column("behind", unit="s"),
            *(_rounded(name, name) for name in ("mean", "p95", "p99") if simulated),
            Column("GiB", "memory_bytes", ".1f", scale=1 / GIB),
            Column("MFU", "mfu", ".1f", "%", scale=100),
            Column(f"{self.rate}/s/GPU", lambda layout: getattr(layout, rate) / layout.gpus, form),
            *more,
        )
        per = "" if self.unit == "step" else f" per {self.unit}"
        title, notes = f"by {self.objective}{per}; {plural(self.num_given, 'layout')}", []
        if simulated:
            steps = f"{self.num_simulated:,} simulated: {plural(self.num_samples, 'step')} each"
            title += f", {steps}, with common random numbers"
            worse = f"{best.job.name}, is {self.loss} s worse by {self.objective}."
            is_best = "The best is also the best by mean."
            notes.append(f"The best by mean, {worse}" if best.rank > 1 else is_best)
        else:
            title += ", none simulated"
        notes += [] if self.yours is None else [self._of_yours(self.yours, len(rows))]
        return Table(columns, self.layouts, title, (*notes, *self.notes), len(rows))

    def _of_yours(self, yours: RankedLayout, top: int) -> str:
        """Where your job stands, and by how much the best layout is better. Layouts that are not
        ranked may come before it if it is not among the first `top`.
        """
        behind, text = yours.behind.value, f"yours: rank {yours.rank}"
        if yours.rank > top:
            text += f" of the {len(self.layouts):,} ranked"
        if yours.rank > 1:
            text += f", {behind:.2g} s ({100 * behind / (yours.value.value - behind):.2g} %) behind"
        return f"{text}: {yours.job.name}"


def _rounded(name: str, of: str) -> Column:
    """A figure with the digits that it supports, without its error."""
    return Column(name, f"{of}.value", unit="s", error=f"{of}.standard_error")


def made(search: Search) -> Ranking:
    """The ranking of all that a search has found."""
    simulated, order = search.num_samples is not None, search.order
    if simulated:
        order = sorted(search.results, key=search.value)
    ranks = {number: rank for rank, number in enumerate(order)}
    by_mean = sorted(order, key=lambda i: search.value(i, "mean")) if simulated else order
    layouts = []
    for rank, i in enumerate(order, 1):
        prediction = search.predictions[i]
        if simulated:
            value, mean, p95, p99, _ = search.results[i].estimates()
            (behind,) = _difference(search, i, order[0]).estimates()
        else:
            value = mean = Estimate(prediction.mean, math.nan)
            p95 = p99 = Estimate(math.nan, math.nan)
            behind = Estimate(search.predicted(i) - search.predicted(order[0]), math.nan)
        per_unit = value.value / (1 if search.unit == "step" else search.work[i])
        figures = (value, behind, mean, p95, p99, per_unit, rank, by_mean.index(i) + 1)
        layouts.append(RankedLayout(search.jobs[i], prediction, *figures))
    return Ranking(
        objective=str(search.objective) if simulated else "predicted mean",
        layouts=tuple(layouts),
        num_given=len(search.jobs),
        num_simulated=len(search.results),
        num_samples=search.num_samples or 0,
        unit=search.unit,
        yours=None if search.yours not in ranks else layouts[ranks[search.yours]],
        loss=next(layout.behind for layout in layouts if layout.rank_by_mean == 1),
        ended=search.ended,
        notes=_notes(search, layouts, ranks.keys()),
    )


def _difference(search: Search, number: int, reference: int) -> Jackknifed:
    """By how much the objective of one job is above that of another, from the same steps."""
    a, b = search.scaled(1.0, number), search.scaled(1.0, reference)
    results = search.results
    return combined(lambda x, y: a * x[:, :1] - b * y[:, :1], results[number], results[reference])


def _notes(
    search: Search, layouts: Sequence[RankedLayout], ranked: Collection[int]
) -> tuple[str, ...]:
    notes = []
    skipped = len(search.jobs) - len(layouts) - len(search.refused) - search.num_too_large
    unranked = (number for number in search.predictions if number not in ranked)
    least = min([search.least, *map(search.predicted, unranked)])
    if skipped and search.ended:
        notes.append(
            f"The search was ended ({search.ended}): {plural(skipped, 'layout')} left out, none of "
            f"which takes less than {least:.5g} s without variability; a longer one only adds "
            "layouts."
        )
    elif skipped:
        notes.append(
            f"{plural(skipped, 'layout')} left out: without variability, none of them takes less "
            f"than {least:.5g} s, so none is among the first {search.top:,}."
        )
    if excess := search.too_high():
        notes.append(
            f"A prediction is {100 * excess:.2g} % above the mean of its simulated steps, so "
            "predictions leave none of these layouts out."
        )
    if search.yours is not None and search.yours not in ranked:
        notes.append(_without(search, search.yours))
    if search.num_too_large:
        notes.append(f"{plural(search.num_too_large, 'layout')} looked at cannot fit into memory.")
    if search.refused:
        why = next(iter(search.refused.values()))
        notes.append(
            f"{plural(len(search.refused), 'layout')} cannot be simulated; the first: {why}"
        )
    if search.unit != "step":
        of = "tokens_per_step" if search.unit == "token" else "batch_size"
        work = [getattr(layout.job, of) for layout in layouts]
        notes.append(
            f"A step has {min(work):,} to {max(work):,} {search.unit}s, so the jobs are ranked by "
            f"their time per {search.unit}, not per step."
        )
    gpus = sorted({layout.gpus for layout in layouts})
    if len(gpus) > 1:
        notes.append(
            f"The jobs have {', '.join(f'{n:,}' for n in gpus)} GPUs: compare "
            f"{layouts[0].job.unit}s/s for each of them, too."
        )
    return tuple(notes)


def _without(search: Search, number: int) -> str:
    """Why your job is not ranked."""
    job = search.jobs[number]
    if number in search.refused:
        return f"Yours, {job.name}, cannot be simulated: {search.refused[number]}"
    if number in search.predictions or job.cluster is None:
        return f"Yours, {job.name}, was not simulated before the search was ended."
    needed = memory(job)
    return (
        f"Yours, {job.name}, is not ranked: it needs {needed.fullest.bytes / GIB:.1f} GiB, "
        f"and of a `{job.cluster.device.name}` {needed.usable_bytes / GIB:.1f} GiB are usable."
    )
