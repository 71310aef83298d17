"""Figures of the steps of many jobs, from common random numbers, and a folder that keeps them."""

import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import PRNGKeyArray

from ..analysis import (
    MARGIN,
    AbstractObjective,
    Bootstrapped,
    Mean,
    Quantile,
    bootstrapped,
    open_parts,
    write_part,
)
from ..data import Job
from ..engine import simulated_steps
from ..prediction import Prediction, memory
from ..program import compile_job
from ..random import key_data


FIGURES = ("objective", "mean", "p95", "p99")


def simulate_jobs(
    jobs: Sequence[Job], objective: AbstractObjective, num_samples: int, key: PRNGKeyArray
) -> list[Bootstrapped | str]:
    """The `FIGURES` of each job; of one that cannot be simulated, why.

    All have the same key and ids of steps, so that what the steps of two jobs share, such as the
    step's own factor and the network's regime, cancels in their difference.
    """
    figures = [objective, Mean(), Quantile(0.95), Quantile(0.99)]
    options: dict[str, Any] = {"num_samples": num_samples, "key": key, "margin": MARGIN}
    found: list[Bootstrapped | str] = []
    for job in jobs:
        try:
            simulated = simulated_steps(compile_job(job), **options)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append(bootstrapped(simulated, figures))
    return found


class Kept:
    """A folder with a Parquet file for each layout, each written whole or not at all; or nothing,
    without a folder.

    **Attributes:**

    - `known`: the figures of the layouts that it holds, by their numbers among the jobs; of one
        that cannot be simulated, why.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        jobs: Sequence[Job],
        objective: AbstractObjective,
        num_samples: int,
        key: PRNGKeyArray,
    ):
        self.known: dict[int, Bootstrapped | str] = {}
        self._folder = None if folder is None else pathlib.Path(folder)
        if self._folder is not None:
            words = [int(word) for word in key_data(key)]
            digest = _digest(jobs, [str(objective), num_samples, *words])
            for number, row in open_parts(self._folder, digest, "search").items():
                self.known[number] = row["refused"] or _figures(row)

    def write(
        self, job: Job, number: int, prediction: Prediction, found: Bootstrapped | str
    ) -> None:
        """Adds a layout."""
        if self._folder is None:
            return
        row: dict[str, Any] = {
            "row": number,
            "layout": job.name,
            "predicted_s": prediction.mean,
            "memory_bytes": memory(job).fullest.bytes,
            "refused": found if isinstance(found, str) else None,
        }
        if not isinstance(found, str):
            row |= {f"{name}_s": x for name, x in zip(FIGURES, found.values.tolist(), strict=True)}
            row |= {"resampled": found.resampled.tolist(), "support": found.support.tolist()}
        write_part(self._folder, row)


def _figures(row: dict[str, Any]) -> Bootstrapped:
    values = [row[f"{name}_s"] for name in FIGURES]
    return Bootstrapped(*map(np.array, (values, row["resampled"], row["support"])))


def _digest(jobs: Sequence[Job], how: list[Any]) -> str:
    """A digest of jobs, of which most share their model, machine and kernels."""
    found = hashlib.sha256()
    shared: dict[int, int] = {}
    for job in jobs:
        for part in (job.model, job.cluster, job.kernels):
            if id(part) not in shared:
                shared[id(part)] = len(shared)
                found.update(msgspec.json.encode(part))
        own = (job.layout, job.schedule, job.training, job.name)
        which = [shared[id(part)] for part in (job.model, job.cluster, job.kernels)]
        found.update(msgspec.json.encode((own, which)))
    found.update(msgspec.json.encode(how))
    return found.hexdigest()
