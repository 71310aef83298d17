"""How each cause of slow steps changes the law of a step, at some values of its one parameter."""

import dataclasses
from collections.abc import Iterator

import equinox as eqx
import msgspec
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ..analysis import Scenario, slow_rank
from ..calibration import STEP_LEVELS, StepLaw
from ..data import Job
from ..engine import Plain, Run, prepare, steps_of_run
from ..lowering import parts_of
from ..program import Program, compile_job


# Of the steps with a stall, and the spread of the logarithm of their lengths.
_STALLED, _STALL_SIGMA = 0.03, 0.7
# By which share a mean step is longer. All are equally likely, whatever the cause, so that causes
# with the same effect are as likely.
EFFECTS = np.geomspace(0.01, 1.0, 49)


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


# By cause: its parameter, the value without effect, and two with one.
_PARAMETERS = {
    "slow-rank": ("factor on the compute of one rank", 1.0, 1.3, 3.0),
    "congested-link": ("factor on the time of the outermost link", 1.0, 3.0, 20.0),
    "no-overlap": ("missing overlap over all that is predicted", 0.0, 1.0),
    "launch-bound": ("shortest time of a kernel, in s", 0.0, 1e-4, 5e-4),
    "unbalanced-experts": ("factor on the spread of loads", 1.0, 3.0, 10.0),
}
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_tp_backward", "tp_overlap")
TELLS = {
    "slow-rank": "a trace of every rank (`--trace`): the slow one computes while others wait",
    "congested-link": "a bandwidth test of the links (nccl-tests), node by node",
    "no-overlap": "a trace of one rank (`--trace`): the share of communication under compute",
    "launch-bound": "a trace of one rank (`--trace`): the gaps between its kernels",
    "unbalanced-experts": "the numbers of tokens of each expert, which the router can log",
    "stalls": "times of slow steps beside logs of garbage collection, checkpoints and data",
    "drift": "clocks, temperatures and the step time again after a restart",
}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Simulated steps of a job, and all that is needed to simulate changed ones.

    **Attributes:**

    - `job`, `key`, `run`: the job, and how it was simulated.
    - `steps`: the steps, in seconds.
    """

    job: Job
    key: PRNGKeyArray
    run: Run
    steps: Float[np.ndarray, " steps"]

    def of(self, scenario: Scenario) -> Float[np.ndarray, " steps"]:
        """The steps of a scenario, with common random numbers."""
        run, few, number = _run(scenario.program, self.key), scenario.replicas, len(self.steps)
        if few is not None and few < self.run.program.num_replicas:
            return steps_of_run(self.run, num_samples=number, unlike=(run, few)).steps
        return steps_of_run(run, num_samples=number).steps


def simulated(job: Job, num_samples: int, key: PRNGKeyArray) -> Simulated:
    """Simulates steps of a job with a model."""
    run = _run(compile_job(job), key)
    return Simulated(job, key, run, steps_of_run(run, num_samples=num_samples).steps)


def _run(program: Program, key: PRNGKeyArray) -> Run:
    """A run with factors on a rank, so that all share code with that of a slow one. Samples are
    plain: what changes a step by a per cent can be seen without more of its tail.
    """
    if program.adjustment is None:
        program = slow_rank(program, program.num_ranks // 2, 1.0).program
    return dataclasses.replace(prepare(program, key), sampling=Plain())


def explained(usual: Simulated) -> Iterator[Explained]:
    """What each cause would do to the usual steps of a job."""
    before = np.quantile(usual.steps, STEP_LEVELS)
    for name, (parameter, nothing, *some) in _PARAMETERS.items():
        changed = [_scenario(name, value, usual) for value in some]
        steps = [usual.of(scenario) for scenario in changed if scenario is not None]
        if not steps:
            continue
        factors = np.stack([before, *(np.quantile(x, STEP_LEVELS) for x in steps)]) / before
        grid = np.array([nothing, *some])
        # The last value may do half more than is predicted: a level of kernels is not known better.
        grid, factors = (np.concatenate([x, [1.5 * x[-1] - 0.5 * x[-2]]]) for x in (grid, factors))
        # The values with the `EFFECTS`, between those at which steps were simulated.
        effects = np.maximum.accumulate(factors.mean(axis=1) - 1)
        values = np.interp(EFFECTS[effects[-1] >= EFFECTS], effects, grid)
        between = [np.interp(values, grid, column) for column in factors.T]
        yield Explained(name, parameter, values, np.stack(between, axis=1), 0 * values)
    laws = (StepLaw(0.0, _STALLED, share / _STALLED, _STALL_SIGMA) for share in EFFECTS)
    drawn = (np.sort(one.factors(len(before))) for one in laws)
    paused = np.stack([row / np.median(row) for row in drawn])
    yield Explained("stalls", "time that is lost over the rest", EFFECTS, paused, 0 * EFFECTS)
    slower = (1 + EFFECTS)[:, None] * np.ones(len(before))
    trend = 2 * np.log1p(EFFECTS)
    yield Explained("drift", "growth of a step over the series", np.expm1(trend), slower, trend)


def _scenario(name: str, value: float, usual: Simulated) -> Scenario | None:
    """The changed step; `None` if the job has nothing that could be changed so."""
    job, program = usual.job, usual.run.program
    cluster, training = parts_of(job).cluster, parts_of(job).training
    if name == "slow-rank":
        return slow_rank(program, program.num_ranks // 2, value)
    if name == "unbalanced-experts":
        if (loads := program.loads) is None:
            return None
        wider = loads.unevenness.spread * value
        return Scenario(eqx.tree_at(lambda one: one.loads.unevenness.spread, program, wider))
    if name == "congested-link":
        *inner, link = cluster.links
        slower = link.bandwidth_bytes_per_s / value
        link = msgspec.structs.replace(link, bandwidth_bytes_per_s=slower)
        cluster = msgspec.structs.replace(cluster, links=(*inner, link))
    elif name == "no-overlap":
        training = msgspec.structs.replace(training, **dict.fromkeys(_OVERLAPS, False))
    else:
        graphs = "none" if training.cuda_graphs == "iteration" else training.cuda_graphs
        floor = max(value, training.launch_floor_s)
        training = msgspec.structs.replace(training, launch_floor_s=floor, cuda_graphs=graphs)
    job = msgspec.structs.replace(job, cluster=cluster, training=training)
    return Scenario(compile_job(job))
