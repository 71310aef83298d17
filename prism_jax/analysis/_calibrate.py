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
from jaxtyping import Array, Float

from ..cluster import COLLECTIVES
from ..data import Calibrated, Job, Measured, Variation, apply_calibrated, load_kernels
from ..engine import Law, simulate
from ..latency import LogNormal, Scaled
from ..program import Program, Stall, compile_job
from ._estimate import estimate
from ._objectives import CRPS
from ._stall_prior import size_spread, stall_share


# A step so many robust standard deviations off the median of its run is not of the core.
_CORE_DEVIATIONS = 5.0
# What changes from step to step by itself is put down to collectives, of which those between steps
# are averaged by nothing, up to this spread; and to microbatches a part of that. Sequences are
# packed to one length in pre-training, so that the compute of a microbatch hardly changes. What
# would make collectives wilder still is put down to microbatches.
_WILDEST = 0.4
_MICROBATCH_PART = 1 / 30
_EXCESS_PART = 1 / 10
# The law of GPUs counts as much as so many runs.
_RANK_RUNS = 2
# The weight of the distance from where stalls began, in the score, relative to the spread.
_STAY = 1e-2
# The spread of collectives to begin with.
_SPREAD = 0.1


@dataclasses.dataclass(frozen=True)
class Observed:
    """What the step times of some runs of one job say.

    **Attributes:**

    - `median`: of the runs' medians, in seconds.
    - `steps`: those of a run between the runs: at each level the median of their quantiles,
        relative to their own medians.
    - `core`: the relative standard deviation of the core within a run, the median of the runs'.
    - `shared`: the share of its variance that a step has in common with the next.
    - `excess`: of the slow outliers over the median, in seconds.
    - `between`: the relative standard deviation of the runs' levels, less what they scatter by
        because a run is short; `None` for one run.
    - `num_runs`, `num_steps`.
    """

    median: float
    steps: Float[np.ndarray, " steps"]
    core: float
    shared: float
    excess: Float[np.ndarray, " outliers"]
    between: float | None
    num_runs: int
    num_steps: int


def observe(runs: Sequence[Float[np.ndarray, " steps"]]) -> Observed:
    """Takes step times apart: level, core, what steps share, outliers. Runs are not pooled.

    **Arguments:**

    - `runs`: the step times of each run in seconds, in their order.

    **Raises:**

    `ValueError` for fewer than 20 steps in all, a run of fewer than four, a step that is not a
    positive number, or a run whose steps are alike.
    """
    runs = [np.asarray(run, float) for run in runs]
    if sum(map(len, runs)) < 20 or min(map(len, runs), default=0) < 4:
        raise ValueError(
            f"{len(runs)} runs with {sum(map(len, runs))} steps are too few to calibrate to; give "
            "at least 20 steps, and 4 of each run."
        )
    if not all(np.all(np.isfinite(run) & (run > 0)) for run in runs):
        raise ValueError("Every measured step time must be a positive number of seconds.")
    if any(np.median(np.abs(run - np.median(run))) == 0 for run in runs):
        raise ValueError("Half of a run's step times are alike; give them as they were measured.")
    medians = np.array([np.median(run) for run in runs])
    relative = [run / middle - 1 for run, middle in zip(runs, medians, strict=True)]
    cores = [_core(steps) for steps in relative]
    weights = np.array([np.sum(~np.isnan(core)) for core in cores])
    moments = np.array([[_autocovariance(core, lag) for lag in (0, 1, 2)] for core in cores])
    pooled, one, two = weights @ moments / weights.sum()
    variance = float(np.median(moments[:, 0]))
    # An autoregressive factor beside white noise: its autocorrelation, and its share of the
    # variance.
    decay = float(np.clip(two / one, 0, 0.99)) if one > 0 else 0.0
    shared = float(np.clip(one / max(decay, 1e-9), one, pooled) / pooled) if decay else 0.0
    median = float(np.median(medians))
    pairs = zip(relative, cores, strict=True)
    slow = [steps[np.isnan(core) & (steps > 0)] for steps, core in pairs]
    number = int(np.median([len(run) for run in runs]))
    levels = (np.arange(number) + 0.5) / number
    between = None
    if len(runs) > 1:
        inflated = shared * (1 + decay) / (1 - decay) + 1 - shared
        of_means = pooled * inflated / np.mean(weights)
        between = float(np.sqrt(max(np.var(medians, ddof=1) / median**2 - of_means, 0)))
    return Observed(
        median,
        median * (1 + np.median([np.quantile(steps, levels) for steps in relative], axis=0)),
        float(np.sqrt(variance)),
        shared,
        median * np.concatenate(slow),
        between,
        len(runs),
        sum(map(len, runs)),
    )


def _core(steps: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    """Deviations from the mean of the core, with `nan` for what does not belong to it."""
    limit = _CORE_DEVIATIONS * 1.4826 * np.median(np.abs(steps))
    core = np.where(np.abs(steps) <= limit, steps, np.nan)
    return core - np.nanmean(core)


def _autocovariance(core: Float[np.ndarray, " steps"], lag: int) -> float:
    products = core[lag:] * core[: len(core) - lag]
    return float(np.nanmean(products)) if np.any(~np.isnan(products)) else 0.0


def calibrate(
    job: Job,
    runs: Sequence[Float[np.ndarray, " steps"]],
    *,
    source: str,
    num_samples: int = 8192,
    num_iterations: int = 12,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Job:
    """Calibrates what step times can tell of a job's kernels.

    - `compute`: a factor on the means of compute kernels, from the median.
    - `step`: what a step has in common with the next. The autocorrelation tells its share.
    - `all_gather`, `reduce_scatter`, `microbatch`: what changes by itself from step to step.
    - stalls of `gemm`: the slow outliers, a share and a size. The two regimes of the network are
      taken out: step times cannot tell one from the other.
    - `rank`: how much GPUs differ, from how much runs differ; only with two or more runs.

    All but the first and the last are fitted by CRPS, with the derivatives of `estimate`. How a
    step changes with the number of replicas, microbatches and GPUs follows from the program.

    **Arguments:**

    - `job`: with a model and a cluster.
    - `runs`: measured step times of each run in seconds, in their order.
    - `source`: where they are from, for the file.
    - `num_samples`, `num_iterations`: steps simulated for each derivative, and of the optimiser.
    - `seed`: of the samples.
    - `progress`: called with how much is done, and of how much.

    **Returns:**

    A job that differs in `calibrated`, `kernels` and `measured`.

    **Raises:**

    `ValueError` for too few steps, or a job without a model.
    """
    observed = observe(runs)
    compile_job(job)  # Raises where it has no model.
    kernels = job.kernels
    assert kernels is not None
    assert job.cluster is not None
    shipped = load_kernels(job.cluster).variability
    changed = tuple(v for v in kernels.variability if v not in shipped)
    job = _with(job, Calibrated(source, kernels.compute, changed))
    key = jax.random.key(seed)

    def law_of(job: Job) -> Law:
        return simulate(compile_job(job), num_samples=2 * num_samples, key=key, sampling="plain")

    job = _with_spread(job, observed, source, num_samples, num_iterations, key, progress)
    job = _with_level(job, observed, law_of)
    job = _with_level(_with_rank(job, observed, law_of), observed, law_of)
    return msgspec.structs.replace(job, measured=_measured(observed, source))


def _with(job: Job, calibrated: Calibrated) -> Job:
    """The job with these changes to its kernels alone."""
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)


def _with_laws(job: Job, *laws: Variation) -> Job:
    """The job with these laws in place of those for the same component of the same kind."""
    calibrated = job.calibrated
    assert calibrated is not None
    new = {(v.kernel, v.component): v for v in (*calibrated.variability, *laws)}
    return _with(job, msgspec.structs.replace(calibrated, variability=tuple(new.values())))


def _laws(observed: Observed, value: dict[str, float], source: str) -> tuple[Variation, ...]:
    """The laws of everything but the rank, from what is fitted: see `_start`."""
    microbatch, collective = (float(sigma) for sigma in _sigmas(value["spread"]))
    laws = [
        Variation("", "network", "constant", {}, source),
        Variation("", "step", "lognormal", {"sigma": value["step"]}, source),
        Variation("", "microbatch", "lognormal", {"sigma": microbatch}, source),
        Variation("all_gather", "residual", "lognormal", {"sigma": collective}, source),
        Variation("reduce_scatter", "residual", "lognormal", {"sigma": collective}, source),
    ]
    if "rate" in value:
        stall = {"sigma": size_spread(observed.excess), "median_s": value["size"]}
        stall["rate"] = value["rate"]
        laws.append(Variation("gemm", "stall", "lognormal", stall, source))
    return tuple(laws)


def _sigmas(spread) -> tuple[Array, Array]:
    """The spreads of microbatches and of collectives, from the one number that is fitted."""
    collective = _WILDEST * jnp.tanh(spread / _WILDEST)
    return _MICROBATCH_PART * spread + _EXCESS_PART * (spread - collective), collective


def _with_spread(
    job: Job,
    observed: Observed,
    source: str,
    num_samples: int,
    num_iterations: int,
    key: Array,
    progress: Callable[[int, int], None],
) -> Job:
    """Fits by CRPS what varies from step to step: the spread of the body, and the stalls.

    Without the factors of GPUs, which are the same in all steps of a run.
    """
    value = {"spread": _SPREAD, "step": float(np.sqrt(observed.shared)) * observed.core}
    if len(observed.excess):
        value |= {"rate": 0.0, "size": float(np.median(observed.excess))}
    job = _with_laws(job, *_laws(observed, value, source))
    kernels = job.kernels
    assert kernels is not None
    kept = tuple(v for v in kernels.variability if v.component != "rank")
    free = msgspec.structs.replace(kernels, variability=kept)
    program = compile_job(msgspec.structs.replace(job, kernels=free))
    start = _start(program, observed, value, num_samples, key)
    objective = CRPS(observed.steps)

    def values(moved: dict[str, Array]) -> dict[str, Array]:
        # What steps share and what changes by itself move as one: step times that are wider than
        # thought do not tell which of the two is.
        change = {name: jnp.exp(x) for name, x in moved.items()}
        change |= {"step": change["spread"], "level": jnp.exp(observed.core * moved["level"])}
        return {name: at * change[name] for name, at in start.items()}

    def loss(moved):
        there = _placed(program, observed, values(moved))
        score = estimate(there, objective, num_samples=num_samples, key=key)
        # Rate and size stay where they are unless steps say otherwise.
        away = sum(x**2 for name, x in moved.items() if name in ("rate", "size"))
        return score + _STAY * observed.core * observed.median * away

    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, num_iterations))
    moved = {name: jnp.zeros(()) for name in start if name != "step"}
    state: Any = optimiser.init(moved)
    for done in range(num_iterations):
        progress(done, num_iterations)
        gradient = eqx.filter_grad(loss)(moved)
        updates: Any
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes.
            updates, state = optimiser.update(gradient, state)
        moved = {name: x + updates[name] for name, x in moved.items()}
    progress(num_iterations, num_iterations)
    found = {name: float(x) for name, x in values(moved).items()}
    return _with_laws(job, *_laws(observed, found, source))


def _start(
    program: Program, observed: Observed, value: dict[str, float], num_samples: int, key: Array
) -> dict[str, float]:
    """Values to begin with: the factor `level` on compute, the `spread` of what changes by itself,
    that of the `step`, and the `rate` and `size` of stalls.
    """

    def law_at(**changes: float) -> Law:
        at = {name: jnp.asarray(x) for name, x in (start | changes).items()}
        there = _placed(program, observed, at)
        return simulate(there, num_samples=num_samples, key=key, sampling="plain")

    start = value | {"level": 1.0}
    if "rate" in start:
        mine = program.stall_kinds.value == sorted(program.variability.stalls).index("gemm")
        calls = float(np.sum(program.stall_counts.value[mine])) * program.num_replicas
        share = stall_share(len(observed.excess), observed.num_steps)
        start["rate"] = float(-np.log1p(-share)) / calls
    # What changes by itself has the rest of the variance, and is in proportion to `spread`.
    own = np.sqrt(max(observed.core**2 - start["step"] ** 2, 0.0))
    drawn = _spread(law_at(step=1e-9))
    start["spread"] = min(start["spread"] * max(float(own) / drawn, 0.05), _WILDEST)
    for _ in range(2):  # Compute is not all of a step.
        start["level"] *= observed.median / float(law_at().quantile(0.5))
    return start


def _placed(program: Program, observed: Observed, value: dict[str, Array]) -> Program:
    """The program with these values. Differentiable in them."""
    table, variability = program.latencies, program.variability
    is_compute = np.array([kind not in COLLECTIVES for kind in table.kinds])[table.kind.value]
    mean = table.mean * jnp.where(is_compute, value["level"], 1).astype(table.mean.dtype)
    microbatch, collective = (LogNormal(1.0, sigma) for sigma in _sigmas(value["spread"]))
    residual = dict(variability.residual)
    residual |= {kind: collective for kind in ("all_gather", "reduce_scatter") if kind in residual}
    stalls = dict(variability.stalls)
    if "rate" in value:
        size = Scaled(LogNormal(1.0, size_spread(observed.excess)), value["size"])
        stalls["gemm"] = Stall(value["rate"], size)
    return dataclasses.replace(
        program,
        latencies=dataclasses.replace(table, mean=mean),
        variability=dataclasses.replace(
            variability,
            residual=residual,
            step=LogNormal(1.0, value["step"]),
            microbatch=microbatch,
            stalls=stalls,
        ),
    )


def _with_level(job: Job, observed: Observed, law_of: Callable[[Job], Law]) -> Job:
    """Scales compute until the medians agree."""
    calibrated = job.calibrated
    for _ in range(4):
        assert calibrated is not None
        ratio = observed.median / law_of(job).quantile(0.5)
        # Compute is most of a step, so a little more than the ratio is needed.
        calibrated = msgspec.structs.replace(
            calibrated, compute=calibrated.compute * float(ratio) ** 1.1
        )
        job = _with(job, calibrated)
        if abs(ratio - 1) < 1e-4:
            break
    return job


def _with_rank(job: Job, observed: Observed, law_of: Callable[[Job], Law]) -> Job:
    """Scales how much GPUs differ to how much runs do, where there are two or more.

    The posterior mean of a variance of which the profile knows as much as some runs would.
    """
    assert job.kernels is not None
    rank = job.kernels.find_variation("rank")
    if observed.between is None or rank is None or not rank.parameters.get("sigma"):
        return job
    silent = msgspec.structs.replace(rank, parameters={**rank.parameters, "sigma": 0.0})
    now = _spread(law_of(job)) ** 2 - _spread(law_of(_with_laws(job, silent))) ** 2
    if now <= 0:
        return job
    runs = observed.num_runs - 1
    factor = (_RANK_RUNS + runs * observed.between**2 / now) / (_RANK_RUNS + runs)
    sigma = rank.parameters["sigma"] * float(np.sqrt(factor))
    return _with_laws(
        job,
        msgspec.structs.replace(
            rank,
            parameters={**rank.parameters, "sigma": sigma},
            source=f"{rank.source}; scaled to how much {observed.num_runs} runs differ",
        ),
    )


def _spread(law: Law) -> float:
    """Half the distance of the outer quantiles of the body, relative to the median."""
    low, middle, high = (law.quantile(q) for q in (0.1587, 0.5, 0.8413))
    return float((high - low) / (2 * middle))


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
