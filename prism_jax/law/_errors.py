"""Standard errors of a law's figures, and what is behind them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ._compared import AbstractCompared


# Levels at which the standard error of the distribution function is kept; between them its ratio to
# sqrt(q (1 - q)) is interpolated.
_LOWER = np.array([1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35])
LEVELS = np.concatenate([_LOWER, [0.5], 1 - _LOWER[::-1]])
# Fewer independent replica samples than this beyond a quantile, and its interval is not known.
FEWEST = 20
# The variance of n contributions of kurtosis k has 2 n / (k - 1) degrees of freedom. The slowest
# replicas contribute as an exponential law does, of which the mean fourth power is 6 times the
# square of the mean second one: so many degrees for each of the samples behind a standard error.
_DEGREES = 2 / (6 - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Errors(AbstractCompared):
    """Standard errors of a law's figures, and how many independent replica samples are behind them.

    **Attributes:**

    - `mean`, `std`: standard errors of these, in seconds.
    - `support`: how many independent replica samples the steps come from.
    - `levels`: standard error of the distribution function at the quantiles of `LEVELS`.
    - `level_support`: how many independent replica samples lie beyond them, on the poorer side.
    - `degrees`: of freedom of the standard errors, where they come of a few randomisations.
    """

    mean: float
    std: float
    support: float
    levels: np.ndarray
    level_support: np.ndarray
    degrees: float = float("inf")

    @property
    def known(self) -> bool:
        """Whether enough independent replica samples are behind them to tell how large they are."""
        return self.support >= FEWEST

    def degrees_with(self, support: float) -> float:
        """Of freedom: of a standard error that so many independent samples are behind."""
        return min(self.degrees, _DEGREES * support)

    def of_level(self, q: float) -> float:
        """The standard error of the distribution function at the quantile at `q`."""
        relative = self.levels / np.sqrt(LEVELS * (1 - LEVELS))
        return float(np.interp(q, LEVELS, relative) * np.sqrt(q * (1 - q)))

    def support_beyond(self, q: float) -> float:
        """How many independent replica samples lie beyond the quantile at `q`."""
        # Support falls towards the tails about as the share beyond does.
        share = np.minimum(LEVELS, 1 - LEVELS)
        return float(np.interp(q, LEVELS, self.level_support / share) * min(q, 1 - q))


def pooled_errors(errors: Sequence[Errors], shares: np.ndarray) -> Errors:
    """Those of independent laws put together, each of which has a share of the steps."""

    def pooled(name):
        each = np.array([getattr(one, name) for one in errors])
        return np.sqrt(np.tensordot(shares**2, each**2, 1))

    return Errors(
        mean=float(pooled("mean")),
        std=float(pooled("std")),
        support=sum(one.support for one in errors),
        levels=pooled("levels"),
        level_support=np.sum([one.level_support for one in errors], axis=0),
        degrees=min(one.degrees for one in errors),
    )
