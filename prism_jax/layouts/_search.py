"""The state of a search for layouts, and their order: that of their predicted steps, of which only
the first are predicted, until the search is ended.
"""

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence

from .._interrupt import Interrupt
from .._misc import plural
from ..analysis import AbstractObjective, CVaR, Jackknifed, Mean
from ..data import Job
from ..prediction import ModelPasses, Prediction, fits, least_seconds, predict


# What is known of each simulated job, in this order.
FIGURES = ("objective", "mean", "p95", "p99", "std")
# By how much a mean may be below its prediction: so many standard errors, and rounding.
_ERRORS, _ROUNDING = 4.0, 1e-5


class EndedError(Exception):
    """A search was ended; what it knows is its result."""


class Watch:
    """To be called often: raises `EndedError` when the budget is spent or Ctrl-C came.

    **Attributes:**

    - `ended`: why the search was ended: `budget` or `interrupted`; empty if it was not.
    """

    def __init__(self, budget: float | None, interrupt: Interrupt):
        self.ended = ""
        self._began = time.monotonic()
        self._budget, self._interrupt = budget, interrupt

    def __call__(self) -> None:
        now = time.monotonic()
        if self._interrupt.take():
            self.ended = "interrupted"
        elif self._budget is not None and now - self._began >= self._budget:
            self.ended = "budget"
        if self.ended:
            raise EndedError


@dataclasses.dataclass
class Search:
    """The state of a search.

    **Attributes:**

    - `unit`, `work`: what times are compared for, and how many of these a step of each job has.
    - `num_samples`: steps of each layout; `None` for a ranking by predictions.
    - `top`: how many layouts to be sure of.
    - `margin`: the share of what is usable of a device's memory that must be free; `None` keeps all
        jobs.
    - `yours`: the number of the job that comes first, whatever its prediction; `None` if none does.
    - `queue`: for the jobs that are left, a time that their steps take at least, their number, and
        how often they were looked at; a heap.
    - `predictions`: the predictions so far.
    - `refused`: why some jobs cannot be predicted or simulated.
    - `num_too_large`: how many of those looked at need more memory than is allowed.
    - `results`: the figures of each simulated job.
    - `excess`: by which share the prediction of each is above the mean of its steps, by more than
        their errors explain; else zero.
    - `order`: the numbers of jobs in the order in which they were taken from the queue.
    - `ended`: as in [`Ranking`][].
    """

    jobs: Sequence[Job]
    unit: str
    work: Sequence[int]
    objective: AbstractObjective
    num_samples: int | None
    top: int
    margin: float | None
    yours: int | None = None
    queue: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)
    predictions: dict[int, Prediction] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    num_too_large: int = 0
    results: dict[int, Jackknifed] = dataclasses.field(default_factory=dict)
    excess: dict[int, float] = dataclasses.field(default_factory=dict)
    order: list[int] = dataclasses.field(default_factory=list)
    ended: str = ""

    @property
    def least(self) -> float:
        """A time that the steps of all jobs that are left take at least; infinite if none is."""
        return self.queue[0][0] if self.queue else math.inf

    def scaled(self, seconds: float, number: int) -> float:
        """A time of a job, for as much work as a step of the first job does."""
        return seconds * (self.work[0] / self.work[number])

    def value(self, number: int, figure: str = "objective") -> float:
        return self.scaled(float(self.results[number].values[FIGURES.index(figure)]), number)

    def predicted(self, number: int) -> float:
        return self.scaled(self.predictions[number].mean, number)

    def last(self) -> float:
        """The objective of the `top`-th best so far; infinite if there are fewer."""
        values = sorted(map(self.value, self.results))
        return values[self.top - 1] if len(values) >= self.top else math.inf

    def leaves_out(self, number: int) -> bool:
        """Whether a job cannot be among the first `top` by its prediction, nor any with a longer
        one.

        The mean of steps that vary is at least the prediction (Jensen's inequality: a step is a
        maximum of sums), and a CVaR is at least the mean. A quantile at q may be below the mean, by
        at most sqrt((1 - q) / q) standard deviations (Cantelli's inequality), for which the largest
        seen is taken, as a share of the mean. A prediction above the mean of its own steps shows
        that predictions are no bounds for these jobs, and then no job is left out.
        """
        last = self.last()
        if last == math.inf or self.too_high():
            return False
        return self.predicted(number) * self._least_share() >= last

    def too_high(self) -> float:
        """The largest share by which a prediction is above the mean of its simulated steps, by more
        than their errors explain; zero if none is.
        """
        return max((self.excess[number] for number in self.results), default=0.0)

    def _least_share(self) -> float:
        """The objective of a job is at least this share of its prediction."""
        if isinstance(self.objective, Mean | CVaR):
            return 1.0
        level = self.objective.level
        if level is None:
            return 0.0
        mean, std = FIGURES.index("mean"), FIGURES.index("std")
        spread = max(
            float(result.values[std] / result.values[mean]) for result in self.results.values()
        )
        return 1 - math.sqrt((1 - level) / level) * spread

    def add(self, number: int, result: Jackknifed | str) -> None:
        """Adds the figures of a job, or why it cannot be simulated."""
        if isinstance(result, str):
            self.refused[number] = result
            return
        self.results[number] = result
        at, predicted = FIGURES.index("mean"), self.predictions[number].mean
        mean, error = float(result.values[at]), float(result.scatter[at])
        above = predicted - mean > _ERRORS * error + _ROUNDING * mean
        self.excess[number] = predicted / mean - 1 if above else 0.0

    def progress(self) -> str:
        """How far the search is, and the best so far; another thread may ask."""
        number = plural(len(self.jobs), "layout")
        simulated = {i: float(result.values[0]) for i, result in [*self.results.items()]}
        means = simulated or {i: prediction.mean for i, prediction in [*self.predictions.items()]}
        if not means:
            looked_at = max(len(self.queue), self.num_too_large + len(self.refused))
            return f"{looked_at:,} of {number} looked at, none predicted"
        best = min(means, key=lambda i: self.scaled(means[i], i))
        return (
            f"{len(self.predictions):,} of {number} predicted, {len(simulated):,} simulated; best "
            f"so far: {self.jobs[best].name}, {self.objective if simulated else 'predicted'} "
            f"{means[best]:.5g} s"
        )


def works_of(jobs: Sequence[Job]) -> tuple[str, list[int]]:
    """What the times of jobs are compared for, and how many of these each job does in a step."""
    words = all(job.unit == "token" for job in jobs)
    work = [max(job.tokens_per_step if words else job.batch_size, 1) for job in jobs]
    return "step" if len({*work}) == 1 else "token" if words else "sample", work


def best_first(search: Search, tick: Callable[[], object]) -> Iterator[int]:
    """The numbers of the jobs that fit, the one with the shortest predicted step first; before it,
    when it is known, that of your job.

    All other jobs stand in a queue by a time that their steps take at least. The first of them is
    looked at more closely, and put back with a longer time, until its prediction is known and still
    the first: no other step is shorter. So the order does not depend on how many are looked at.
    `tick` is called before each look.
    """
    queue, passes = search.queue, dict[tuple, ModelPasses]()
    yours = [] if search.yours is None else [search.yours]
    yours = [number for number in yours if _predicted(search, number) is not None]
    for number, job in enumerate(search.jobs):
        if number == search.yours:
            continue
        tick()
        heapq.heappush(queue, (search.scaled(least_seconds(job, passes), number), number, 0))
    while queue:
        tick()
        seconds, number, looks = queue[0]
        if looks == 2:
            heapq.heappop(queue)
            yield from yours
            yours = []
            yield number
            continue
        closer = _predicted(search, number) if looks else _sharded(search.jobs[number], passes)
        if closer is None:
            heapq.heappop(queue)
        else:
            seconds = max(seconds, search.scaled(closer, number))
            heapq.heapreplace(queue, (seconds, number, looks + 1))
    yield from yours


def _sharded(job: Job, known: dict[tuple, ModelPasses]) -> float:
    """A longer time that a step takes at least, if its parameters or gradients are sharded."""
    wants = job.training is not None and job.training.zero >= 2
    return least_seconds(job, known, sharded=True) if wants else 0.0


def _predicted(search: Search, number: int) -> float | None:
    """The predicted time; `None` if the job does not fit or cannot be predicted."""
    job = search.jobs[number]
    try:
        # Your job may use all of the memory.
        margin = 0.0 if number == search.yours else search.margin
        if not (margin is None or job.cluster is None or fits(job, margin)):
            search.num_too_large += 1
            return None
        search.predictions[number] = predict(job)
    except ValueError as error:
        search.refused[number] = str(error)
        return None
    return search.predictions[number].mean
