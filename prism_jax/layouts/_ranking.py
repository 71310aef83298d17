"""The result of a search for layouts."""

import dataclasses
from typing import Any

from .._estimate import Estimate
from ..data import Job
from ..prediction import Prediction


@dataclasses.dataclass(frozen=True)
class RankedLayout:
    """A layout and its figures, in seconds.

    **Attributes:**

    - `job`: the job with this layout. Its name describes the layout.
    - `prediction`: the prediction of its step without variability.
    - `value`: the value of the objective.
    - `behind`: by how much the objective is above that of the best layout. Its standard error is
        that of the difference, which is small because both use the same random numbers.
    - `mean`, `p95`, `p99`: figures of the step time.
    - `rank`, `rank_by_mean`: its rank by the objective and by the mean, from 1, among the layouts
        that were simulated to the end.
    """

    job: Job
    prediction: Prediction
    value: Estimate
    behind: Estimate
    mean: Estimate
    p95: Estimate
    p99: Estimate
    rank: int
    rank_by_mean: int

    @property
    def gpus(self) -> int:
        return self.job.layout.world_size

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilisation in the mean step."""
        return self.prediction.mfu * self.prediction.mean / self.mean.value

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job in the mean step."""
        return self.prediction.tokens_per_s * self.prediction.mean / self.mean.value


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The result of `rank_layouts`.

    **Attributes:**

    - `objective`: the figure by which layouts are ranked.
    - `layouts`: the layouts that were simulated to the end, the best first.
    - `num_given`, `num_simulated`: how many layouts were given, and how many were simulated at all.
    - `num_samples`: how many steps of each were simulated in the last round.
    - `loss`: by how much the objective of the layout with the shortest mean is above that of the
        best layout.
    - `notes`: warnings about the figures.
    """

    objective: str
    layouts: tuple[RankedLayout, ...]
    num_given: int
    num_simulated: int
    num_samples: int
    loss: Estimate
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RankedLayout:
        return self.layouts[0]

    @property
    def best_by_mean(self) -> RankedLayout:
        """The layout with the shortest mean step time."""
        return min(self.layouts, key=lambda one: one.rank_by_mean)

    def table(self) -> Any:
        """A polars frame with a row for each layout, the best first."""
        import polars as pl

        return pl.DataFrame(
            [
                {
                    "layout": one.job.name,
                    "GPUs": one.gpus,
                    f"{self.objective} [s]": one.value.value,
                    "behind [s]": one.behind.value,
                    "error of it [s]": one.behind.standard_error,
                    "mean [s]": one.mean.value,
                    "p95 [s]": one.p95.value,
                    "p99 [s]": one.p99.value,
                    "memory [GB]": one.prediction.memory_bytes / 1e9,
                    "MFU [%]": 100 * one.mfu,
                    "tokens/s": one.tokens_per_s,
                    "rank": one.rank,
                    "rank by mean": one.rank_by_mean,
                }
                for one in self.layouts
            ]
        )
