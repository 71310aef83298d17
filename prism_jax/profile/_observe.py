"""What a trace shows: the graph of its steps with its waits and links, and the latencies of ops by
kind and worker, or by replica, stage, phase and microbatch.
"""

import dataclasses

import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import counted
from ..data import Job, Outline
from ..program import StepGraph, op_latencies, replay, step_graph
from ..schedule import SEND_RECV
from ..trace import Trace, outline
from ._effects import DataFactor
from ._mean_squares import Logs, OfSteps


# The largest error of a replay.
_REPLAY_MOST = 0.1
# A kind of op waits for all replicas if its latencies vary less without this wait, by this share
# and by this many standard errors, and if at most this share of its ops end before the last op that
# they would wait for. If there is no such wait, subtracting one makes the variance larger.
_WAITS, _SEEN, _EARLY = 0.05, 2.0, 0.05
# The fewest links of a class, because fewer may be those of one slow worker; the least ratio of the
# means; and the least share of the variance that two classes must explain. With a normal law, which
# is one class, the best threshold explains 0.64.
_FEWEST, _LEAST, _EXPLAINED = 2, 2.0, 0.8


Latencies = Float[np.ndarray, "ops steps"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a trace shows.

    **Attributes:**

    - `trace`, `outline`, `step`: the trace, what it shows of the graph of a step, and this graph.
    - `latencies`: the latencies of ops, without waits, in seconds.
    - `step_times`: those of the trace, in seconds.
    - `off`: the largest relative error of the step times of a replay.
    """

    trace: Trace
    outline: Outline
    step: StepGraph
    latencies: Latencies
    step_times: OfSteps
    off: float

    @property
    def source(self) -> str:
        """Where laws that are fitted to it are from."""
        return f"{len(self.trace.steps)} traced steps"


def observe(trace: Trace) -> Seen:
    """What a trace shows; see `fit_profile` for the errors."""
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
    plain = with_inner_waits(outline(trace), trace)
    graph = step_graph(trace.job, plain)
    latencies = op_latencies(trace, graph)
    whole = with_links(plain, graph, latencies)
    step = step_graph(trace.job, whole)  # The same ops, by other names.
    off = float(np.max(np.abs(replay(step, latencies) / step_times - 1)))
    if not off <= _REPLAY_MOST:
        raise ValueError(
            f"The starts of the trace's ops do not fit the order of the job's schedule: their "
            f"replay is off by {100 * off:.3g} %, and {100 * _REPLAY_MOST:.0f} % are allowed; "
            "give the job that was traced, and starts on one clock."
        )
    return Seen(trace, whole, step, latencies, step_times, off)


def with_inner_waits(outline: Outline, trace: Trace) -> Outline:
    """The outline with the kinds of compute that start with a wait for all replicas: in fully
    sharded training (FSDP), compute first gathers its parameters.

    A slow forward of one replica is a long wait in the backwards of the others. If both were drawn
    independently, steps would contain the delay twice.
    """
    if trace.job.layout.dp < 2 or len(trace.steps) < 2:
        return outline
    plain, found = step_graph(trace.job, outline), []
    for kind in plain.phases:
        gathered = step_graph(trace.job, msgspec.structs.replace(outline, gathered=(kind,)))
        without, _ = _squares(trace, plain, kind)
        squares, early = _squares(trace, gathered, kind)
        less = without - squares
        error = float(np.std(less, ddof=1)) / np.sqrt(len(less))
        if early <= _EARLY and less.mean() > max(_WAITS * without.mean(), _SEEN * error):
            found.append(kind)
    return msgspec.structs.replace(outline, gathered=tuple(found))


def _squares(trace: Trace, step: StepGraph, kind: str) -> tuple[OfSteps, float]:
    """For each step, the mean square of the deviations of a kind of op from its means, and the
    share of these ops that end before they could start.
    """
    latencies = op_latencies(trace, step)[kinds(step)[kind]]
    off = latencies - latencies.mean(axis=1, keepdims=True)
    return np.mean(off**2, axis=0), float(np.mean(latencies <= 0))


def two_classes(
    values: Float[np.ndarray, " values"],
) -> tuple[float, tuple[float, float], float] | None:
    """Two classes of values, with the most variance between them, of logarithms (Otsu, "A threshold
    selection method from gray-level histograms", 1979).

    **Returns:**

    The threshold between the classes, their geometric means, and the share of the variance of
    logarithms that is between them; `None` if all values are equal.
    """
    logs = np.sort(np.log(values))
    total = float(np.sum((logs - logs.mean()) ** 2))
    if len(logs) < 2 or total <= 1e-12 * len(logs):
        return None
    low = np.arange(1, len(logs))
    sums = np.cumsum(logs)[:-1]
    lower, upper = sums / low, (logs.sum() - sums) / (len(logs) - low)
    between = low * (len(logs) - low) / len(logs) * (upper - lower) ** 2
    best = int(np.argmax(between))
    threshold = float(np.exp((logs[best] + logs[best + 1]) / 2))
    means = float(np.exp(lower[best])), float(np.exp(upper[best]))
    return threshold, means, float(between[best]) / total


def with_links(outline: Outline, step: StepGraph, latencies: Latencies) -> Outline:
    """The outline with the pairs of workers whose sends and receives take far longer than others,
    as between nodes, if there are two classes. The median over both directions of a link counts.
    """
    links: dict[tuple[int, ...], list[np.ndarray]] = {}
    for op in np.flatnonzero(step.graph.phase == SEND_RECV).tolist():
        if not step.twin[op]:
            links.setdefault(tuple(sorted(step.members[op])), []).append(latencies[op])
    medians = {pair: float(np.median(parts)) for pair, parts in links.items()}
    if not medians or min(medians.values()) <= 0:
        return outline
    found = two_classes(np.array(list(medians.values())))
    if found is None:
        return outline
    threshold, (low, high), explained = found
    slow = tuple(sorted(pair for pair, median in medians.items() if median > threshold))
    fewest = min(len(slow), len(medians) - len(slow))
    if explained < _EXPLAINED or fewest < _FEWEST or high < _LEAST * low:
        return outline
    return msgspec.structs.replace(outline, slow_links=slow)


def groups(step: StepGraph) -> dict[tuple[str, int], np.ndarray]:
    """The ops of each kind on each worker."""
    found: dict[tuple[str, int], list[int]] = {}
    for op, (kind, members) in enumerate(zip(step.kind, step.members, strict=True)):
        found.setdefault((kind, members[0]), []).append(op)
    return {key: np.array(ops) for key, ops in found.items()}


def kinds(step: StepGraph) -> dict[str, np.ndarray]:
    """The ops of each kind, on all workers."""
    names = np.array(step.kind)
    return {kind: np.flatnonzero(names == kind) for kind in dict.fromkeys(step.kind)}


def places(job: Job, step: StepGraph) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The ops of compute, and the replica, stage, phase and microbatch of each."""
    ops, phases = np.flatnonzero(step.computes), step.phases
    worker = np.array([step.members[op][0] for op in ops])
    phase = np.array([phases.index(step.kind[op]) for op in ops])
    call = np.array([step.call[op] for op in ops])
    return ops, (*np.divmod(worker, job.layout.pp), phase, call)


def compute_logs(job: Job, step: StepGraph, latencies: Latencies) -> Logs:
    """Logarithms of the latencies of compute; `nan` for those that are `nan` or not positive."""
    ops, place = places(job, step)
    shape = (job.layout.dp, job.layout.pp, len(step.phases), job.schedule.num_microbatches)
    logs = np.full((*shape, latencies.shape[1]), np.nan)
    logs[place] = np.log(np.where(latencies[ops] > 0, latencies[ops], np.nan))
    return logs


def relative_latencies(job: Job, step: StepGraph, data: DataFactor) -> Latencies:
    """The latency of each op from its microbatch's data, over its mean; one for other ops."""
    ops, place = places(job, step)
    relative = np.ones((len(step.kind), data.factor.shape[-1]))
    relative[ops] = data.relative[place]
    return relative
