"""Calibrating a job to the step times of a run of it, so that other scales can be predicted."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from .._progress import progress_bar
from ..analysis import CRPS, estimate
from ..data import Job, Kernels, Measured, Variation
from ..engine import check_program, simulate
from ..program import Program, compile_job, variability_of
from ._agreement import LEVELS, of_one_run
from ._calibrated_job import with_compute, with_laws, without_calibration
from ._level_and_spread import Steps, solve_level, with_level, with_spread
from ._observe import Observed, observe
from ._stall_prior import stall_share
from ._values import Values, as_numbers, laws_of, program_with, values_of, with_values


# The law of GPUs counts as much as so many runs.
_RANK_RUNS = 2
# The weight of the distance from where stalls began, in the score, relative to the spread.
_STAY = 1e-2
# A program is compiled for so many times as many stalls as are seen, for the fit to move in.
_HEADROOM = 4


def calibrate(
    job: Job,
    runs: Sequence[Float[np.ndarray, " steps"]],
    *,
    source: str,
    key: PRNGKeyArray,
    num_samples: int = 8192,
    num_iterations: int = 12,
    progress: bool = False,
) -> Job:
    """Calibrates what step times can tell of a job's kernels.

    - `compute`: a factor on the means of compute kernels, from the median.
    - `step`: what a step has in common with the next. The autocorrelation tells its share.
    - `all_gather`, `reduce_scatter`, `microbatch`: what changes by itself from step to step. What
        these cannot explain is put down to `step`; where they leave no room, the noise of all
        kernels is made less.
    - stalls of `gemm`: the slow outliers, a share and a size. The two regimes of the network are
      taken out: step times cannot tell one from the other.
    - `rank`: how much GPUs differ, from how much runs differ; only with two or more runs.

    Level and spread are solved for; then all but the `rank` are fitted by CRPS, with the
    derivatives of `estimate`. How a step changes with the number of replicas, microbatches and GPUs
    follows from the program. An earlier calibration of the job is replaced.

    **Arguments:**

    - `job`: with a model and a cluster.
    - `runs`: measured step times of each run in seconds, in their order.
    - `source`: where they are from, for the file.
    - `key`: a `jax.random` key.
    - `num_samples`, `num_iterations`: steps simulated for each derivative, and of the optimiser.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A job that differs in `calibrated`, `kernels` and `measured`.

    **Raises:**

    `ValueError` for too few steps, a job without a model, or a median that the job cannot have.
    """
    observed = observe(runs)
    check_program(compile_job(job), key)  # Raises where the job has no model.
    job = without_calibration(job, source)
    kernels = job.kernels
    assert kernels is not None
    program, value = _started(job, kernels, observed)

    def steps_of(program: Program) -> Steps:
        """Evenly spaced quantiles of a step, as a function of what is calibrated."""

        def steps(value: Values) -> np.ndarray:
            there = program_with(program, kernels, observed, value)
            law = simulate(there, num_samples=2 * num_samples, key=key)
            return np.asarray(law.quantile(LEVELS))

        return steps

    # The steps of a run share their GPUs, which decide its level, not its spread.
    one = of_one_run(program)
    value = with_level(value, observed, steps_of(one))
    value = with_spread(value, observed, steps_of(one))
    value = with_level(value, observed, steps_of(one))

    def score(value: Values) -> Array:
        there = program_with(one, kernels, observed, value)
        return estimate(there, CRPS(observed.steps), num_samples=num_samples, key=key)

    value = _fitted(score, value, observed, num_iterations, progress)
    laws = as_numbers(laws_of(kernels, observed, value, source))
    job = with_laws(job, (*laws, *_rank(kernels, program, value, observed, steps_of)))

    def median(compute: float) -> float:
        there = compile_job(with_compute(job, compute))
        return float(simulate(there, num_samples=4 * num_samples, key=key).quantile(0.5))

    # Faster kernels hide less of the communication, which only the job knows.
    job = with_compute(job, solve_level(median, observed.median, float(value.level)))
    return msgspec.structs.replace(job, measured=_measured(observed, source))


def _started(job: Job, kernels: Kernels, observed: Observed) -> tuple[Program, Values]:
    """A program that can take all values, and those to begin with."""

    def compiled(value: Values) -> Program:
        return compile_job(with_laws(job, as_numbers(laws_of(kernels, observed, value, ""))))

    step = float(np.sqrt(observed.shared)) * observed.core
    size = float(np.median(observed.excess)) if len(observed.excess) else 0.0
    value = values_of(level=1.0, step=step, spread=0.1, others=1.0, rate=0.0, size=size)
    program = compiled(value)
    if not len(observed.excess):
        return program, value
    mine = program.stall_kinds.value == sorted(program.variability.stalls).index("gemm")
    calls = float(np.sum(program.stall_counts.value[mine])) * program.num_replicas
    rate = float(-np.log1p(-stall_share(len(observed.excess), observed.num_steps))) / calls
    program = compiled(with_values(value, rate=_HEADROOM * rate))
    return program, with_values(value, rate=rate)


def _fitted(
    score: Callable[[Values], Array],
    start: Values,
    observed: Observed,
    num_iterations: int,
    progress: bool,
) -> Values:
    """The level, the spread of the body and the stalls that have the best score."""

    def values(moved: dict[str, Array]) -> Values:
        # What steps share and what changes by itself move as one: step times that are wider than
        # thought do not tell which of the two is.
        wider = jnp.exp(moved["spread"])
        return Values(
            level=start.level * jnp.exp(observed.core * moved["level"]),
            step=start.step * wider,
            spread=start.spread * wider,
            others=start.others * jnp.where(start.others < 1, wider, 1),
            rate=start.rate * jnp.exp(moved["rate"]),
            size=start.size * jnp.exp(moved["size"]),
        )

    def loss(moved):
        # Rate and size stay where they are unless steps say otherwise.
        away = moved["rate"] ** 2 + moved["size"] ** 2
        return score(values(moved)) + _STAY * observed.core * observed.median * away

    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, num_iterations))
    moved: dict[str, Array] = {n: jnp.zeros(()) for n in ("level", "spread", "rate", "size")}
    state: Any = optimiser.init(moved)
    with progress_bar(num_iterations, progress, "calibration", "iteration") as advance:
        for _ in range(num_iterations):
            gradient = eqx.filter_grad(loss)(moved)
            updates: Any
            with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes.
                updates, state = optimiser.update(gradient, state)
            moved = {name: x + updates[name] for name, x in moved.items()}
            advance(1)
    return values(moved)


def _rank(
    kernels: Kernels,
    program: Program,
    value: Values,
    observed: Observed,
    steps_of: Callable[[Program], Steps],
) -> tuple[Variation, ...]:
    """How much GPUs differ, scaled to how much runs do, where there are two or more.

    The posterior mean of a variance of which the profile knows as much as some runs would.
    """
    rank = kernels.find_variation("rank")
    if observed.between is None or rank is None or not rank.parameters.get("sigma"):
        return ()

    def scaled(sigma: float, source: str) -> Variation:
        parameters = {**rank.parameters, "sigma": sigma}
        return msgspec.structs.replace(rank, parameters=parameters, source=source)

    def variance(sigma: float) -> float:
        law = variability_of([scaled(sigma, rank.source)]).rank
        variability = dataclasses.replace(program.variability, rank=law)
        steps = steps_of(dataclasses.replace(program, variability=variability))(value)
        low, middle, high = np.quantile(steps, [0.1587, 0.5, 0.8413])
        return float((high - low) / (2 * middle)) ** 2

    sigma = rank.parameters["sigma"]
    now = variance(sigma) - variance(0.0)
    if now <= 0:
        return ()
    runs = observed.num_runs - 1
    factor = (_RANK_RUNS + runs * observed.between**2 / now) / (_RANK_RUNS + runs)
    source = f"{rank.source}; scaled to how much {observed.num_runs} runs differ"
    return (scaled(sigma * float(np.sqrt(factor)), source),)


def _measured(observed: Observed, source: str) -> Measured:
    steps = observed.steps
    return Measured(
        source=source,
        mean_s=float(np.mean(steps)),
        std_s=float(np.std(steps, ddof=1)),
        p50_s=observed.median,
        p95_s=float(np.quantile(steps, 0.95)),
        num_samples=observed.num_steps,
    )
