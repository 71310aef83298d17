"""The ops of one rank on the clock of its device: from its named ranges or, where these do not tell
microbatches apart, from the runs of kernels of one phase, which arrows of autograd cut.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from ._spans import BACKWARD, FORWARD, OPTIMIZE, Message, RankOp, RankTrace
from ._steps import NO_STEP, Steps, steps_of
from ._trace import (
    BACKWARD_COMPUTE,
    COMPUTE,
    FORWARD_COMPUTE,
    LOAD_DATA,
    OPTIMIZER,
    TRANSFERS,
    RangeNames,
)
from ._work import COMPUTES, TALKS, Work, work_of


@dataclasses.dataclass(frozen=True)
class RankOps:
    """The data of one rank that is kept after its spans are freed.

    **Attributes:**

    - `rank`, `host`: its number, and the host on which it ran, if that is known.
    - `steps`: its steps.
    - `ops`: its ops in the order of their starts.
    - `collectives`: for each message with its sequence number, `(calls, 2)` starts and ends.
    - `graph`: whether kernels have no phases because they are of graphs.
    - `by_runs`: whether neither ranges nor arrows tell microbatches apart, so that those whose
        forwards or backwards follow one another are one.
    - `notes`, `cut`: warnings for readers, and whether its file ends early.
    """

    rank: int
    host: str
    steps: Steps
    ops: tuple[RankOp, ...]
    collectives: dict[tuple[Message, int], tuple[int, int]]
    graph: bool
    by_runs: bool
    notes: tuple[str, ...]
    cut: bool


def rank_ops(trace: RankTrace, names: RangeNames) -> RankOps:
    """The ops of one rank, by the meaning of the names of ranges."""
    work = work_of(trace.spans, names)
    return ops_of_work(trace, work, steps_of(trace.spans, work, names))


def ops_of_work(trace: RankTrace, work: Work, steps: Steps) -> RankOps:
    """The ops of one rank, from what it ran and its steps.

    The range of an op is on the host. The op lasts from the first to the last kernel that was
    launched in the range, except collectives, because they wait. Forwards and backwards that no
    range tells apart are the runs of kernels of that phase on the main stream. The optimizers of a
    step are one op, up to the end of the step. Without a device, operators of the host are used
    instead of kernels.
    """
    place = steps.of(work.launched)
    ranges = [r for r, part in zip(work.ranges, work.parts, strict=True) if not part]
    of_range = steps.of(np.array([r.start for r in ranges], np.int64))
    of_arrow = steps.of(work.arrows[0])
    computes, order = work.joined & (work.activity == COMPUTES), np.argsort(place, kind="stable")
    if not work.joined.any():
        computes = work.activity == COMPUTES
    bounds = np.searchsorted(place[order], np.arange(len(steps) + 1)).tolist()
    ops, by_runs = list[RankOp](), False
    for i, (low, high) in enumerate(it.pairwise(bounds)):
        before = max((op.end for op in ops), default=int(steps.start[i]))
        kernels = order[low:high]
        ranges_of_step = [ranges[j] for j in np.flatnonzero(of_range == i).tolist()]
        ops_of_step = _of_ranges(work, kernels[computes[kernels]], kernels, ranges_of_step)
        named = {op.op[:7] for op in ops_of_step if op.op in COMPUTE}
        chosen = kernels[computes[kernels] & work.main[kernels]]
        passes, of_runs = _passes(work, chosen, *work.arrows[:, of_arrow == i])
        passes = [r for r in passes if r.op[:7] not in named]
        ops_of_step, by_runs = ops_of_step + passes, by_runs or bool(of_runs and passes)
        updates = kernels[computes[kernels] & (work.phase[kernels] == OPTIMIZE)]
        if len(updates):
            begin, end = int(work.start[updates].min()), int(work.end[updates].max())
            ops_of_step.append(RankOp(-1, OPTIMIZER, 0, -1, begin, max(end, int(steps.end[i]))))
        if ops_of_step:
            begin = min(op.start for op in ops_of_step)
            # At least a nanosecond, so that it comes first.
            start = min(max(int(steps.start[i]), before), begin - 1)
            ops_of_step.append(RankOp(-1, LOAD_DATA, 0, -1, start, begin))
            ops_of_step.sort(key=lambda op: op.op == LOAD_DATA)
            ops += [dataclasses.replace(op, step=int(steps.number[i])) for op in ops_of_step]
    rank = trace.rank or 0
    notes = tuple(f"rank {rank}: {note}" for note in trace.notes)
    graph = not work.phases_known and bool(work.graph.any())
    collectives = _collectives(work)
    origin = (graph, by_runs, notes, trace.cut)
    return RankOps(rank, trace.host, steps, tuple(ops), collectives, *origin)


def median_steps(
    ranks: Iterable[RankTrace], names: RangeNames | None = None
) -> dict[int, list[tuple[str, str, float, float]]]:
    """The ops and collectives of the step of each rank that has its median time: whether it is
    `compute` or a `collective`, its name, and its start and end in seconds from that of the step.

    **Raises:**

    `ValueError` if no rank has a step.
    """
    rows = {}
    for trace in ranks:
        ops = rank_ops(trace, names or RangeNames())
        if not len(ops.steps):
            continue
        middle = int(np.argsort(ops.steps.seconds)[(len(ops.steps) - 1) // 2])
        low, high = int(ops.steps.start[middle]), int(ops.steps.end[middle])
        spans = [
            ("compute", f"{op.op} {op.microbatch}" if op.op in COMPUTE else op.op, op.start, op.end)
            for op in ops.ops
            if op.step == ops.steps.number[middle]
        ]
        spans += [
            ("collective", message.name, *times)
            for (message, _), times in ops.collectives.items()
            if low <= times[0] < high
        ]
        rows[ops.rank] = [
            (lane, name, (start - low) * 1e-9, (end - low) * 1e-9)
            for lane, name, start, end in spans
        ]
    if not rows:
        raise ValueError(NO_STEP)
    return rows


def _of_ranges(
    work: Work,
    computes: Int[np.ndarray, " computing"],
    kernels: Int[np.ndarray, " kernels"],
    ranges: Sequence[RankOp],
) -> list[RankOp]:
    """The ops of the ranges of one step: without a number they are in the order of time."""
    ops, calls = [], collections.defaultdict[str, it.count](it.count)
    for r in sorted(ranges, key=lambda r: r.start):
        call = next(calls[r.op])
        if r.op == OPTIMIZER or (r.op in TRANSFERS and not work.on_device):
            continue  # The host only requests a transfer in its range.
        launched = computes if r.op in COMPUTE else kernels
        low, high = np.searchsorted(work.launched[launched], [r.start, r.end]).tolist()
        if low == high:
            continue
        times = int(work.start[launched[low:high]].min()), int(work.end[launched[low:high]].max())
        microbatch = r.microbatch if r.microbatch >= 0 else call
        ops.append(RankOp(-1, r.op, microbatch, r.stage, *times))
    return ops


def _collectives(work: Work) -> dict[tuple[Message, int], tuple[int, int]]:
    """Collectives, identified by properties that all of their members know."""
    times = {}
    seen = collections.defaultdict[Message, it.count](it.count)
    talks = np.flatnonzero(work.activity == TALKS)
    for i in talks[np.argsort(work.start[talks], kind="stable")].tolist():
        message = work.messages[work.message[i]]
        number, sequence = next(seen[message]), int(work.sequence[i])
        key = (message, sequence if sequence >= 0 else number)
        times[key] = (int(work.start[i]), int(work.end[i]))
    return times


# A run with less than this share of the kernels of the longest of its phase is no microbatch.
_SHORT = 0.1


def _passes(
    work: Work,
    kernels: Int[np.ndarray, " chosen"],
    forward: Int[np.ndarray, " arrows"],
    backward: Int[np.ndarray, " arrows"],
) -> tuple[list[RankOp], bool]:
    """The forwards and backwards of the microbatches of a step; and whether those that follow one
    another count as one, because there are no arrows.

    Arrows of autograd go from an operator, started at `forward`, to its node, started at
    `backward`; a microbatch begins where all arrows before have their node before those of all
    arrows after. If these tell several microbatches apart, a forward has the kernels of its phase
    from its first operator on, and a backward from its first node on, each up to the next of these.
    Else each run of kernels of a phase is a microbatch; a forward without a backward after it is
    none.
    """
    kernels = kernels[np.isin(work.phase[kernels], (FORWARD, BACKWARD))]
    order = np.lexsort((-backward, forward))
    forward, backward = forward[order], backward[order]
    until = np.maximum.accumulate(backward)
    after = np.minimum.accumulate(backward[::-1])[::-1]
    firsts = np.flatnonzero(np.append(True, until[:-1] < after[1:])[: len(order)])
    if len(firsts) > 1:
        begins = np.concatenate([forward[firsts], np.minimum.reduceat(backward, firsts)])
        order = np.argsort(begins, kind="stable")
        run = np.searchsorted(begins[order], work.launched[kernels], "right") - 1
        phases = np.repeat([FORWARD, BACKWARD], len(firsts))[order]
        chosen = (run >= 0) & (phases[run] == work.phase[kernels])
        kernels, run = kernels[chosen], run[chosen]
    else:
        for phase in (FORWARD, BACKWARD):
            phases, run = _runs(work, kernels)
            sizes = np.bincount(run, phases == phase)
            kernels = kernels[(phases != phase) | (sizes[run] >= _SHORT * sizes.max(initial=0))]
        backwards = np.flatnonzero(work.phase[kernels] == BACKWARD)
        kernels = kernels[: backwards[-1] + 1] if len(backwards) else kernels
        _, run = _runs(work, kernels)
    number, passes = collections.defaultdict[str, it.count](it.count), []
    for part in np.split(kernels, np.flatnonzero(np.diff(run)) + 1) if len(kernels) else []:
        op = FORWARD_COMPUTE if work.phase[part[0]] == FORWARD else BACKWARD_COMPUTE
        times = int(work.start[part].min()), int(work.end[part].max())
        passes.append(RankOp(-1, op, next(number[op]), -1, *times))
    several = len(passes) > len(number)  # A forward and a backward are what arrows say, too.
    return passes, len(firsts) < 2 and (several or not len(order))


def _runs(work: Work, kernels: Int[np.ndarray, " chosen"]) -> tuple[np.ndarray, np.ndarray]:
    """The phase of each kernel, and the number of its run of kernels of one phase."""
    phases = work.phase[kernels]
    return phases, np.cumsum(phases != np.append(phases[:1], phases[:-1]))
