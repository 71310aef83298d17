"""What a trace shows: the graph of its steps with its waits and links, and the latencies of ops;
and notes on what may be wrong with it, or cannot be estimated from it.
"""

import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np
from jaxtyping import Float

from .._estimate import in_core, slope_of
from .._misc import plural
from ..data import Outline
from ..schedule import SEND_RECV
from ..trace import COMPUTE, Trace, outline
from ._effects import OfSteps
from ._step_graph import (
    LAUNCH,
    ByKind,
    StepGraph,
    replayed_step_times,
    traced_graph,
)


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


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a trace shows.

    **Attributes:**

    - `trace`, `outline`, `step`: the trace, what it shows of the graph of a step, and this graph.
    - `latencies`: the latencies of ops by kind, without waits, in seconds.
    - `step_times`: those of the trace, in seconds.
    - `off`: the largest relative error of the step times of a replay.
    - `source`: where laws that are fitted to it are from.
    """

    trace: Trace
    outline: Outline
    step: StepGraph
    latencies: ByKind
    step_times: OfSteps
    off: float
    source: str


def observe(trace: Trace) -> Seen:
    """What a trace shows; see `fit_profile` for the errors."""
    if len(trace.steps) < 4:
        raise ValueError(
            f"The trace has {plural(len(trace.steps), 'whole step')}; at least 4 are needed to "
            "tell what varies from step to step."
        )
    step_times = trace.step_times()
    if not np.all(step_times > 0):
        number = trace.steps[np.argmin(step_times)]
        raise ValueError(
            f"Step {number} of the trace takes no time; give the starts and durations of its ops."
        )
    waits = with_inner_waits(outline(trace), trace)
    step, latencies = traced_graph(trace, waits)
    off = float(np.max(np.abs(replayed_step_times(step, latencies) / step_times - 1)))
    if not off <= _REPLAY_MOST:
        raise ValueError(
            f"The starts of the trace's ops do not fit the order of the job's schedule: their "
            f"replay is off by {100 * off:.3g} %, and {100 * _REPLAY_MOST:.0f} % are allowed; "
            "give the job that was traced, and starts on one clock."
        )
    linked = with_links(waits, step, latencies)
    step, latencies = traced_graph(trace, linked)  # The same ops, by other names.
    source = f"{len(trace.steps)} traced steps"
    return Seen(trace, linked, step, latencies, step_times, off, source)


def with_inner_waits(outline: Outline, trace: Trace) -> Outline:
    """The outline with the kinds of compute that start with a wait for all replicas: in fully
    sharded training (FSDP), compute first gathers its parameters.

    A slow forward of one replica is a long wait in the backwards of the others. If both were drawn
    independently, steps would contain the delay twice.
    """
    if trace.job.layout.dp < 2 or len(trace.steps) < 2:
        return outline
    step, latencies = traced_graph(trace, outline)
    waiting = []
    for kind in step.phases:
        _, gathered = traced_graph(trace, msgspec.structs.replace(outline, gathered=(kind,)))
        (without, _), (squares, early) = _squares(latencies[kind]), _squares(gathered[kind])
        less = without - squares
        error = float(np.std(less, ddof=1)) / np.sqrt(len(less))
        if early <= _EARLY and less.mean() > max(_WAITS * without.mean(), _SEEN * error):
            waiting.append(kind)
    return msgspec.structs.replace(outline, gathered=tuple(waiting))


def _squares(latencies: Float[np.ndarray, "... steps"]) -> tuple[OfSteps, float]:
    """For each step, the mean square of the deviations of a kind of op from its means, and the
    share of these ops that end before they could start.
    """
    off = latencies - latencies.mean(axis=-1, keepdims=True)
    ended = np.mean(latencies[~np.isnan(latencies)] <= 0)
    return np.nanmean(off**2, axis=(0, 1, 2)), float(ended)


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


def with_links(outline: Outline, step: StepGraph, latencies: ByKind) -> Outline:
    """The outline with the pairs of workers whose sends and receives take far longer than others,
    as between nodes, if there are two classes. The median over both directions of a link counts.
    """
    links: dict[tuple[int, ...], list[np.ndarray]] = {}
    for op, seconds in enumerate(step.by_op(latencies)):
        if step.graph.phase[op] == SEND_RECV and not step.twin[op]:
            links.setdefault(tuple(sorted(step.members[op])), []).append(seconds)
    medians = {pair: float(np.median(parts)) for pair, parts in links.items()}
    if not medians or min(medians.values()) <= 0:
        return outline
    classes = two_classes(np.array(list(medians.values())))
    if classes is None:
        return outline
    threshold, (low, high), explained = classes
    slow = tuple(sorted(pair for pair, median in medians.items() if median > threshold))
    fewest = min(len(slow), len(medians) - len(slow))
    if explained < _EXPLAINED or fewest < _FEWEST or high < _LEAST * low:
        return outline
    return msgspec.structs.replace(outline, slow_links=slow)


def shuffled_means(step: StepGraph, latencies: ByKind) -> dict[str, float]:
    """The relative change of the mean of replayed steps if the latencies of a kind of op are
    shuffled over steps, for each kind except compute.

    A replay reproduces the steps with any graph, because a missing edge becomes latency of the next
    op. Such a latency is correlated with the rest of its step, so the mean changes when shuffling
    removes the correlation.
    """
    rng, step_times = np.random.default_rng(0), replayed_step_times(step, latencies)
    times, mean, moved = max(-(-_STEPS // len(step_times)), 1), float(np.mean(step_times)), {}
    for kind, values in latencies.items():
        if kind in step.phases or not np.nanmin(values) < np.nanmax(values):
            continue
        means = []
        for _ in range(times):
            # All workers of a kind are shuffled together, because a shared factor is not a wait.
            shuffled = latencies | {kind: values[..., rng.permutation(len(step_times))]}
            means.append(np.mean(replayed_step_times(step, shuffled)))
        moved[kind] = float(np.mean(means)) / mean - 1
    return moved


def notes_of(seen: Seen, constant: ByKind) -> tuple[str, ...]:
    """Notes on a trace whose ops have these constant parts, in seconds."""
    return (
        *_of_waits(seen.step, seen.latencies),
        *_of_constants(constant),
        *seen.trace.notes,
        *_of_steps(seen),
    )


def _of_waits(step: StepGraph, latencies: ByKind) -> Iterator[str]:
    """Waits that the graph may lack, which a replay mistakes for work."""
    for kind, by in shuffled_means(step, latencies).items():
        if abs(by) > _MOVES:
            yield (
                f"shuffling `{kind}` among the steps changes their mean by {100 * by:+.2g} %: its "
                "latencies contain a wait that the graph lacks"
            )
    mean = float(np.mean(replayed_step_times(step, latencies)))
    for kind, values in latencies.items():
        longest = float(np.nanmax(values.mean(axis=3))) / mean
        if kind.startswith(LAUNCH) and longest > _LONG:
            yield f"`{kind}` takes up to {100 * longest:.2g} % of a step on average"


def _of_constants(constant: ByKind) -> Iterator[str]:
    """For each kind of op with a constant part, on which worker it is largest."""
    for kind, seconds in constant.items():
        if number := int(np.count_nonzero(seconds)):
            d, s, *_ = np.unravel_index(np.argmax(seconds), seconds.shape)
            also = f", and so does that of {plural(number - 1, 'other worker')}"
            yield (
                f"`{kind}` of dp_rank {d}, stage {s} spreads less than that of faster workers, as "
                f"if {seconds.max():.3g} s of it did not vary, such as a sleep or a wait of the "
                f"host{also * (number > 1)}"
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
        ops = plural(sum(x.size for x in seconds), "op")
        yield f"{idle} of {ops} of compute take no time and are left out of the components"
    yield from _drift(trace)
    gaps = np.diff(trace.steps)
    if len(gaps) and np.mean(gaps == 1) < 0.8:
        yield "the traced steps have gaps: the autocorrelation of steps is not identified"
    workers = trace.job.layout.dp * trace.job.layout.pp
    if workers < 64:
        yield (
            f"{plural(workers, 'worker')}: too few to know the law of workers; "
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
