"""A job with and without a calibration, its measured runs, and its steps simulated with only the
noise of kernels.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import jax
import msgspec
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ..data import (
    Calibrated,
    Job,
    Kernels,
    Variation,
    apply_calibrated,
    load_kernels,
    replace_variations,
)
from ..engine import Plain, prepare, steps_of_run
from ..prediction import constant_step
from ..program import compile_job
from ..workers import run_tasks
from ._observe import Observed, Runs, Steps, core_spread, observe, step_law_of


@dataclasses.dataclass(frozen=True)
class Scale:
    """One job at one scale.

    **Attributes:**

    - `job`: the job before calibration.
    - `observed`: the statistics of its runs.
    - `seconds`: its step without variability, as a function of its kernels.
    """

    job: Job
    observed: Observed
    seconds: Callable[[Kernels], float]

    @property
    def kernels(self) -> Kernels:
        """The kernels of the job."""
        assert self.job.kernels is not None
        return self.job.kernels


def scale_of(job: Job, runs: Runs) -> Scale:
    """A job and its runs.

    **Raises:**

    `ValueError` for too few steps, or a job that cannot be compiled.
    """
    seconds = constant_step(job)  # First, because its errors are about the job.
    return Scale(job, observe(runs), seconds)


def with_laws(kernels: Kernels, laws: Iterable[Variation]) -> Kernels:
    """The kernels, in which these laws replace those for the same component and kind."""
    new = replace_variations(kernels.variability, laws)
    return msgspec.structs.replace(kernels, variability=new)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """How the steps of jobs are simulated.

    **Attributes:**

    - `key`, `num_samples`: the key and the number of steps for each job.
    - `executor`: simulates several jobs in parallel.
    """

    key: PRNGKeyArray
    num_samples: int
    executor: Executor | None = None

    def steps_of(self, jobs: Sequence[tuple[Job, Kernels]]) -> list[Float[np.ndarray, " samples"]]:
        """`steps_of_kernels` of each job, with kernels that replace its own."""
        tasks = [(job, kernels, self.key, self.num_samples) for job, kernels in jobs]
        found = dict(run_tasks(steps_of_kernels, tasks, self.executor))
        return [found[number] for number in range(len(jobs))]


def steps_of_kernels(
    job: Job, kernels: Kernels, key: PRNGKeyArray, num_samples: int
) -> Float[np.ndarray, " samples"]:
    """Steps of the job that differ only by the noise of its kernels: GPUs are equal, and there is
    no factor of a step.
    """
    off = [Variation("", name, "constant", {}) for name in ("rank", "step", "network")]
    kept = tuple(v for v in kernels.variability if v.component != "stall")
    alike = with_laws(msgspec.structs.replace(kernels, variability=kept), off)
    run = prepare(compile_job(msgspec.structs.replace(job, kernels=alike)), key)
    return steps_of_run(dataclasses.replace(run, sampling=Plain()), num_samples=num_samples).steps


def without_calibration(job: Job, source: str) -> Job:
    """The job without an earlier calibration, but with the changes that were made to its kernels
    since then (by `--set`).
    """
    if job.cluster is None or job.kernels is None:
        return job
    known = list(load_kernels(job.cluster).variability)
    if job.calibrated is not None:
        known += job.calibrated.variability
    changed = tuple(v for v in job.kernels.variability if v not in known)
    return with_calibrated(job, Calibrated(source, variability=changed))


def with_calibrated(job: Job, calibrated: Calibrated) -> Job:
    """The job with these changes to the kernels of its cluster."""
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)


def calibrated_as(job: Job, other: Job) -> Job:
    """The job with the calibration of another, in place of its own."""
    assert other.calibrated is not None
    return with_calibrated(job, other.calibrated)


def agreement(job: Job, runs: Runs, *, num_samples: int = 8192) -> dict[str, tuple[float, float]]:
    """Figures of the steps of a run: those of a calibrated job, and measured ones (the medians over
    runs).

    **Returns:**

    `p50_s`, `p95 / p50` and `core_spread`, each as a pair.
    """
    assert job.kernels is not None
    # Simulated without the factor of a step, which is independent of the rest and multiplied on.
    steps = steps_of_kernels(job, job.kernels, jax.random.key(1), num_samples)
    steps = steps * step_law_of(job.kernels).factors(len(steps))
    each = [_figures(run) for run in runs]
    ours, theirs = _figures(steps), np.median(each, axis=0)
    names = ("p50_s", "p95 / p50", "core_spread")
    return dict(zip(names, zip(ours, map(float, theirs), strict=True), strict=True))


def _figures(steps: Steps) -> tuple[float, float, float]:
    median = float(np.median(steps))
    return median, float(np.quantile(steps, 0.95)) / median, core_spread(steps)
