"""Ends a search by the clock or by Ctrl-C, and tells its progress."""

import sys
import time
from collections.abc import Callable

from .._interrupt import Interrupt


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
