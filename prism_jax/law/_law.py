"""The law of the step time: what `simulate` returns."""

import dataclasses
import statistics

import numpy as np


NUM_BINS = 2**16
NUM_EXTREMES = 10_000
# Levels at which the standard error of the distribution function is kept; between them its ratio to
# sqrt(q (1 - q)) is interpolated.
_LOWER = np.array([1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35])
LEVELS = np.concatenate([_LOWER, [0.5], 1 - _LOWER[::-1]])
# Fewer independent replica samples than this beyond a quantile, and its interval is not known.
FEWEST = 20


@dataclasses.dataclass(frozen=True)
class Law:
    """The law of the step time, in seconds.

    **Attributes:**

    - `num_samples`: steps simulated.
    - `requested`: steps asked for; more than `num_samples` if the run was interrupted.
    - `mean`, `std`: their moments (float64).
    - `edges`: the two ends of a grid of equal bins; `counts`: steps in each, and below and above.
    - `smallest`, `largest`: the extreme steps, exactly, in ascending order.
    - `mean_error`, `std_error`: standard errors.
    - `mean_support`: how many independent replica samples the steps come from.
    - `level_errors`: standard error of the distribution function at the quantiles of `LEVELS`.
    - `level_support`: how many independent replica samples lie beyond them, on the poorer side.
    - `effective_samples`: of the replica samples behind it, how many of equal weight are worth as
        much.
    - `degrees`: of freedom of the standard errors, where they come of a few randomisations.
    - `sampling`: how replica samples were drawn, see `simulate`.
    - `program`: a digest of what was simulated; laws of one program can be merged.
    - `keys`: the keys that were used.
    - `allocation_means`: the mean step on each of several allocations of GPUs, in seconds, where
        they were kept apart; `allocation_std`, the standard deviation within one, or zero.
    - `compile_s`, `run_s`: wall time, in seconds.

    A law has no derivative; that is what `estimate` is for.
    """

    num_samples: int
    requested: int
    mean: float
    std: float
    edges: tuple[float, float]
    counts: np.ndarray
    smallest: np.ndarray
    largest: np.ndarray
    mean_error: float
    std_error: float
    mean_support: float
    level_errors: np.ndarray
    level_support: np.ndarray
    effective_samples: float
    program: str
    keys: tuple[tuple[int, int], ...]
    compile_s: float
    run_s: float
    degrees: float = float("inf")
    sampling: str = "plain"
    allocation_means: tuple[float, ...] = ()
    allocation_std: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped (Ctrl-C) before all its samples."""
        return self.num_samples < self.requested

    def run_mean_std(self, num_steps: int) -> float:
        """The standard deviation of the mean over the steps of a run, in seconds: of runs that each
        have GPUs of their own for all of their steps. See `allocations` of `simulate`.

        **Raises:**

        `ValueError` where allocations were not kept apart.
        """
        if len(self.allocation_means) < 2:
            raise ValueError(
                "The law does not tell allocations of GPUs apart; simulate with `allocations=` of "
                "at least 2."
            )
        steps = self.num_samples / len(self.allocation_means)
        within = self.allocation_std**2
        between = np.var(self.allocation_means, ddof=1) - within / steps
        return float(np.sqrt(max(between, 0.0) + within / num_steps))

    def quantile(self, q: float | np.ndarray) -> float | np.ndarray:
        """The quantile at `q` in [0, 1], in seconds.

        Exact among the `smallest` and `largest`; else to within one bin of the grid. `nan` for the
        rare levels that lie beyond the grid and short of the extremes.
        """
        levels = np.asarray(q, float)
        if np.any(~((levels >= 0) & (levels <= 1))):
            raise ValueError(f"The quantile `q={q}` must lie in [0, 1].")
        position = levels * (self.num_samples - 1)
        result = np.asarray(self._from_grid(levels))
        low, high = len(self.smallest), self.num_samples - len(self.largest)
        ranks = np.arange(low)
        result = np.where(position <= low - 1, np.interp(position, ranks, self.smallest), result)
        ranks = np.arange(high, self.num_samples)
        result = np.where(position >= high, np.interp(position, ranks, self.largest), result)
        return float(result) if result.ndim == 0 else result

    def _from_grid(self, levels: np.ndarray) -> np.ndarray:
        below = np.concatenate([[0], np.cumsum(self.counts)[:-1]]) / self.num_samples
        grid = np.linspace(*self.edges, NUM_BINS + 1)
        # `counts[0]` lies below the grid, so `below[1]` belongs to its first edge.
        inside = (levels >= below[1]) & (levels <= below[-1])
        return np.where(inside, np.interp(levels, below[1:], grid), np.nan)

    def cdf(self, t: float) -> float:
        """The probability that a step takes at most `t` seconds."""
        below = np.concatenate([[0], np.cumsum(self.counts)[:-1]]) / self.num_samples
        if t < self.edges[0]:
            return float(np.searchsorted(self.smallest, t, "right") / self.num_samples)
        if t >= self.largest[0]:
            beyond = len(self.largest) - np.searchsorted(self.largest, t, "right")
            return float(1 - beyond / self.num_samples)
        return float(np.interp(t, np.linspace(*self.edges, NUM_BINS + 1), below[1:]))

    def exceedance(self, t: float) -> float:
        """The probability that a step takes longer than `t` seconds."""
        return 1 - self.cdf(t)

    def mean_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the mean, in seconds; `nan` twice where it is not known, as in
        `quantile_interval`.
        """
        half = self._half_width(self.mean_error, level)
        return self.mean - half, self.mean + half

    def std_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the standard deviation, in seconds; `nan` twice where it is not
        known.
        """
        half = self._half_width(self.std_error, level)
        return float(np.maximum(self.std - half, 0.0)), self.std + half

    def _half_width(self, error: float, level: float) -> float:
        score = self._score(level)
        return float("nan") if self.mean_support < FEWEST else score * error

    def quantile_interval(self, q: float, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the quantile at `q`, in seconds (Woodruff's: the distribution
        function's interval, inverted).

        **Returns:**

        Lower and upper end; `nan` twice where fewer than 20 independent replica samples lie beyond
        the quantile, so that it is not known how wrong it is.
        """
        if not 0 < q < 1:
            raise ValueError(f"The quantile `q={q}` must lie between 0 and 1 to have an interval.")
        if self.mean_support < FEWEST or (self.std > 0 and self.support(q) < FEWEST):
            return float("nan"), float("nan")
        if self.std == 0:
            return self.mean, self.mean
        relative = self.level_errors / np.sqrt(LEVELS * (1 - LEVELS))
        half = self._score(level) * np.interp(q, LEVELS, relative) * np.sqrt(q * (1 - q))
        low, high = np.clip([q - half, q + half], 0, 1)
        return float(self.quantile(low)), float(self.quantile(high))

    def support(self, q: float) -> float:
        """How many independent replica samples lie beyond the quantile at `q`."""
        # Support falls towards the tails about as the share beyond does.
        share = np.minimum(LEVELS, 1 - LEVELS)
        per_share = np.interp(q, LEVELS, self.level_support / share)
        return float(per_share * min(q, 1 - q))

    def _score(self, level: float) -> float:
        """How many standard errors an interval reaches to each side."""
        if not 0 < level < 1:
            raise ValueError(f"The confidence level {level} must lie between 0 and 1.")
        if np.isinf(self.degrees):
            return statistics.NormalDist().inv_cdf((1 + level) / 2)
        from scipy.stats import t

        return float(t.ppf((1 + level) / 2, self.degrees))
