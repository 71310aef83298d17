"""Layouts in the order of their predicted steps, of which only the first are predicted, until the
search is ended.
"""

import heapq
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from .._interrupt import Interrupt
from ..data import Job
from ..prediction import Passes, Prediction, least_bytes, least_seconds, memory, predict


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


class BestFirst:
    """Yields the numbers of the jobs that fit, the one with the shortest predicted step first.

    All jobs stand in a queue by a time that their steps take at least. The first of them is looked
    at more closely, and put back with a longer time, until its prediction is known and still the
    first: no other step is shorter. So the order does not depend on how many are looked at.

    **Attributes:**

    - `predicted`: the predictions so far.
    - `refused`: why some jobs cannot be predicted.
    - `num_too_large`: how many of those looked at need more memory than is allowed.
    """

    def __init__(
        self, jobs: Sequence[Job], margin: float | None, scaled: Callable[..., float], tick: Watch
    ):
        self.predicted: dict[int, Prediction] = {}
        self.refused: dict[int, str] = {}
        self.num_too_large = 0
        self._jobs, self._margin, self._scaled, self._tick = jobs, margin, scaled, tick
        self._known: dict[tuple, Passes] = {}
        self._queue: list[tuple[float, int, int]] = []

    @property
    def least(self) -> float:
        """A time that the steps of all jobs that are left take at least; infinite if none is."""
        return self._queue[0][0] if self._queue else math.inf

    def __iter__(self) -> Iterator[int]:
        for number, job in enumerate(self._jobs):
            self._tick()
            seconds = self._scaled(least_seconds(job, self._known), number)
            heapq.heappush(self._queue, (seconds, number, 0))
        while self._queue:
            self._tick()
            seconds, number, looks = self._queue[0]
            if looks == 2:
                heapq.heappop(self._queue)
                yield number
                continue
            closer = self._predicted(number) if looks else self._sharded(self._jobs[number])
            if closer is None:
                heapq.heappop(self._queue)
            else:
                seconds = max(seconds, self._scaled(closer, number))
                heapq.heapreplace(self._queue, (seconds, number, looks + 1))

    def _sharded(self, job: Job) -> float:
        """A longer time that a step takes at least, if its parameters or gradients are sharded."""
        wants = job.training is not None and job.training.zero >= 2
        return least_seconds(job, self._known, sharded=True) if wants else 0.0

    def _predicted(self, number: int) -> float | None:
        """The predicted time; `None` if the job does not fit or cannot be predicted."""
        try:
            if not self._fits(self._jobs[number]):
                self.num_too_large += 1
                return None
            self.predicted[number] = predict(self._jobs[number])
        except ValueError as error:
            self.refused[number] = str(error)
            return None
        return self.predicted[number].mean

    def _fits(self, job: Job) -> bool:
        if self._margin is None or job.cluster is None:
            return True
        most = job.cluster.device.memory_bytes * (1 - self._margin)
        return least_bytes(job) <= most and memory(job).fullest.bytes <= most
