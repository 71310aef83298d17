"""What may be wrong with a trace, or cannot be estimated from it."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from .._estimate import in_core
from .._misc import counted
from ..program import LAUNCH, StepGraph, replay
from ..trace import COMPUTE, Trace
from ._mean_squares import slope_of
from ._observe import Latencies, Seen, groups, kinds


# A replay that is off by more gives a note.
_REPLAY_NOTED = 0.005
# The standard errors from which a drift is significant.
_DRIFTS = 4.0
# The least number of steps that are replayed for each kind.
_STEPS = 200
# A kind gets a note if it changes the mean by more than the first share, or if it is a launch that
# takes more than the second.
_MOVES = 0.005
_LONG = 0.01


def shuffled_means(step: StepGraph, latencies: Latencies) -> dict[str, float]:
    """The relative change of the mean of replayed steps if the latencies of a kind of op are
    shuffled over steps, for each kind except compute.

    A replay reproduces the steps with any graph, because a missing edge becomes latency of the next
    op. Such a latency is correlated with the rest of its step, so the mean changes when shuffling
    removes the correlation.
    """
    rng = np.random.default_rng(0)
    times = max(-(-_STEPS // latencies.shape[1]), 1)
    mean, moved = float(np.mean(replay(step, latencies))), {}
    for kind, mine in kinds(step).items():
        if kind in step.phases or not np.ptp(latencies[mine]) > 0:
            continue
        means = []
        for _ in range(times):
            shuffled = latencies.copy()
            # All workers of a kind are shuffled together, because a shared factor is not a wait.
            shuffled[mine] = latencies[mine][:, rng.permutation(latencies.shape[1])]
            means.append(np.mean(replay(step, shuffled)))
        moved[kind] = float(np.mean(means)) / mean - 1
    return moved


def notes_of(seen: Seen, constant: Float[np.ndarray, "ops 1"]) -> tuple[str, ...]:
    """Notes on a trace whose ops have these constant parts, in seconds."""
    return (
        *_of_waits(seen.step, seen.latencies),
        *_of_constants(seen.step, constant, seen.trace.job.layout.pp),
        *seen.trace.notes,
        *_of_steps(seen),
    )


def _of_waits(step: StepGraph, latencies: Latencies) -> Iterator[str]:
    """Waits that the graph may lack, which a replay mistakes for work."""
    for kind, by in shuffled_means(step, latencies).items():
        if abs(by) > _MOVES:
            yield (
                f"shuffling `{kind}` among the steps changes their mean by {100 * by:+.2g} %: its "
                "latencies contain a wait that the graph lacks"
            )
    mean = float(np.mean(replay(step, latencies)))
    for kind, ops in kinds(step).items():
        longest = float(latencies[ops].mean(axis=1).max()) / mean
        if kind.startswith(LAUNCH) and longest > _LONG:
            yield f"`{kind}` takes up to {100 * longest:.2g} % of a step on average"


def _of_constants(step: StepGraph, constant: Float[np.ndarray, "ops 1"], pp: int) -> Iterator[str]:
    """For each kind of op with a constant part, on which worker it is largest."""
    found: dict[str, list[tuple[float, int]]] = {}
    for (kind, worker), ops in groups(step).items():
        if constant[ops[0]] > 0:
            found.setdefault(kind, []).append((float(constant[ops[0], 0]), worker))
    for kind, workers in found.items():
        seconds, worker = max(workers)
        others = f", and so does that of {counted(len(workers) - 1, 'other worker')}"
        yield (
            f"`{kind}` of dp_rank {worker // pp}, stage {worker % pp} spreads less than that of "
            f"faster workers, as if {seconds:.3g} s of it did not vary, such as a sleep or a wait "
            f"of the host{others * (len(workers) > 1)}"
        )


def _of_steps(seen: Seen) -> Iterator[str]:
    """What is wrong with the steps, and what so few of them, or so few workers, do not tell."""
    trace, steps = seen.trace, len(seen.trace.steps)
    if seen.off > _REPLAY_NOTED:
        yield (
            f"the replay is off by {100 * seen.off:.2g} %: some ops do not start where the "
            "schedule says"
        )
    seconds = [trace.end[op] - trace.start[op] for op in trace.start if op in COMPUTE]
    if idle := sum(int(np.sum(x <= 0)) for x in seconds):
        ops = counted(sum(x.size for x in seconds), "op")
        yield f"{idle} of {ops} of compute take no time and are left out of the components"
    yield from _drift(trace)
    gaps = np.diff(trace.steps)
    if len(gaps) and np.mean(gaps == 1) < 0.8:
        yield "the traced steps have gaps: the autocorrelation of steps is not identified"
    workers = trace.job.layout.dp * trace.job.layout.pp
    if workers < 64:
        yield (
            f"{counted(workers, 'worker')}: too few to know the law of workers; "
            "only their own means are known"
        )
    if steps < 100:
        yield f"{steps} steps: stalls rarer than one in {steps} steps cannot be seen"


def _drift(trace: Trace) -> Iterator[str]:
    """Whether steps get longer or shorter over the trace, from a fit to their logarithms."""
    logs = np.log(trace.step_times())
    core = in_core(logs)
    steps = trace.steps[core].astype(float)
    if len(steps) < 4:
        return
    slope, error = slope_of(logs[core], steps)
    if abs(slope) > _DRIFTS * error:
        change = 100 * slope * float(np.ptp(steps))
        yield f"step times drift by {change:+.2g} % over the trace, which the fitted laws ignore"
