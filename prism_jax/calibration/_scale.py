"""A job at one scale, with and without a calibration: its measured runs; its steps, simulated with
only the noise of kernels; and the most likely noise of its collectives: how much of the variation
that steps do not share they explain.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import runs_of
from ..data import (
    Calibrated,
    Job,
    Kernels,
    Priors,
    Variation,
    kernels_of,
    replace_variations,
)
from ..engine import prepare, steps_of_run
from ..prediction import constant_step, with_level
from ..program import compile_job
from ..workers import run_tasks
from ._observe import Observed, Runs, StepLaw, Steps, core_spread, observe_runs, spread_of


# The collectives between replicas, which share one law.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# The grid of the likelihood: factors on the usual noise, and shares of a spread.
_FACTORS = np.exp(np.linspace(-3.5, 3.5, 281))
_PARTS = np.exp(np.linspace(-7, 0, 281))
_TURNS = 3


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
    return Scale(job, observe_runs(runs), seconds)


def with_laws(kernels: Kernels, laws: Iterable[Variation]) -> Kernels:
    """The kernels, in which these laws replace those for the same component and kind."""
    new = replace_variations(kernels.variability, laws)
    return msgspec.structs.replace(kernels, variability=new)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a calibration is made from.

    **Attributes:**

    - `scales`, `num_replicas`: the jobs, and the number of replicas with which they have the level.
    - `priors`: what is known of other systems.
    - `key`, `num_samples`: the key and the number of simulated steps of each job.
    - `executor`: simulates several jobs in parallel.
    """

    scales: Sequence[Scale]
    num_replicas: int
    priors: Priors
    key: "jax.Array"
    num_samples: int
    executor: Executor | None = None

    def kernels_at(self, level: Float[np.ndarray, "4"]) -> list[Kernels]:
        """The kernels of each scale at a level; see `Level`."""
        return [with_level(scale.kernels, level, self.num_replicas) for scale in self.scales]

    def steps_of(self, jobs: Sequence[tuple[Job, Kernels]]) -> list[Float[np.ndarray, " samples"]]:
        """`steps_of_kernels` of each job, with kernels that replace its own."""
        tasks = [(job, kernels, self.key, self.num_samples) for job, kernels in jobs]
        steps = dict(run_tasks(steps_of_kernels, tasks, self.executor))
        return [steps[number] for number in range(len(jobs))]


def steps_of_kernels(
    job: Job, kernels: Kernels, key: "jax.Array", num_samples: int
) -> Float[np.ndarray, " samples"]:
    """Steps of the job that differ only by the noise of its kernels: GPUs are equal, and there is
    no factor of a step.
    """
    off = [Variation("", name, "constant", {}) for name in ("rank", "step", "network")]
    kept = tuple(v for v in kernels.variability if v.component != "stall")
    alike = with_laws(msgspec.structs.replace(kernels, variability=kept), off)
    run = prepare(compile_job(msgspec.structs.replace(job, kernels=alike)), key)
    return steps_of_run(run, num_samples=num_samples).steps


@dataclasses.dataclass(frozen=True)
class CoreSplit:
    """The components of the spread of the core at one scale: variances, relative to the step.

    **Attributes:**

    - `alone`: the observed variance that a step does not share with the next.
    - `kernels`: the part of it from kernels whose noise is known. It is extrapolated, and negative
        if compute hides collectives with little noise.
    - `collectives`: the part from collectives, if the standard deviation of each is one.
    - `num_steps`: how many steps were observed.
    """

    alone: float
    kernels: float
    collectives: float
    num_steps: int


def with_noise(kernels: Kernels, noise: float | None, less: float = 1.0) -> tuple[Variation, ...]:
    """The laws of the noise of those kernels for which it changes: that of collectives has the
    standard deviation `noise`, unless this is `None`, and all are `less` times as wide. Laws of
    other families than the log-normal do not change.
    """
    laws, of_collectives = [], []
    for v in kernels.variability:
        if v.component == "residual" and v.family == "lognormal":
            if noise is not None and v.kernel in _KINDS:
                of_collectives.append((v, noise))
            elif less != 1:
                laws.append((v, v.parameters["sigma"]))
    return tuple(
        msgspec.structs.replace(v, parameters={"sigma": float(less * sigma)})
        for v, sigma in (*laws, *of_collectives)
    )


def noise_of_collectives(problem: Problem, kernels: Sequence[Kernels]) -> float | None:
    """The most likely standard deviation of the logarithm of a collective's latency; `None` if the
    jobs have no collectives that determine it.

    **Arguments:**

    - `kernels`: the kernels of each scale, at the level of its runs.
    """
    noise: float | None = None
    # A collective beside compute shows only if it ends later, which is more likely with more noise.
    for _ in range(_TURNS):
        splits = splits_of(problem, kernels, noise)
        shown = [split for split in splits if split.collectives > 0]
        noise = most_likely_noise(shown, problem.priors)
        if noise is None:
            break
    return noise


def most_likely_noise(splits: Sequence[CoreSplit], priors: Priors) -> float | None:
    """The most likely noise of collectives. Variation that steps do not share is either noise of
    collectives, whose effect follows from the program, or a step's own, which is the same at each
    scale. Both have priors: log-normal for collectives, and half-Cauchy for a step's own variation,
    which may be much larger than usual. Scales may differ by more than chance.
    """
    if not splits:
        return None
    usual, alone = priors.collective_noise, priors.step_alone
    noise = np.exp(usual.mean) * _FACTORS[:, None]
    step = np.sqrt(max(split.alone for split in splits)) * _PARTS
    cost = (
        np.log1p((step / alone.value) ** 2) + (np.log(_FACTORS)[:, None] / usual.deviation) ** 2 / 2
    )
    for split in splits:
        predicted = np.maximum(split.kernels + split.collectives * noise**2, 0) + step**2
        # The error of a variance's logarithm is twice that of the standard deviation's logarithm.
        error = 2 / split.num_steps + (2 * priors.collective_scale.deviation) ** 2
        cost = cost + np.log(split.alone / predicted) ** 2 / (2 * error)
    best, _ = np.unravel_index(np.argmin(cost), cost.shape)
    return float(noise[best, 0])


def alone(observed: Observed, spread: float, priors: Priors) -> float:
    """The part of the core's variance that a step does not share with the next. The shared part
    cannot be estimated from few steps, and is shrunk towards that of other systems.
    """
    known = priors.step_shared
    weights = [observed.num_steps, known.observations]
    shared = float(np.average([observed.shared, known.value], weights=weights))
    return (1 - shared) * spread**2


def splits_of(
    problem: Problem, kernels: Sequence[Kernels], middle: float | None = None
) -> list[CoreSplit]:
    """The splits from simulated steps with two noises, around `middle` (by default, the usual
    noise), assuming that variances are linear in the square of the noise.
    """
    middle = float(np.exp(problem.priors.collective_noise.mean)) if middle is None else middle
    noises = middle * np.array([0.7, 1.2])
    noisy = [
        (scale.job, with_laws(base, with_noise(base, noise)))
        for scale, base in zip(problem.scales, kernels, strict=True)
        for noise in noises
    ]
    variances = np.array([core_spread(steps) ** 2 for steps in problem.steps_of(noisy)])
    splits = []
    for scale, (less, more) in zip(problem.scales, variances.reshape(-1, 2), strict=True):
        of_collectives = (more - less) / (noises[1] ** 2 - noises[0] ** 2)
        of_kernels = float(more - of_collectives * noises[1] ** 2)
        observed = scale.observed
        own = alone(observed, spread_of(observed, problem.priors), problem.priors)
        splits.append(CoreSplit(own, of_kernels, of_collectives, observed.num_steps))
    return splits


def without_calibration(job: Job, source: str) -> Job:
    """The job without an earlier calibration, but with the changes that were made to its kernels
    since then (by `--set`).
    """
    if job.cluster is None or job.kernels is None:
        return job
    families = list(kernels_of(msgspec.structs.replace(job, calibrated=None)).variability)
    rates = {}
    if job.calibrated is not None:
        families += job.calibrated.variability
        rates = job.calibrated.rates
    changed = tuple(v for v in job.kernels.variability if v not in families)
    return with_calibrated(job, Calibrated(source, variability=changed, rates=rates))


def with_calibrated(job: Job, calibrated: Calibrated) -> Job:
    """The job with these changes to the kernels of its cluster, in place of its own."""
    job = msgspec.structs.replace(job, calibrated=calibrated)
    return msgspec.structs.replace(job, kernels=kernels_of(job))


def agreement(job: Job, runs: Runs, *, num_samples: int = 8192) -> dict[str, tuple[float, float]]:
    """Figures of the steps of a run: those of a calibrated job, and measured ones (the medians over
    runs).

    **Returns:**

    `p50_s`, `p95 / p50` and `core_spread`, each as a pair.
    """
    assert job.kernels is not None
    law = job.kernels.find_variation("step")
    assert law is not None
    # Simulated without the factor of a step, which is independent of the rest and multiplied on.
    steps = steps_of_kernels(job, job.kernels, jax.random.key(1), num_samples)
    steps = steps * StepLaw(**law.parameters).factors(len(steps))
    figures = [_figures(run) for run in runs_of(runs)]
    ours, theirs = _figures(steps), np.median(figures, axis=0)
    names = ("p50_s", "p95 / p50", "core_spread")
    return dict(zip(names, zip(ours, map(float, theirs), strict=True), strict=True))


def _figures(steps: Steps) -> tuple[float, float, float]:
    median = float(np.median(steps))
    return median, float(np.quantile(steps, 0.95)) / median, core_spread(steps)
