"""The ops of one rank on the clock of its device: from its named ranges or, where these do not tell
microbatches apart, from the runs of kernels of one phase.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from ._spans import BACKWARD, FORWARD, OPTIMIZE, Message, RankOp, RankTrace
from ._steps import Steps, steps_of
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
    - `by_number`: whether microbatches are equal parts of runs.
    - `notes`, `cut`: warnings for readers, and whether its file ends early.
    """

    rank: int
    host: str
    steps: Steps
    ops: tuple[RankOp, ...]
    collectives: dict[tuple[Message, int], tuple[int, int]]
    graph: bool
    by_number: bool
    notes: tuple[str, ...]
    cut: bool


def rank_ops(trace: RankTrace, names: RangeNames, num_microbatches: int | None = None) -> RankOps:
    """The ops of one rank.

    The range of an op is on the host. The op lasts from the first to the last kernel that was
    launched in the range, except collectives, because they wait. Forwards and backwards that no
    range tells apart are the runs of kernels of that phase on the main stream. The optimizers of a
    step are one op, up to the end of the step. Without a device, operators of the host are used
    instead of kernels.

    **Arguments:**

    - `trace`: the trace of one rank.
    - `names`: the meaning of the names of ranges.
    - `num_microbatches`: how many microbatches a rank runs in a step, on all of its stages, so that
        longer runs are cut; by default each run is one.
    """
    work = work_of(trace.spans, names)
    return ops_of_work(trace, work, steps_of(trace.spans, work, names), num_microbatches)


def ops_of_work(
    trace: RankTrace, work: Work, steps: Steps, num_microbatches: int | None = None
) -> RankOps:
    """As `rank_ops`, from what the rank ran and its steps."""
    place = steps.of(work.launched)
    ranges = [r for r, part in zip(work.ranges, work.parts, strict=True) if not part]
    of_range = steps.of(np.array([r.start for r in ranges], np.int64))
    computes, order = work.joined & (work.what == COMPUTES), np.argsort(place, kind="stable")
    if not work.joined.any():
        computes = work.what == COMPUTES
    bounds = np.searchsorted(place[order], np.arange(len(steps) + 1)).tolist()
    ops: list[RankOp] = []
    by_number = False
    for i, (low, high) in enumerate(it.pairwise(bounds)):
        before = max((op.end for op in ops), default=int(steps.start[i]))
        mine = [ranges[j] for j in np.flatnonzero(of_range == i).tolist()]
        kernels = order[low:high]
        found = _of_ranges(work, kernels[computes[kernels]], kernels, mine)
        named = {op.op for op in found if op.op in COMPUTE}
        chosen = kernels[computes[kernels] & work.main[kernels]]
        runs, cut = _runs(work, chosen, num_microbatches)
        for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE):
            if not any(other.startswith(op[:7]) for other in named):
                found += [r for r in runs if r.op == op]
                by_number |= cut
        updates = kernels[computes[kernels] & (work.phase[kernels] == OPTIMIZE)]
        if len(updates):
            begin, end = int(work.start[updates].min()), int(work.end[updates].max())
            found.append(RankOp(-1, OPTIMIZER, 0, -1, begin, max(end, int(steps.end[i]))))
        if found:
            begin = min(op.start for op in found)
            # At least a nanosecond, so that it comes first.
            start = min(max(int(steps.start[i]), before), begin - 1)
            found.append(RankOp(-1, LOAD_DATA, 0, -1, start, begin))
            found.sort(key=lambda op: op.op == LOAD_DATA)
            ops += [dataclasses.replace(op, step=int(steps.number[i])) for op in found]
    rank = trace.rank or 0
    notes = tuple(f"rank {rank}: {note}" for note in trace.notes)
    graph = not work.phases_known and bool(work.graph.any())
    about = (_collectives(work), graph, by_number, notes, trace.cut)
    return RankOps(rank, trace.host, steps, tuple(ops), *about)


def _of_ranges(
    work: Work,
    computes: Int[np.ndarray, " computing"],
    kernels: Int[np.ndarray, " kernels"],
    ranges: Sequence[RankOp],
) -> list[RankOp]:
    """The ops of the ranges of one step: without a number they are in the order of time."""
    found, calls = [], collections.defaultdict[str, it.count](it.count)
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
        found.append(RankOp(-1, r.op, microbatch, r.stage, *times))
    return found


def _collectives(work: Work) -> dict[tuple[Message, int], tuple[int, int]]:
    """Collectives, identified by properties that all of their members know."""
    found = {}
    seen = collections.defaultdict[Message, it.count](it.count)
    mine = np.flatnonzero(work.what == TALKS)
    for i in mine[np.argsort(work.start[mine], kind="stable")].tolist():
        message = work.messages[work.message[i]]
        number, sequence = next(seen[message]), int(work.sequence[i])
        key = (message, sequence if sequence >= 0 else number)
        found[key] = (int(work.start[i]), int(work.end[i]))
    return found


# A run with less than this share of a microbatch's kernels is not a microbatch; nor, if their
# number is not known, is one with less than this share of the longest.
_NOISE, _SHORT = 0.5, 0.1
# A cut between two microbatches is moved to an exchange within this distance, in microbatches. Any
# kernels before an exchange at its start, or after one at its end, are as few.
_NEAR, _EDGE = 0.4, 0.2


@dataclasses.dataclass
class _Run:
    """Consecutive kernels of one phase; `cuts` are the positions among them of exchanges."""

    phase: int
    kernels: list[int]
    cuts: list[int]

    def inner(self, low: int, high: int) -> tuple[int, int]:
        """A microbatch's kernels, without those that an exchange separates from most of them."""
        edge = _EDGE * (high - low)
        first = max((cut for cut in self.cuts if low < cut <= low + edge), default=low)
        return first, min((cut for cut in self.cuts if high - edge <= cut < high), default=high)


def _runs(
    work: Work, kernels: Int[np.ndarray, " chosen"], num_microbatches: int | None
) -> tuple[list[RankOp], bool]:
    """The forwards and backwards of a step: the runs of kernels of these phases in the order of
    their launches. A forward without a backward after it is none. Microbatches have about equally
    many kernels, so long runs belong to several of the `num_microbatches`; whether any is cut.
    """
    phases = work.phase[kernels]
    mine = kernels[(phases == FORWARD) | (phases == BACKWARD)]
    phases = work.phase[mine]
    begins = np.flatnonzero(np.append(True, phases[1:] != phases[:-1])[: len(mine)])
    talks = work.launched[work.what == TALKS]
    runs = []
    for part in np.split(mine, begins[1:]) if len(mine) else []:
        launched = work.launched[part]
        near = talks[slice(*np.searchsorted(talks, launched[[0, -1]]))]
        cuts = np.unique(np.searchsorted(launched, near)).tolist() if num_microbatches else []
        runs.append(_Run(int(work.phase[part[0]]), part.tolist(), cuts))
    for phase in (FORWARD, BACKWARD):
        sizes = [len(run.kernels) for run in runs if run.phase == phase] or [0]
        fewest = _SHORT * max(sizes)
        if num_microbatches:
            fewest = max(fewest, _NOISE * sum(sizes) / num_microbatches)
        runs = _without_noise(runs, phase, fewest)
    if any(run.phase == BACKWARD for run in runs):
        while runs[-1].phase == FORWARD:
            runs.pop()
    found: list[RankOp] = []
    is_cut = False
    for phase, op in ((FORWARD, FORWARD_COMPUTE), (BACKWARD, BACKWARD_COMPUTE)):
        of_phase = [run for run in runs if run.phase == phase]
        pieces = [1] * len(of_phase)
        if num_microbatches:
            each = sum(len(run.kernels) for run in of_phase) / num_microbatches
            cut = [round(len(run.kernels) / each) for run in of_phase]
            pieces = cut if sum(cut) == num_microbatches and 0 not in cut else pieces
        number, is_cut = it.count(), is_cut or max(pieces, default=1) > 1
        for run, count in zip(of_phase, pieces, strict=True):
            for low, high in it.starmap(run.inner, it.pairwise(_cuts(run, count))):
                part = run.kernels[low:high]
                times = int(work.start[part].min()), int(work.end[part].max())
                found.append(RankOp(-1, op, next(number), -1, *times))
    return found, is_cut


def _without_noise(runs: list[_Run], phase: int, fewest: float) -> list[_Run]:
    """The runs without short runs of a phase; the runs around these are merged."""
    kept: list[_Run] = []
    for run in runs:
        if run.phase == phase and len(run.kernels) < fewest:
            continue
        if kept and kept[-1].phase == run.phase:
            before = len(kept[-1].kernels)
            kernels, cuts = kept[-1].kernels + run.kernels, [before + cut for cut in run.cuts]
            kept[-1] = _Run(run.phase, kernels, [*kept[-1].cuts, before, *cuts])
        else:
            kept.append(run)
    return kept


def _cuts(run: _Run, pieces: int) -> list[int]:
    """Where the microbatches of a run begin and end."""
    each = len(run.kernels) / pieces
    cuts = [0]
    for i in range(1, pieces):
        near = [cut for cut in run.cuts if abs(cut - i * each) <= _NEAR * each]
        cuts.append(min(near, key=lambda cut: abs(cut - i * each)) if near else round(i * each))
    return [*cuts, len(run.kernels)]
