"""The law of the step time: what `simulate` returns."""

import dataclasses

import numpy as np

from .._estimate import Estimate, half_width


NUM_BINS = 2**16
NUM_EXTREMES = 10_000
# Levels at which the standard error of the distribution function is kept; between them its ratio to
# sqrt(q (1 - q)) is interpolated.
_LOWER = np.array([1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35])
LEVELS = np.concatenate([_LOWER, [0.5], 1 - _LOWER[::-1]])
# The quantiles that tables show, by name.
QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
# Fewer independent replica samples than this beyond a quantile, and its interval is not known.
FEWEST = 20


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Law:
    """The law of the step time, in seconds.

    **Attributes:**

    - `num_samples`: steps simulated.
    - `requested`: steps asked for; more than `num_samples` if the run was interrupted.
    - `mean`, `std`: their moments (float64).
    - `sampling`, `replicas`: how replica samples were drawn, and the slowest replica found; see
        `simulate`.
    - `effective_samples`: of the replica samples behind it, how many of equal weight are worth as
        much.
    - `allocation_means`: the mean step on each of several allocations of GPUs, in seconds, where
        they were kept apart; `allocation_std`, the standard deviation within one, or zero.
    - `program`: a digest of what was simulated; laws of one program can be merged.
    - `keys`: the keys that were used.
    - `compile_s`, `run_s`: wall time, in seconds.

    The other fields are what `quantile`, `cdf`, the intervals and `merge_laws` are made from:

    - `edges`: the two ends of a grid of equal bins; `counts`: steps in each, and below and above.
    - `smallest`, `largest`: the extreme steps, exactly, in ascending order.
    - `mean_error`, `std_error`: standard errors.
    - `mean_support`: how many independent replica samples the steps come from.
    - `level_errors`: standard error of the distribution function at the quantiles of `LEVELS`.
    - `level_support`: how many independent replica samples lie beyond them, on the poorer side.
    - `degrees`: of freedom of the standard errors, where they come of a few randomisations.

    Laws are equal if they tell the same of the same program, whatever time it took. A law has no
    derivative; that is what `estimate` is for.
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
    compile_s: float = dataclasses.field(compare=False)
    run_s: float = dataclasses.field(compare=False)
    degrees: float = float("inf")
    sampling: str = "plain"
    replicas: str = "vector"
    allocation_means: tuple[float, ...] = ()
    allocation_std: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Law):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if field.compare
        )

    def __hash__(self) -> int:
        return hash((self.program, self.keys, self.num_samples))

    def __repr__(self) -> str:
        stopped = f" of {self.requested:,}" if self.interrupted else ""
        rows = [
            f"{name:<5}{value:>12.6g}"
            + (f"  {low:.6g} .. {high:.6g}" if low == low else "  interval unknown")
            for name, (value, (low, high)) in figures(self).items()
        ]
        return "\n".join(
            [
                f"Law of {self.num_samples:,}{stopped} steps, in seconds with 95 % intervals",
                f"({self.sampling} sampling, replicas: {self.replicas})",
                *rows,
            ]
        )

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
        from_low = np.interp(position, np.arange(low), self.smallest)
        result = np.where(position <= low - 1, from_low, result)
        from_high = np.interp(position, np.arange(high, self.num_samples), self.largest)
        result = np.where(position >= high, from_high, result)
        return float(result) if result.ndim == 0 else result

    def _from_grid(self, levels: np.ndarray) -> np.ndarray:
        grid, below = self._grid()
        inside = (levels >= below[0]) & (levels <= below[-1])
        return np.where(inside, np.interp(levels, below, grid), np.nan)

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """The edges of all bins, and the share of the steps below each."""
        # `counts[0]` lies below the grid, and counts for its first edge.
        below = np.cumsum(self.counts)[:-1] / self.num_samples
        return np.linspace(*self.edges, NUM_BINS + 1), below

    def cdf(self, t: float | np.ndarray) -> float | np.ndarray:
        """The probability that a step takes at most `t` seconds: a float, or an array of any shape.

        **Raises:**

        `ValueError` for a `t` that is no number.
        """
        times = np.asarray(t, float)
        if np.any(np.isnan(times)):
            raise ValueError(f"The step time `t={t}` must be a number of seconds, not `nan`.")
        low = np.searchsorted(self.smallest, times, "right") / self.num_samples
        beyond = len(self.largest) - np.searchsorted(self.largest, times, "right")
        result = np.interp(times, *self._grid())
        result = np.where(times >= self.largest[0], 1 - beyond / self.num_samples, result)
        result = np.where(times < self.edges[0], low, result)
        return float(result) if result.ndim == 0 else result

    def exceedance(self, t: float | np.ndarray) -> float | np.ndarray:
        """The probability that a step takes longer than `t` seconds; `t` as of `cdf`."""
        return 1 - self.cdf(t)

    def mean_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the mean, in seconds; `nan` twice where it is not known, as in
        `quantile_interval`.
        """
        return Estimate(self.mean, self._known(self.mean_error), self.degrees).interval(level)

    def std_interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for the standard deviation, in seconds; `nan` twice where it is not
        known.
        """
        found = Estimate(self.std, self._known(self.std_error), self.degrees)
        low, high = found.interval(level)
        return float(np.maximum(low, 0.0)), high

    def _known(self, error: float) -> float:
        return float("nan") if self.mean_support < FEWEST else error

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
        half = (
            half_width(level, self.degrees) * np.interp(q, LEVELS, relative) * np.sqrt(q * (1 - q))
        )
        low, high = np.clip([q - half, q + half], 0, 1)
        return float(self.quantile(low)), float(self.quantile(high))

    def support(self, q: float) -> float:
        """How many independent replica samples lie beyond the quantile at `q`."""
        # Support falls towards the tails about as the share beyond does.
        share = np.minimum(LEVELS, 1 - LEVELS)
        per_share = np.interp(q, LEVELS, self.level_support / share)
        return float(per_share * min(q, 1 - q))


def _same(one, other) -> bool:
    """Whether two values are equal; two errors that are not known are."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        numbers = one.dtype.kind in "iuf" and other.dtype.kind in "iuf"
        return np.array_equal(one, other, equal_nan=numbers)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(one == other or (one != one and other != other))


def figures(law: Law, level: float = 0.95) -> dict[str, tuple[float, tuple[float, float]]]:
    """The mean, the standard deviation and `QUANTILES`, each with its confidence interval."""
    return {
        "mean": (law.mean, law.mean_interval(level)),
        "std": (law.std, law.std_interval(level)),
        **{
            name: (float(law.quantile(q)), law.quantile_interval(q, level))
            for name, q in QUANTILES.items()
        },
    }
