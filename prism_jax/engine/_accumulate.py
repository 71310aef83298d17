"""Gathers composed steps into a law, in memory that does not grow with their number."""

import numpy as np

from ._decide import Decision
from ._law import LEVELS, NUM_BINS, NUM_EXTREMES, Law
from ._replicas import standard_error


# Standard errors are computed from at most so many steps, and are a little too large for more.
_ERROR_STEPS = 2**20


def grid_of(pilot: np.ndarray) -> tuple[float, float]:
    """The two ends of the grid of bins, far beyond what the pilot saw."""
    low, middle, high = (float(x) for x in np.quantile(pilot, [0.01, 0.5, 0.99]))
    spread = max((high - low) / 4.65, 1e-9 * abs(middle), 1e-15)
    smallest, largest = float(pilot.min()), float(pilot.max())
    return (
        max(min(middle - 30 * spread, 2 * smallest - middle), 0.0),
        max(middle + 50 * spread, 2 * largest - middle),
    )


class Accumulator:
    """Running sums over the steps of one run."""

    def __init__(self, grid: tuple[float, float]):
        self.grid = grid
        self.num_samples = 0
        self._centre = 0.0
        self._sums = np.zeros(2)
        self._counts = np.zeros(NUM_BINS + 2, np.int64)
        self._smallest = np.zeros(0)
        self._largest = np.zeros(0)
        self._first: list[np.ndarray] = []

    def add(self, steps: np.ndarray) -> None:
        """Adds steps; they come in the order of their ids."""
        steps = np.asarray(steps, np.float64)
        if not self.num_samples:
            self._centre = float(steps[0])
        deviation = steps - self._centre
        self._sums += [deviation.sum(), (deviation**2).sum()]
        low, high = self.grid
        bins = np.floor((steps - low) / (high - low) * NUM_BINS)
        bins = np.clip(bins, -1, NUM_BINS).astype(np.int64) + 1
        self._counts += np.bincount(bins, minlength=NUM_BINS + 2)
        self._smallest = np.sort(np.concatenate([self._smallest, steps]))[:NUM_EXTREMES]
        self._largest = np.sort(np.concatenate([self._largest, steps]))[-NUM_EXTREMES:]
        if self.num_samples < _ERROR_STEPS:
            self._first.append(steps)
        self.num_samples += len(steps)

    def law(self, decision: Decision, *, requested: int, compile_s: float, run_s: float) -> Law:
        """The law of the steps so far."""
        n = self.num_samples
        shift, square = self._sums / n
        mean = self._centre + shift
        std = float(np.sqrt(max(square - shift**2, 0.0)))
        steps = np.concatenate(self._first)
        errors = _Errors(decision, steps)
        centred = steps - steps.mean()
        spread = steps.std()
        if spread > 0:
            of_std = errors.standard_error((centred**2 - spread**2) / (2 * spread))
        else:
            of_std = 0.0
        quantiles = np.quantile(steps, LEVELS)
        below = [(steps <= t).astype(float) for t in quantiles]
        return Law(
            num_samples=n,
            requested=requested,
            mean=float(mean),
            std=std,
            edges=self.grid,
            counts=self._counts,
            smallest=self._smallest,
            largest=self._largest,
            mean_error=errors.standard_error(centred),
            std_error=of_std,
            mean_support=errors.support(np.ones(len(steps))),
            level_errors=np.array([errors.standard_error(b - b.mean()) for b in below]),
            level_support=np.array([min(errors.support(b), errors.support(1 - b)) for b in below]),
            compile_s=compile_s,
            run_s=run_s,
        )


class _Errors:
    """Standard errors of means over steps, from what decided them."""

    def __init__(self, decision: Decision, steps: np.ndarray):
        self.known = decision.rule == "vector"
        self.selections = decision.selections
        self.num_steps = len(steps)
        if self.known:
            self.regimes, self.position = decision.picks(np.arange(len(steps)))

    def standard_error(self, contribution: np.ndarray) -> float:
        if not self.known:
            return float("nan")
        variance = 0.0
        for g, selection in enumerate(self.selections):
            members = self.regimes == g
            if members.any():
                influence = contribution[members] / self.num_steps
                variance += standard_error(selection, self.position[members], influence) ** 2
        return float(np.sqrt(variance))

    def support(self, weight: np.ndarray) -> float:
        """How many independent replica samples the steps with weight come from."""
        if not self.known:
            return 0.0
        total = squares = 0.0
        for g in range(len(self.selections)):
            members = self.regimes == g
            per_sample = np.bincount(self.position[members], weight[members])
            total += per_sample.sum()
            squares += (per_sample**2).sum()
        return total**2 / squares if squares > 0 else 0.0
