"""The state of a search for layouts, and their order: that of their predicted steps, of which only
the first are predicted, until the search is ended.
"""

import dataclasses
import heapq
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from .._interrupt import Interrupt
from ..analysis import AbstractObjective, Bootstrapped
from ..data import Job
from ..prediction import Passes, Prediction, least_bytes, least_seconds, memory, predict


# What is known of each simulated job, in this order.
FIGURES = ("objective", "mean", "p95", "p99")
# Seconds between two lines of progress.
_EVERY = 10.0


class EndedError(Exception):
    """A search was ended; what it knows is its result."""


class Watch:
    """To be called often: raises `EndedError` when the budget is spent or Ctrl-C came.

    **Attributes:**

    - `ended`: why the search was ended: `budget` or `interrupted`; empty if it was not.
    """

    def __init__(
        self, budget: float | None, interrupt: Interrupt, progress: Callable[[], str] | None
    ):
        self.ended = ""
        self._began = self._told = time.monotonic()
        self._told -= _EVERY  # The first line comes as soon as there is one.
        self._budget, self._interrupt, self._progress = budget, interrupt, progress

    def __call__(self) -> None:
        now = time.monotonic()
        if self._interrupt.take():
            self.ended = "interrupted"
        elif self._budget is not None and now - self._began >= self._budget:
            self.ended = "budget"
        if self.ended:
            raise EndedError
        if self._progress is not None and now - self._told >= _EVERY and (line := self._progress()):
            self._told = now
            print(f"prism-jax: {now - self._began:.0f} s: {line}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Search:
    """The state of a search.

    **Attributes:**

    - `unit`, `work`: what times are compared for, and how many of these a step of each job has.
    - `num_samples`: steps of each layout; `None` for a ranking by predictions.
    - `top`: how many layouts to be sure of.
    - `margin`: the share of a device's memory that must be free; `None` keeps all jobs.
    - `queue`: for the jobs that are left, a time that their steps take at least, their number, and
        how often they were looked at; a heap.
    - `predictions`: the predictions so far.
    - `refused`: why some jobs cannot be predicted or simulated.
    - `num_too_large`: how many of those looked at need more memory than is allowed.
    - `found`: the figures of each simulated job.
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
    queue: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)
    predictions: dict[int, Prediction] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    num_too_large: int = 0
    found: dict[int, Bootstrapped] = dataclasses.field(default_factory=dict)
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
        return self.scaled(float(self.found[number].values[FIGURES.index(figure)]), number)

    def predicted(self, number: int) -> float:
        return self.scaled(self.predictions[number].mean, number)

    def last(self) -> float:
        """The objective of the `top`-th best so far; infinite if there are fewer."""
        values = sorted(map(self.value, self.found))
        return values[self.top - 1] if len(values) >= self.top else math.inf

    def add(self, number: int, found: Bootstrapped | str) -> None:
        """Adds the figures of a job, or why it cannot be simulated."""
        if isinstance(found, str):
            self.refused[number] = found
        else:
            self.found[number] = found

    def progress(self) -> str:
        """The best so far; empty if nothing is known."""
        if not self.predictions:
            return ""
        if self.found:
            best = min(self.found, key=self.value)
            what = f"{self.objective} {self.found[best].values[0]:.5g} s"
        else:
            best = min(self.predictions, key=self.predicted)
            what = f"predicted {self.predictions[best].mean:.5g} s"
        return (
            f"{len(self.predictions):,} of {len(self.jobs):,} layouts predicted, "
            f"{len(self.found):,} simulated; best so far: {self.jobs[best].name}, {what}"
        )


def works_of(jobs: Sequence[Job]) -> tuple[str, list[int]]:
    """What the times of jobs are compared for, and how many of these each job does in a step."""
    words = all(job.model is None or job.model.vocab_size for job in jobs)
    work = [max(job.tokens_per_step if words else job.batch_size, 1) for job in jobs]
    return "step" if len({*work}) == 1 else "token" if words else "sample", work


def best_first(search: Search, tick: Callable[[], object]) -> Iterator[int]:
    """The numbers of the jobs that fit, the one with the shortest predicted step first.

    All jobs stand in a queue by a time that their steps take at least. The first of them is looked
    at more closely, and put back with a longer time, until its prediction is known and still the
    first: no other step is shorter. So the order does not depend on how many are looked at. `tick`
    is called before each look.
    """
    queue, known = search.queue, dict[tuple, Passes]()
    for number, job in enumerate(search.jobs):
        tick()
        heapq.heappush(queue, (search.scaled(least_seconds(job, known), number), number, 0))
    while queue:
        tick()
        seconds, number, looks = queue[0]
        if looks == 2:
            heapq.heappop(queue)
            yield number
            continue
        closer = _predicted(search, number) if looks else _sharded(search.jobs[number], known)
        if closer is None:
            heapq.heappop(queue)
        else:
            seconds = max(seconds, search.scaled(closer, number))
            heapq.heapreplace(queue, (seconds, number, looks + 1))


def _sharded(job: Job, known: dict[tuple, Passes]) -> float:
    """A longer time that a step takes at least, if its parameters or gradients are sharded."""
    wants = job.training is not None and job.training.zero >= 2
    return least_seconds(job, known, sharded=True) if wants else 0.0


def _predicted(search: Search, number: int) -> float | None:
    """The predicted time; `None` if the job does not fit or cannot be predicted."""
    job = search.jobs[number]
    try:
        if not _fits(job, search.margin):
            search.num_too_large += 1
            return None
        search.predictions[number] = predict(job)
    except ValueError as error:
        search.refused[number] = str(error)
        return None
    return search.predictions[number].mean


def _fits(job: Job, margin: float | None) -> bool:
    if margin is None or job.cluster is None:
        return True
    most = job.cluster.device.memory_bytes * (1 - margin)
    return least_bytes(job) <= most and memory(job).fullest.bytes <= most
