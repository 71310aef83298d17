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

    def run_mean_std(self, num_steps: int, steps_each: float) -> float:
        """The standard deviation of the mean over the steps of a run; see `run_mean_std` of
        [`Law`][].

        **Arguments:**

        - `num_steps`: of the run.
        - `steps_each`: of which each of the `means` is, and by which these scatter more than GPUs
            differ.
        """
        within = self.std**2
        between = np.var(self.means, ddof=1) - within / steps_each
        return float(np.sqrt(max(between, 0.0) + within / num_steps))
