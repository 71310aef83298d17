"""Runs that keep their GPUs, of which a law was made."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Allocations:
    """What several sets of GPUs, each kept for as many steps, tell of runs.

    **Attributes:**

    - `means`: the mean step on each, in seconds.
    - `std`: the standard deviation of a step on one and the same, in seconds.
    """

    means: tuple[float, ...]
    std: float

    def run_mean_std(self, num_independent: float, steps_each: float) -> float:
        """The standard deviation of the mean over the steps of a run, in seconds.

        With an integrated autocorrelation time of `t` steps, a mean over `n` steps scatters as one
        over `n / t` independent steps does. Source: Goodman and Weare, "Ensemble samplers with
        affine invariance" (2010); Sokal, "Monte Carlo methods in statistical mechanics" (1997),
        whose time is half of this one.

        **Arguments:**

        - `num_independent`: how many independent steps the run is worth; less than one counts as
            one, for no mean scatters more than a step.
        - `steps_each`: how many independent steps each of the `means` is of, for which these
            scatter more than GPUs differ.
        """
        within = self.std**2
        between = np.var(self.means, ddof=1) - within / steps_each
        return float(np.sqrt(max(between, 0.0) + within / max(num_independent, 1.0)))
