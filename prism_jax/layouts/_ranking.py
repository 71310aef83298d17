"""What a search for layouts found."""

import dataclasses
from typing import Any

from .._estimate import Estimate
from ..data import Job
from ..program import Prediction


@dataclasses.dataclass(frozen=True)
class RankedLayout:
    """A layout and its figures, in seconds.

    **Attributes:**

    - `job`: with its layout, named after it.
    - `prediction`: its step if nothing varied.
    - `value`: the objective.
    - `behind`: by how much it is more than the best's, with the standard error of the difference:
        both have the same random numbers.
    - `mean`, `p95`, `p99`: of the step time.
    - `rank`, `rank_by_mean`: from 1, among those that were simulated to the end.
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
        """The share of the devices' peak that the model's products take, of the mean step."""
        return self.prediction.mfu * self.prediction.mean / self.mean.value

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job, of the mean step."""
        return self.prediction.tokens_per_s * self.prediction.mean / self.mean.value


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What `rank_layouts` found.

    **Attributes:**

    - `objective`: by which figure they are ranked.
    - `layouts`: those that were simulated to the end, the best first.
    - `num_given`, `num_simulated`: how many layouts there were, and how many were simulated at all.
    - `num_samples`: steps of each, in the end.
    - `loss`: what the layout of the least mean loses: by how much its objective is more than that
        of the best.
    - `notes`: what is to be said of the figures.
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
        """The layout of the least mean."""
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
