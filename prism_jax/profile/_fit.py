"""Fits a profile to a trace: the mean latencies of its ops, and the laws around them."""

import dataclasses

import numpy as np

from .._misc import check_type, counted
from .._robust import in_core
from ..program import CONSTANT, StepGraph, op_latencies, replay, step_graph
from ..trace import COMPUTE, Trace, outline
from ._components import Apart, stall_rate
from ._constant_parts import constant_parts
from ._data_law import law_of_data
from ._find_positions import find_positions
from ._inner_waits import with_inner_waits
from ._laws import compute_apart, first_look, laws_of_components, relative_latencies
from ._links import with_links
from ._match_steps import match_steps
from ._positions import position_factors
from ._profile import Fitted, Profile, WorkerMean
from ._self_test import notes_of_waits, shuffled_means
from ._stalls import groups, take_out_stalls


# A replay that is off by more than the first limit gives a note, by more than the second an error.
_REPLAY_NOTED = 0.005
_REPLAY_MOST = 0.1
# The standard errors from which a drift is significant.
_DRIFTS = 4.0


def fit_profile(trace: Trace, *, name: str = "") -> Profile:
    """Fits a profile to a trace: the mean latencies of its ops, and the laws around them.

    - Stalls are removed from the latencies first. Their laws have a rate and a size.
    - A worker of the slower half whose compute spreads relatively less than that of the faster
      half, by more than chance, has a constant part in it, such as a sleep, on which no factor
      acts.
    - The mean latency of each kind of op on each worker excludes the time spent waiting for others.
      If it depends on the position of the microbatch in the step by more than chance, each position
      has a factor.
    - The variability of compute is split into components, among them the factors of a step, of a
      worker in one step and of a microbatch's data. The laws have the components in `fitted`.
    - For the residual of each kind of op, several families are fitted, and the one that predicts
      held-out steps best (by CRPS) is taken. For compute it gets the spread of its component.
    - The factor of the data of microbatches has a law of its own, and each kind of op of a stage
      has a loading on it.
    - If the mean of step times is off the mean of this law by more than chance explains, all mean
      latencies are scaled; if step times spread more than the law, by three standard errors, the
      law of the factor of a step is widened.

    **Arguments:**

    - `trace`: from [`read_trace`][].
    - `name`: the name of the profile; by default that of the job.

    **Returns:**

    A [`Profile`][].

    **Raises:**

    `ValueError` for fewer than four steps, for a step that takes no time, or if ops do not start in
    the order of the job's schedule, so that the error of a replay is above 10 %.
    """
    check_type(trace, Trace, "trace", "use `read_trace` to get one")
    if len(trace.steps) < 4:
        raise ValueError(
            f"The trace has {counted(len(trace.steps), 'whole step')}; at least 4 are needed to "
            "tell what varies from step to step."
        )
    step_times = trace.step_times()
    if not np.all(step_times > 0):
        number = trace.steps[np.argmin(step_times)]
        raise ValueError(
            f"Step {number} of the trace takes no time; give the starts and durations of its ops."
        )
    job, shape = trace.job, with_inner_waits(outline(trace), trace)
    step = step_graph(job, shape)
    latencies = op_latencies(trace, step)
    shape = with_links(shape, step, latencies)
    step = step_graph(job, shape)  # The same ops, by other names.
    off = float(np.max(np.abs(replay(step, latencies) / step_times - 1)))
    if not off <= _REPLAY_MOST:
        raise ValueError(
            f"The starts of the trace's ops do not fit the order of the job's schedule: their "
            f"replay is off by {100 * off:.3g} %, and {100 * _REPLAY_MOST:.0f} % are allowed; "
            "give the job that was traced, and starts on one clock."
        )
    constant = constant_parts(job, step, latencies)
    positions = find_positions(step, latencies - constant, job.layout.pp)
    factors = position_factors(step, positions, job.layout.pp)[:, None]
    relative = relative_latencies(
        job, step, first_look(job, step, (latencies - constant) / factors)
    )
    stalls = take_out_stalls(step, latencies, step_times, relative * factors, constant)
    stalls = dataclasses.replace(stalls, body=stalls.body / factors)
    apart = compute_apart(job, step, stalls.body, trace.steps, step_times)
    relative = relative_latencies(job, step, apart.data)
    mean = np.empty(len(latencies))
    for ops in groups(step).values():
        mean[ops] = np.nanmean(stalls.body[ops] / relative[ops])
    source = f"{len(trace.steps)} traced steps"
    laws = laws_of_components(job, step, stalls, mean, apart, source)
    compute = step.computes
    number = int(np.count_nonzero(np.isnan(stalls.body[compute])))
    rate = stall_rate(number, int(np.count_nonzero(latencies[compute] > 0)))
    law, sets = law_of_data(apart, trace.steps, source)
    means = [
        WorkerMean(kind, *divmod(worker, job.layout.pp), float(mean[ops[0]]), loading)
        for (kind, worker), ops in groups(step).items()
        for loading in (_loading(apart, step.phases, kind, worker % job.layout.pp),)
    ]
    means += [
        WorkerMean(CONSTANT + kind, *divmod(worker, job.layout.pp), seconds)
        for (kind, worker), ops in groups(step).items()
        if (seconds := float(constant[ops[0], 0]))
    ]
    moved = shuffled_means(step, latencies)
    notes = (
        *notes_of_waits(step, latencies, moved),
        *_notes_of_constants(step, constant, job.layout.pp),
        *_notes(trace, off),
    )
    fitted = Fitted(len(trace.steps), trace.dropped, notes, (*apart.components, rate))
    profile = Profile(
        name or job.name,
        job.layout,
        job.schedule,
        shape,
        tuple(means),
        (*law, *laws),
        fitted,
        sets,
        positions,
    )
    return match_steps(profile, step_times)


def _loading(apart: Apart, phases: tuple[str, ...], kind: str, stage: int) -> float:
    """How strongly the factor of a microbatch's data acts on a kind of op of a stage."""
    return float(apart.data.loadings[stage, phases.index(kind)]) if kind in phases else 1.0


def _notes_of_constants(step: StepGraph, constant: np.ndarray, pp: int) -> list[str]:
    """For each kind of op with a constant part, on which worker it is largest."""
    found: dict[str, list[tuple[float, int]]] = {}
    for (kind, worker), ops in groups(step).items():
        if constant[ops[0]] > 0:
            found.setdefault(kind, []).append((float(constant[ops[0], 0]), worker))
    notes = []
    for kind, workers in found.items():
        seconds, worker = max(workers)
        others = f", and so does that of {counted(len(workers) - 1, 'other worker')}"
        notes.append(
            f"`{kind}` of dp_rank {worker // pp}, stage {worker % pp} spreads less than that of "
            f"faster workers, as if {seconds:.3g} s of it did not vary, such as a sleep or a wait "
            f"of the host{others * (len(workers) > 1)}"
        )
    return notes


def _notes(trace: Trace, off: float) -> tuple[str, ...]:
    """Warnings, and what cannot be estimated from the trace; `off` is the error of a replay."""
    steps, dp = len(trace.steps), trace.job.layout.dp
    notes = list(trace.notes)
    if off > _REPLAY_NOTED:
        notes.append(
            f"the replay is off by {100 * off:.2g} %: some ops do not start where the schedule says"
        )
    compute = [op for op in trace.start if op in COMPUTE]
    seconds = [trace.end[op] - trace.start[op] for op in compute]
    if idle := sum(int(np.sum(x <= 0)) for x in seconds):
        ops = counted(sum(x.size for x in seconds), "op")
        notes.append(f"{idle} of {ops} of compute take no time and are left out of the components")
    notes += _drift(trace)
    gaps = np.diff(trace.steps)
    if len(gaps) and np.mean(gaps == 1) < 0.8:
        notes.append("the traced steps have gaps: the autocorrelation of steps is not identified")
    if dp * trace.job.layout.pp < 64:
        notes.append(
            f"{counted(dp * trace.job.layout.pp, 'worker')}: too few to know the law of workers; "
            "only their own means are known"
        )
    if steps < 100:
        notes.append(f"{steps} steps: stalls rarer than one in {steps} steps cannot be seen")
    return tuple(notes)


def _drift(trace: Trace) -> list[str]:
    """A warning if steps get longer or shorter over the trace, from a fit to their logarithms."""
    logs, steps = np.log(trace.step_times()), trace.steps.astype(float)
    core = in_core(logs)
    logs, steps = logs[core] - logs[core].mean(), steps[core] - steps[core].mean()
    square = float(steps @ steps)
    if len(logs) < 4 or square == 0:
        return []
    slope = float(steps @ logs) / square
    left = float(np.sum((logs - slope * steps) ** 2)) / (len(logs) - 2)
    if abs(slope) <= _DRIFTS * np.sqrt(left / square):
        return []
    change = 100 * slope * float(np.ptp(steps))
    return [f"step times drift by {change:+.2g} % over the trace, which the fitted laws ignore"]
