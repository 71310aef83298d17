"""How a step would change: by each cause of slow steps, at some values of its one parameter; and by
what could be set otherwise.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import msgspec
import numpy as np
from jaxtyping import Float
from scipy.special import gammaincinv

from ..analysis import Scenario, slow_rank
from ..calibration import STEP_LEVELS, StepLaw
from ..data import Job, apply_kernel_override, parse_override
from ..engine import Run, prepare, steps_of_run
from ..lowering import job_parts
from ..prediction import memory, predict
from ..program import Program, compile_job


# Of the steps with a stall, and the spread of the logarithm of their lengths.
_STALLED, _STALL_SIGMA = 0.03, 0.7
# A loader's time for a batch differs from batch to batch, unlike that of kernels: how often and how
# large files are read is not even. The standard deviation over the mean is an assumption.
_WAIT_CV = 0.3
# By which share a mean step is longer: up to a factor of twenty, 24 values for each factor of ten.
# All are equally likely, whatever the cause, so that causes with the same effect are as likely, and
# those up to a factor of two together as likely as nothing.
UP_TO_TWO = 49
EFFECTS = 0.01 * 100 ** (np.arange(81) / (UP_TO_TWO - 1))


@dataclasses.dataclass(frozen=True)
class Explained:
    """What a cause does.

    **Attributes:**

    - `name`, `parameter`: the cause, and what its parameter is.
    - `values`: the values of the parameter with which the mean step is longer by the first of
        `EFFECTS`; larger effects are not possible.
    - `factors`: `(values, 500)`, the quantiles of a step over those without the cause.
    - `trend`: for each value, the logarithm of the last step over the first.
    """

    name: str
    parameter: str
    values: Float[np.ndarray, " values"]
    factors: Float[np.ndarray, "values levels"]
    trend: Float[np.ndarray, " values"]


# By cause: its parameter, the value without effect, and those with one. Of causes that are as
# likely, the first is listed first: what is most often asked about in public.
_PARAMETERS = {
    "congested-link": ("factor on the time of the outermost link", 1.0, 3.0, 20.0, 400.0),
    "slow-rank": ("factor on the compute of one rank", 1.0, 1.3, 3.0, 30.0),
    "launch-bound": ("shortest time of a kernel, in s", 0.0, 1e-4, 5e-4, 1e-2),
    "no-overlap": ("missing overlap over all that is predicted", 0.0, 1.0),
    "unbalanced-experts": ("factor on the spread of loads", 1.0, 3.0, 10.0),
}
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_tp_backward", "tp_overlap")
TELLS = {
    "slow-rank": "a trace of every rank (`--trace`): the slow one computes while others wait; and "
    "the clocks, power limits, processor affinity and paging of each node",
    "congested-link": "a bandwidth test of the links (nccl-tests), node by node; and whether NCCL "
    "uses RDMA, and not sockets (`NCCL_DEBUG=INFO`)",
    "no-overlap": "a trace of one rank (`--trace`): the share of communication under compute",
    "launch-bound": "a trace of one rank (`--trace`): the gaps between its kernels; and whether "
    "they are fused and compiled as by the job's stack",
    "input": "the step with batches that are in memory already, or how long it waits for a loader",
    "unbalanced-experts": "the numbers of tokens of each expert, which the router can log",
    "stalls": "times of slow steps beside logs of garbage collection, checkpoints and data",
    "drift": "clocks, temperatures and the step time again after a restart",
}
# What has to be changed, the cheapest first.
_COSTS = ("a flag", "the order of work", "the precision", "the machine")
_FLAG, _ORDER, _PRECISION, _MACHINE = _COSTS
# What is tried of `training`, where it differs from what the job has.
_FLAGS = (
    "overlap_grad_reduce=true overlap_param_gather=true overlap_tp_backward=true tp_overlap=true "
    "sequence_parallel=true accumulate_gradients=true overlap_shared_experts=true zero=1 "
    "fused_experts=true recompute=none recompute=selective attention=flash "
    "attention=cudnn token_dispatcher=deepep token_dispatcher=hybridep cuda_graphs=modules"
)
_LEAST = 0.002  # The share of a step that is worth a line,
_SEEN = 1e-4  # and that which is worth a slider.


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Simulated steps of a job, and all that is needed to simulate changed ones.

    **Attributes:**

    - `job`, `key`, `run`: the job, and how it was simulated.
    - `steps`: the steps, in seconds.
    """

    job: Job
    key: "jax.Array"
    run: Run
    steps: Float[np.ndarray, " steps"]

    def of(self, scenario: Scenario) -> Float[np.ndarray, " steps"]:
        """The steps of a scenario, with common random numbers."""
        run, few, number = _run(scenario.program, self.key), scenario.replicas, len(self.steps)
        if few is not None and few < self.run.program.num_replicas:
            return steps_of_run(self.run, num_samples=number, unlike=(run, few)).steps
        return steps_of_run(run, num_samples=number).steps


def simulated(job: Job, num_samples: int, key: "jax.Array") -> Simulated:
    """Simulates steps of a job with a model."""
    run = _run(compile_job(job), key)
    return Simulated(job, key, run, steps_of_run(run, num_samples=num_samples).steps)


def _run(program: Program, key: "jax.Array") -> Run:
    """A run with factors on a rank, so that all share code with that of a slow one. Samples are
    plain: what changes a step by a per cent can be seen without more of its tail.
    """
    if program.adjustment is None:
        program = slow_rank(program, program.num_ranks // 2, 1.0).program
    return prepare(program, key)


def explained(usual: Simulated) -> Iterator[Explained]:
    """What each cause would do to the usual steps of a job."""
    before = np.quantile(usual.steps, STEP_LEVELS)
    for name, (parameter, nothing, *values_with_effect) in _PARAMETERS.items():
        changed = [scenario_of(name, value, usual) for value in values_with_effect]
        steps = [usual.of(scenario) for scenario in changed if scenario is not None]
        if not steps:
            continue
        factors = np.stack([before, *(np.quantile(x, STEP_LEVELS) for x in steps)]) / before
        grid = np.array([nothing, *values_with_effect])
        # The last value may do half more than is predicted: a level of kernels is not known better.
        grid, factors = (np.concatenate([x, [1.5 * x[-1] - 0.5 * x[-2]]]) for x in (grid, factors))
        # The values with the `EFFECTS`, between those at which steps were simulated.
        effects = np.maximum.accumulate(factors.mean(axis=1) - 1)
        values = np.interp(EFFECTS[effects[-1] >= EFFECTS], effects, grid)
        between = [np.interp(values, grid, column) for column in factors.T]
        yield Explained(name, parameter, values, np.stack(between, axis=1), 0 * values)
    laws = (StepLaw(0.0, _STALLED, share / _STALLED, _STALL_SIGMA) for share in EFFECTS)
    drawn = (np.sort(law.factors(len(before))) for law in laws)
    paused = np.stack([row / np.median(row) for row in drawn])
    yield Explained("stalls", "time that is lost over the rest", EFFECTS, paused, 0 * EFFECTS)
    waits = _WAIT_CV**2 * gammaincinv(_WAIT_CV**-2, STEP_LEVELS)  # A gamma law of mean one.
    waiting = 1 + EFFECTS[:, None] * waits
    yield Explained("input", "time that a step waits over the rest", EFFECTS, waiting, 0 * EFFECTS)
    slower = (1 + EFFECTS)[:, None] * np.ones(len(before))
    trend = 2 * np.log1p(EFFECTS)
    yield Explained("drift", "growth of a step over the series", np.expm1(trend), slower, trend)


def scenario_of(name: str, value: float, usual: Simulated) -> Scenario | None:
    """The changed step; `None` if the job has nothing that could be changed so."""
    job, program = usual.job, usual.run.program
    if name == "slow-rank":
        return slow_rank(program, program.num_ranks // 2, value)
    if name == "unbalanced-experts":
        if (loads := program.loads) is None or loads.unevenness is None:
            return None
        wider = loads.unevenness.spread * value
        return Scenario(eqx.tree_at(lambda p: p.loads.unevenness.spread, program, wider))
    if name == "congested-link":
        return Scenario(compile_job(with_bandwidth(job, 1 / value)))
    if name == "no-overlap":
        return Scenario(compile_job(_with(job, "training", **dict.fromkeys(_OVERLAPS, False))))
    training = job_parts(job).training
    graphs = "none" if training.cuda_graphs == "iteration" else training.cuda_graphs
    floor = max(value, training.launch_floor_s)
    job = _with(job, "training", launch_floor_s=floor, cuda_graphs=graphs)
    return Scenario(compile_job(job))


def with_bandwidth(job: Job, factor: float) -> Job:
    """The job with a factor on the bandwidth of the outermost link."""
    *inner, link = job_parts(job).cluster.links
    bandwidth = factor * link.bandwidth_bytes_per_s
    link = msgspec.structs.replace(link, bandwidth_bytes_per_s=bandwidth)
    return _with(job, "cluster", links=(*inner, link))


# What a report's sliders set.
_REPLICAS = "replicas (dp), same batch"
_SIZE = "microbatch size, same batch"
_BANDWIDTH, _LIMIT = "bandwidth of the outermost link", "power limit of a GPU"


@dataclasses.dataclass(frozen=True)
class Setting:
    """**Attributes:**

    - `name`, `own`: what one can set, and the value of the job.
    - `factors`: by value, rising: a step with it over one of the job, both without variability.
    - `unit`: of the values, such as ` W`; `x` is for factors.
    """

    name: str
    own: float
    factors: Mapping[float, float]
    unit: str = ""

    def label(self, value: float) -> str:
        """A value, as it is shown."""
        return f"x {value:g}" if self.unit == "x" else f"{value:g}{self.unit}"


def settings_of(job: Job) -> tuple[Setting, ...]:
    """What one can set of a job with a model, of which several values divide its batch and fit in
    memory, if the job does, and which matters.
    """
    replicas, power = job.layout.dp, job_parts(job).cluster.device.power
    size, fits = job_parts(job).training.microbatch_size, memory(job).fits
    now = predict(job).mean
    tried = [
        (_REPLICAS, replicas, [replicas * x for x in (0.5, 1, 2)], ""),
        (_SIZE, size, [size * x for x in (0.5, 1, 2)], ""),
        (_BANDWIDTH, 1.0, [0.5, 0.7, 1.0, 1.4, 2.0], "x"),
    ]
    if power is not None:
        limits = [float(round(power.limit_w * x)) for x in (0.6, 0.7, 0.8, 0.9)]
        tried.append((_LIMIT, power.limit_w, [*limits, power.limit_w], " W"))
    settings = []
    for name, own, values, unit in tried:
        factors = {}
        for value in values:
            with contextlib.suppress(ValueError):  # It does not go with this job.
                changed = job if value == own else with_setting(job, name, value)
                if value == own or memory(changed).fits or not fits:
                    factors[value] = predict(changed).mean / now
        if factors and max(factors.values()) - min(factors.values()) > _SEEN:
            settings.append(Setting(name, own, factors, unit))
    return tuple(settings)


def with_setting(job: Job, name: str, value: float) -> Job:
    """The job with another value of one of its `settings_of`. Its batch stays the same, and so its
    microbatches follow.

    **Raises:**

    `ValueError` if they do not divide the batch.
    """
    cluster = job_parts(job).cluster
    if name == _BANDWIDTH:
        return with_bandwidth(job, value)
    if name == _LIMIT and (power := cluster.device.power):
        power = msgspec.structs.replace(power, limit_w=value)
        return _with(job, "cluster", device=msgspec.structs.replace(cluster.device, power=power))
    replicas = value if name == _REPLICAS else job.layout.dp
    size = value if name == _SIZE else job_parts(job).training.microbatch_size
    number = job.batch_size / (replicas * size)
    if number % 1 or replicas % 1 or size % 1:
        raise ValueError(f"{replicas:g} x {size:g} samples do not divide the batch.")
    job = _with(job, "layout", dp=int(replicas))
    job = _with(job, "training", microbatch_size=int(size))
    job = _with(job, "schedule", num_microbatches=int(number))
    nodes = max(cluster.num_nodes, -(-job.layout.world_size // cluster.devices_per_node))
    return _with(job, "cluster", num_nodes=nodes)


def _with(job: Job, part: str, **values: Any) -> Job:
    """The job with other values of keys of one of its parts."""
    changed = msgspec.structs.replace(getattr(job, part), **values)
    return msgspec.structs.replace(job, **{part: changed})


@dataclasses.dataclass(frozen=True)
class Change:
    """**Attributes:**

    - `set`: the keys of the job to set, as of `--set`.
    - `cost`: what has to be changed.
    - `p50`, `p95`: by how much these fall, in seconds.
    """

    set: tuple[str, ...]
    cost: str
    p50: float
    p95: float


class _Predicted(NamedTuple):
    """The share by which a step without variability is shorter, and what to set for it."""

    gain: float
    cost: str
    set: tuple[str, ...]
    job: Job


def cheapest_changes(usual: Simulated, most: int = 5) -> tuple[Change, ...]:
    """The changes that shorten a step most, the cheapest first: flags, then the order of work, then
    the precision, then the machine. Each fits in memory, and is simulated with common random
    numbers.
    """
    changes = []
    for _, cost, texts, changed in _predicted(usual.job)[:most]:
        steps = usual.of(Scenario(compile_job(changed)))
        before, after = (np.quantile(x, (0.5, 0.95)) for x in (usual.steps, steps))
        if max((before - after) / before) > _LEAST:
            changes.append(Change(texts, cost, *(before - after).tolist()))
    return tuple(sorted(changes, key=lambda change: (_COSTS.index(change.cost), -change.p95)))


def quickest_change(job: Job) -> tuple[tuple[str, ...], float] | None:
    """The setting that shortens a step without variability most, of those that cost nothing: they
    keep the GPUs, the layout, the tokens and the precision, and fit in memory. And by which share
    of the step; `None` if no setting is worth a line.
    """
    for change in _predicted(job):
        if change.cost in (_FLAG, _ORDER) and change.gain > _LEAST:
            return change.set, change.gain
    return None


def _predicted(job: Job) -> list[_Predicted]:
    """Of each key the best value, the largest gain first."""
    now, fit = predict(job).mean, memory(job).fits
    best: dict[tuple[str, ...], _Predicted] = {}
    for cost, texts in _tried(job):
        try:
            changed = job
            for text in texts:
                changed = _set(changed, text)
            gain = 1 - predict(changed).mean / now
            fits = memory(changed).fits or not fit
        except ValueError:  # It does not go with this job.
            continue
        keys = tuple(text.split("=")[0] for text in texts)
        most_yet = max(_LEAST, best[keys].gain if keys in best else 0.0)
        if fits and (cost == _MACHINE or gain > most_yet):
            best[keys] = _Predicted(gain, cost, texts, changed)
    return sorted(best.values(), key=lambda change: -change.gain)


def _tried(job: Job) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from ((_FLAG, (f"training.{text}",)) for text in _FLAGS.split())
    yield _PRECISION, ("training.gradient_dtype=bf16",)
    virtual, number = job.schedule.virtual_stages, job.schedule.num_microbatches
    size = job_parts(job).training.microbatch_size
    for stages in (virtual * 2, virtual // 2) if virtual > 1 else ():
        yield _ORDER, (f"schedule.virtual_stages={stages}",)
    if job.schedule.kind == "1f1b":
        yield _ORDER, ("schedule.kind=interleaved-1f1b", "schedule.virtual_stages=2")
        yield _ORDER, ("schedule.kind=zb-h1",)
    for twice, half in ((size * 2, number / 2), (size / 2, number * 2)):
        if min(twice, half) >= 1 and twice % 1 == half % 1 == 0:
            keys = "training.microbatch_size", "schedule.num_microbatches"
            yield _ORDER, (f"{keys[0]}={twice:.0f}", f"{keys[1]}={half:.0f}")
    yield from ((_MACHINE, (f"kernels.{law}",)) for law in ("rank.sigma=0", "network.slowdown=1"))


def _set(job: Job, text: str) -> Job:
    """The job with another value of a key, or a `ValueError`."""
    override = parse_override(text)
    part, name = override.keys[0], override.keys[-1]
    if part == "kernels":
        kernels = apply_kernel_override(job_parts(job).kernels, override)
        return msgspec.structs.replace(job, kernels=kernels)
    return _with(job, part, **{name: override.value})
