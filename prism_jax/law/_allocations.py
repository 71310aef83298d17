"""Runs that keep their GPUs for all of their steps."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Allocations:
    """The step times on several sets of GPUs, each of which was kept for equally many steps.

    **Attributes:**

    - `means`: the mean step time on each set, in seconds.
    - `std`: the standard deviation of the step time on a given set, in seconds.
    """

    means: tuple[float, ...]
    std: float

    def run_mean_std(self, num_independent: float, steps_each: float) -> float:
        """The standard deviation of the mean over the steps of a run, in seconds.

        With an integrated autocorrelation time of `t` steps, the mean over `n` steps has the
        variance of a mean over `n / t` independent steps. Source: Goodman and Weare, "Ensemble
        samplers with affine invariance" (2010); Sokal, "Monte Carlo methods in statistical
        mechanics" (1997), whose autocorrelation time is half of this one.

        **Arguments:**

        - `num_independent`: how many independent steps the run is worth. Less than one counts as
            one, because no mean varies more than a single step.
        - `steps_each`: how many independent steps each of `means` is over. Their noise makes
            `means` vary more than the sets of GPUs differ.
        """
        within = self.std**2
        between = np.var(self.means, ddof=1) - within / steps_each
        return float(np.sqrt(max(between, 0.0) + within / max(num_independent, 1.0)))
