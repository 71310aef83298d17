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

from ..analysis import CRPS, estimate
from ..cluster import COLLECTIVES
from ..data import Calibrated, Job, Measured, Variation, apply_calibrated, load_kernels
from ..engine import simulate
from ..latency import LogNormal, Scaled, make_latency
from ..program import Program, Stall, compile_job
from ._observe import Observed, core_spread, observe
from ._stall_prior import size_spread, stall_share


# What changes from step to step by itself is put down to collectives, of which those between steps
# are averaged by nothing, up to this spread; and to microbatches a part of that. Sequences are
# packed to one length in pre-training, so that the compute of a microbatch hardly changes. What is
# wider still is put down to the step as a whole.
_WILDEST = 0.4
_MICROBATCH_PART = 1 / 30
# The kinds of kernel that `spread` applies to; `others` to the rest.
_WILD = ("all_gather", "reduce_scatter")
# The law of GPUs counts as much as so many runs.
_RANK_RUNS = 2
# The weight of the distance from where stalls began, in the score, relative to the spread.
_STAY = 1e-2
# A program is compiled for so many times as many stalls as are seen, for the fit to move in.
_HEADROOM = 4
# A level further off than this factor is a mistake in the job or in the unit.
_FURTHEST = 10.0
_GRID = (np.arange(2000) + 0.5) / 2000


class Values(eqx.Module):
    """What is calibrated.

    **Attributes:**

    - `level`: a factor on the mean latency of compute.
    - `step`: the spread of what a step shares with the next.
    - `spread`: that of collectives, and in part of microbatches.
    - `others`: a factor on the spread of all other kernels, where even no `spread` is too wide.
    - `rate`, `size`: stalls per call, and the median of their length in seconds; `rate` is zero
        where there are none.
    """

    level: Array
    step: Array
    spread: Array
    others: Array
    rate: Array
    size: Array


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
    - `num_samples`, `num_iterations`: steps simulated for each derivative, and of the optimiser.
    - `seed`: of the samples.
    - `progress`: called with how much is done, and of how much.

    **Returns:**

    A job that differs in `calibrated`, `kernels` and `measured`.

    **Raises:**

    `ValueError` for too few steps, a job without a model, or a median that the job cannot have.
    """
    observed = observe(runs)
    compile_job(job)  # Raises where it has no model.
    job = without_calibration(job, source)
    program, value = _started(job, observed)
    key = jax.random.key(seed)
    free = dataclasses.replace(
        program, variability=dataclasses.replace(program.variability, rank=None)
    )

    def steps_of(program: Program) -> Callable[[Values], np.ndarray]:
        """Evenly spaced quantiles of a step, as a function of what is calibrated."""

        def steps(value: Values) -> np.ndarray:
            there = _placed(program, observed, value)
            law = simulate(there, num_samples=2 * num_samples, key=key)
            return np.asarray(law.quantile(_GRID))

        return steps

    # The steps of a run share their GPUs, which decide its level, not its spread.
    value = _with_level(value, observed, steps_of(free))
    value = _with_spread(value, observed, steps_of(free))
    value = _with_level(value, observed, steps_of(free))
    value = _fitted(free, value, observed, num_samples, num_iterations, key, progress)
    rank = _rank(job, program, value, observed, steps_of)
    job = _with_laws(job, (*_laws(job, observed, value, source), *rank))

    def at(compute: float) -> Job:
        assert job.calibrated is not None
        return _with(job, msgspec.structs.replace(job.calibrated, compute=compute))

    def median(compute: float) -> float:
        law = simulate(compile_job(at(compute)), num_samples=4 * num_samples, key=key)
        return float(law.quantile(0.5))

    # Faster kernels hide less of the communication, which only the job knows.
    job = at(_level(median, observed.median, float(value.level)))
    return msgspec.structs.replace(job, measured=_measured(observed, source))


def agreement(
    job: Job, runs: Sequence[Float[np.ndarray, " steps"]], *, num_samples: int = 32768
) -> dict[str, tuple[float, float]]:
    """Figures of the steps of one run, by a calibrated job and as measured (the median of the
    runs' figures). The GPUs of a run stay the same, so they make its level, not its spread.

    **Returns:**

    `p50_s`, `p95 / p50` and `core_spread`, a pair each.
    """
    program, key = compile_job(job), jax.random.key(1)
    free = dataclasses.replace(
        program, variability=dataclasses.replace(program.variability, rank=None)
    )
    level, spread = (simulate(p, num_samples=num_samples, key=key) for p in (program, free))
    steps = np.asarray(spread.quantile(_GRID))
    measured = [(np.median(run), np.quantile(run, 0.95), core_spread(run)) for run in runs]
    p50, core = (float(np.median(x)) for x in np.transpose(measured)[[0, 2]])
    ratio = float(spread.quantile(0.95) / spread.quantile(0.5))
    return {
        "p50_s": (float(level.quantile(0.5)), p50),
        "p95 / p50": (ratio, float(np.median([b / a for a, b, _ in measured]))),
        "core_spread": (core_spread(steps), core),
    }


def without_calibration(job: Job, source: str) -> Job:
    """The job without what an earlier calibration has said, but with the changes that were made to
    its kernels since (by `--set`).
    """
    assert job.cluster is not None
    assert job.kernels is not None
    known = list(load_kernels(job.cluster).variability)
    if job.calibrated is not None:
        known += job.calibrated.variability
    changed = tuple(v for v in job.kernels.variability if v not in known)
    return _with(job, Calibrated(source, 1.0, changed))


def _with(job: Job, calibrated: Calibrated) -> Job:
    """The job with these changes to its kernels alone."""
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)


def _with_laws(job: Job, laws: Sequence[Variation]) -> Job:
    """The job with these laws in place of those for the same component of the same kind."""
    calibrated = job.calibrated
    assert calibrated is not None
    new = {(v.kernel, v.component): v for v in (*calibrated.variability, *laws)}
    return _with(job, msgspec.structs.replace(calibrated, variability=tuple(new.values())))


def _started(job: Job, observed: Observed) -> tuple[Program, Values]:
    """A program that can take all values, and those to begin with."""
    step = float(np.sqrt(observed.shared)) * observed.core
    size = float(np.median(observed.excess)) if len(observed.excess) else 0.0
    value = [1.0, step, 0.1, 1.0, 0.0, size]
    program = _compiled(job, observed, value)
    if len(observed.excess):
        mine = program.stall_kinds.value == sorted(program.variability.stalls).index("gemm")
        calls = float(np.sum(program.stall_counts.value[mine])) * program.num_replicas
        share = stall_share(len(observed.excess), observed.num_steps)
        value[4] = float(-np.log1p(-share)) / calls
        program = _compiled(job, observed, [*value[:4], _HEADROOM * value[4], size])
    return program, Values(*(jnp.asarray(x, float) for x in value))


def _compiled(job: Job, observed: Observed, value: list[float]) -> Program:
    values = Values(*(jnp.asarray(x, float) for x in value))
    return compile_job(_with_laws(job, _laws(job, observed, values, "")))


def _laws(job: Job, observed: Observed, value: Values, source: str) -> tuple[Variation, ...]:
    """The laws of everything but the rank, for the job's file. See `_placed`."""
    assert job.kernels is not None
    step, spread, others, rate, size = (
        float(x) for x in (value.step, value.spread, value.others, value.rate, value.size)
    )
    collective = min(spread, _WILDEST)
    laws = [
        Variation("", "network", "constant", {}, source),
        Variation("", "step", "lognormal", {"sigma": step}, source),
        Variation("", "microbatch", "lognormal", {"sigma": spread * _MICROBATCH_PART}, source),
        *(Variation(k, "residual", "lognormal", {"sigma": collective}, source) for k in _WILD),
    ]
    if others < 1:
        laws += [
            msgspec.structs.replace(v, parameters={"sigma": others * v.parameters["sigma"]})
            for v in job.kernels.variability
            if v.component == "residual" and v.kernel not in _WILD and v.family == "lognormal"
        ]
    if len(observed.excess):
        stall = {"sigma": size_spread(observed.excess), "median_s": size, "rate": rate}
        laws.append(Variation("gemm", "stall", "lognormal", stall, source))
    return tuple(laws)


def _placed(program: Program, observed: Observed, value: Values) -> Program:
    """The program with these values. Differentiable in them."""
    table, variability = program.latencies, program.variability
    is_compute = np.array([kind not in COLLECTIVES for kind in table.kinds])[table.kind.value]
    mean = table.mean * jnp.where(is_compute, value.level, 1).astype(table.mean.dtype)
    collective = LogNormal(1.0, jnp.minimum(value.spread, _WILDEST))
    residual = {
        kind: collective
        if kind in _WILD
        else LogNormal(law.median, law.sigma * value.others)
        if isinstance(law, LogNormal)
        else law
        for kind, law in variability.residual.items()
    }
    stalls = dict(variability.stalls)
    if len(observed.excess):
        size = Scaled(LogNormal(1.0, size_spread(observed.excess)), value.size)
        stalls["gemm"] = Stall(value.rate, size)
    return dataclasses.replace(
        program,
        latencies=dataclasses.replace(table, mean=mean),
        variability=dataclasses.replace(
            variability,
            residual=residual,
            step=LogNormal(1.0, value.step),
            microbatch=LogNormal(1.0, value.spread * _MICROBATCH_PART),
            stalls=stalls,
        ),
    )


Steps = Callable[[Values], np.ndarray]


def _level(median: Callable[[float], float], wanted: float, known: float = 1.0) -> float:
    """The level of compute at which a step has the median that is wanted, by secants."""
    before, of_before, first = 0.0, 0.0, None
    for _ in range(10):
        found = median(known)
        first = found if first is None else first
        if abs(found / wanted - 1) < 1e-4 or found == of_before:
            break
        slope = (found - of_before) / (known - before)
        before, of_before, known = known, found, known + (wanted - found) / slope
        if not 1 / _FURTHEST < known < _FURTHEST:
            raise ValueError(
                f"The measured median of {wanted:.4g} s is too far from the job's {first:.4g} s: "
                f"no factor of up to {_FURTHEST:g} on compute explains it; check the unit of the "
                "step times, and the job."
            )
    return known


def _with_level(value: Values, observed: Observed, steps: Steps) -> Values:
    """The values with which the medians agree."""

    def median(level: float) -> float:
        return float(np.median(steps(_with_values(value, level=level))))

    level = _level(median, observed.median, float(value.level))
    return _with_values(value, level=level)


def _with_spread(value: Values, observed: Observed, steps: Steps) -> Values:
    """The spread at which the cores are as wide, by bisection."""

    def too_wide(**changes: float) -> float:
        return core_spread(steps(_with_values(value, **changes))) / observed.core - 1

    def solved(name: str, low: float, high: float) -> float:
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (low, middle) if too_wide(**{name: middle}) > 0 else (middle, high)
        return (low + high) / 2

    if too_wide(spread=0.0) > 0:
        value = _with_values(value, spread=0.0)
        return _with_values(value, others=solved("others", 0.0, 1.0))
    missing = too_wide(spread=_WILDEST)
    if missing > 0:
        return _with_values(value, spread=solved("spread", 0.0, _WILDEST))
    value = _with_values(value, spread=_WILDEST)
    own = (1 + missing) ** 2 - (float(value.step) / observed.core) ** 2
    step = observed.core * float(np.sqrt(max(1 - own, 0.0)))
    return _with_values(value, step=max(step, float(value.step)))


def _with_values(value: Values, **changes: float) -> Values:
    dtype = value.level.dtype
    return dataclasses.replace(value, **{k: jnp.asarray(x, dtype) for k, x in changes.items()})


def _fitted(
    program: Program,
    start: Values,
    observed: Observed,
    num_samples: int,
    num_iterations: int,
    key: PRNGKeyArray,
    progress: Callable[[int, int], None],
) -> Values:
    """Fits by CRPS the level, the spread of the body, and the stalls."""
    objective = CRPS(observed.steps)

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
        there = _placed(program, observed, values(moved))
        score = estimate(there, objective, num_samples=num_samples, key=key)
        # Rate and size stay where they are unless steps say otherwise.
        away = moved["rate"] ** 2 + moved["size"] ** 2
        return score + _STAY * observed.core * observed.median * away

    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, num_iterations))
    moved: dict[str, Array] = {n: jnp.zeros(()) for n in ("level", "spread", "rate", "size")}
    state: Any = optimiser.init(moved)
    for done in range(num_iterations):
        progress(done, num_iterations)
        gradient = eqx.filter_grad(loss)(moved)
        updates: Any
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes.
            updates, state = optimiser.update(gradient, state)
        moved = {name: x + updates[name] for name, x in moved.items()}
    progress(num_iterations, num_iterations)
    return values(moved)


def _rank(
    job: Job,
    program: Program,
    value: Values,
    observed: Observed,
    steps_of: Callable[[Program], Steps],
) -> tuple[Variation, ...]:
    """How much GPUs differ, scaled to how much runs do, where there are two or more.

    The posterior mean of a variance of which the profile knows as much as some runs would.
    """
    assert job.kernels is not None
    rank = job.kernels.find_variation("rank")
    if observed.between is None or rank is None or not rank.parameters.get("sigma"):
        return ()

    def variance(sigma: float) -> float:
        law = make_latency(rank.family, {**rank.parameters, "sigma": sigma})
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
    parameters = {**rank.parameters, "sigma": sigma * float(np.sqrt(factor))}
    source = f"{rank.source}; scaled to how much {observed.num_runs} runs differ"
    return (msgspec.structs.replace(rank, parameters=parameters, source=source),)


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
