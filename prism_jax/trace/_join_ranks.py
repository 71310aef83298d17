"""Joins the ops of ranks to a table of ops: which rank is which worker, and what they exchange."""

import dataclasses
import itertools as it
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .._misc import counted, quoted
from ..data import Job, Layout
from ..schedule import AbstractSchedule
from ._clocks import Clocks, set_clocks
from ._ops import COMPUTE, PIPELINED
from ._orders import check_places, stated_schedule
from ._rank_op import BACKWARD_COMPUTE, FORWARD_COMPUTE, LOAD_DATA, OPTIMIZER, RankOp
from ._rank_ops import RankOps
from ._stage_numbers import numbered


REDUCE = "grads-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class JoinedOps:
    """The ops of all workers, as rows of a table.

    **Attributes:**

    - `rows`: `dp_rank`, `stage`, `virtual_stage`, `step`, `optype`, `seq_id`, `start_ts`,
        `duration`; times in seconds.
    - `job`: the job, with as many replicas as are complete.
    - `clocks`: the offsets between the clocks of ranks.
    - `notes`: warnings for readers.
    - `cut`: the ranks whose file ends early.
    """

    rows: list[tuple[int, int, int, int, str, int, float, float]]
    job: Job
    clocks: Clocks
    notes: tuple[str, ...]
    cut: tuple[int, ...] = ()


def join_ranks(ranks: Sequence[RankOps], job: Job, order: Sequence[str], path: str) -> JoinedOps:
    """Joins the ops of ranks.

    Of ranks that hold parts of the same layers, one is used. A replica is left out if one of its
    stages has no rank. The times of transfers are inferred from the ops before and after them. So
    are those of reductions: all optimizers start when a reduction is done.

    **Arguments:**

    - `ranks`: the ops of the ranks of one job.
    - `job`: a job with its layout and schedule.
    - `order`: the order of ranks, the innermost degree of parallelism first.
    - `path`: a path for messages.

    **Raises:**

    `ValueError` if a rank is not in the layout, or if no replica is complete.
    """
    clocks = set_clocks(ranks)
    workers, notes = _workers(ranks, job.layout, order, path)
    dp, pp = job.layout.dp, job.layout.pp
    whole = [d for d in range(dp) if all((d, s) in workers for s in range(pp))]
    absent = [(d, s) for d in range(dp) for s in range(pp) if (d, s) not in workers]
    has = "has" if len(absent) == 1 else "have"
    if not whole:
        d, s = absent[0]
        raise ValueError(
            f"{path}: {counted(len(absent), 'worker')} of {dp * pp} {has} no trace, and no replica "
            f"is whole; the first is replica {d}, stage {s}, {_ranks_of(d, s, job.layout, order)}; "
            "add its trace, or give the layout that was traced."
        )
    if absent:
        d, s = absent[0]
        notes.append(
            f"{counted(len(absent), 'worker')} of {dp * pp} {has} no trace, the first replica {d}, "
            f"stage {s}, {_ranks_of(d, s, job.layout, order)}: only {len(whole)} of {dp} replicas "
            "are fitted"
        )
    if clocks.unknown:
        shown = quoted(", ".join(map(str, clocks.unknown)))
        notes.append(f"ranks {shown} share no collective with the first: their clocks are trusted")
    layout = msgspec.structs.replace(job.layout, dp=len(whole))
    job = msgspec.structs.replace(job, layout=layout, world_size=None)
    schedule = stated_schedule(job)
    tables = {
        (i, s): _of_worker(workers[d, s], clocks, s, schedule, job, path)
        for i, d in enumerate(whole)
        for s in range(pp)
    }
    pairs = {(key[2], s) for (_, s), ops in tables.items() for key in ops if key[1] in PIPELINED}
    stage_to_rank = check_places(list(pairs), pp, schedule, path)
    rows = _rows(tables, job, stage_to_rank)
    return JoinedOps(rows, job, clocks, tuple(notes))


def _workers(
    ranks: Sequence[RankOps], layout: Layout, order: Sequence[str], path: str
) -> tuple[dict[tuple[int, int], RankOps], list[str]]:
    """The rank that represents each replica and stage: the lowest one."""
    workers: dict[tuple[int, int], RankOps] = {}
    others = 0
    for ops in sorted(ranks, key=lambda r: r.rank):
        if not 0 <= ops.rank < layout.world_size:
            raise ValueError(
                f"{path}: it has rank {ops.rank}, where the layout tp * cp * dp * pp has "
                f"{layout.world_size} ranks; give the layout that was traced."
            )
        place = _place(ops.rank, layout, order)
        others += (place["dp"], place["pp"]) in workers
        workers.setdefault((place["dp"], place["pp"]), ops)
    notes = [f"{others} ranks hold parts of the same layers as another and are not used"]
    return workers, notes if others else []


def _place(rank: int, layout: Layout, order: Sequence[str]) -> dict[str, int]:
    place = {}
    for degree in order:
        rank, place[degree] = divmod(rank, getattr(layout, degree))
    return place


def _ranks_of(d: int, s: int, layout: Layout, order: Sequence[str]) -> str:
    numbers = range(layout.world_size)
    places = ((rank, _place(rank, layout, order)) for rank in numbers)
    found = [str(rank) for rank, p in places if p["dp"] == d and p["pp"] == s]
    return f"rank{'s' * (len(found) > 1)} {' or '.join(found[:8])}"


_Key = tuple[int, str, int, int]  # Step, kind, virtual stage and microbatch.
_Ops = dict[_Key, RankOp]
_Times = dict[tuple[int, int, *_Key], tuple[int, int]]  # Replica and pipeline rank before.


def _of_worker(
    ranks: RankOps,
    clocks: Clocks,
    rank: int,
    schedule: AbstractSchedule | None,
    job: Job,
    path: str,
) -> _Ops:
    offset = clocks.offsets[ranks.rank]
    return {
        (op.step, op.op, op.stage, op.microbatch): dataclasses.replace(
            op, start=op.start + offset, end=op.end + offset
        )
        for op in numbered(ranks.ops, rank, schedule, job.schedule.num_microbatches, path)
    }


def _rows(tables: dict[tuple[int, int], _Ops], job: Job, stage_to_rank: Sequence[int]) -> list:
    found: _Times = {}
    origins = _origins(tables)
    for (d, s), ops in tables.items():
        for key, op in ops.items():
            step, kind, *_ = key
            if step in origins:
                start = max(op.start, origins[step])
                # Stages after the first one wait for a microbatch, not for data.
                end = start if kind == LOAD_DATA and s else op.end
                found[d, s, *key] = start, end
    waits = job.schedule.blocking is not False
    before = {worker: _ends_before(ops) for worker, ops in tables.items()}
    for d in range(job.layout.dp):
        for stage in range(1, len(stage_to_rank)):
            at = stage_to_rank[stage - 1], stage_to_rank[stage]
            if at[0] != at[1]:
                for link in (
                    _Link(d, "forward", stage - 1, *at),
                    _Link(d, "backward", stage, *at[::-1]),
                ):
                    # Recorded times are kept.
                    found = _transfers(tables, before, link, origins, waits) | found
    if job.layout.dp > 1:
        found |= _reductions(tables, origins)
    rows = []
    for (d, s, step, kind, stage, call), times in found.items():
        start, end = (_exact_seconds(time - origins[step]) for time in times)
        if end >= start:
            rows.append((d, s, stage, step, kind, call, start, end - start))
    return rows


def _exact_seconds(nanoseconds: int) -> float:
    """Seconds in multiples of 2^-30 s, whose sums are exact, so that ops still end when others
    start.
    """
    return round(nanoseconds * 1e-9 * 2**30) / 2**30


def _origins(tables: dict[tuple[int, int], _Ops]) -> dict[int, int]:
    """When each step starts: with the first op of a first stage. Other ranks wait for it."""
    origins: dict[int, int] = {}
    for (_, s), ops in tables.items():
        if s == 0:
            for (step, *_), op in ops.items():
                origins[step] = min(origins.get(step, op.start), op.start)
    return origins


class _Link(NamedTuple):
    """A stage that sends to the next or the previous stage, and their ranks."""

    replica: int
    phase: str
    stage: int
    sender: int
    receiver: int


def _transfers(
    tables: dict[tuple[int, int], _Ops],
    ends_before: dict[tuple[int, int], dict[_Key, int]],
    link: _Link,
    origins: dict[int, int],
    waits: bool,
) -> _Times:
    """Sends and receives between two stages.

    If the receiver was idle, its compute starts when the transfer has ended. If it was not, the
    transfer ended earlier, at an unknown time; it is assumed to have taken as long as other
    transfers do. If exchanges block, it is instead assumed to end when both ranks are ready, as the
    first exchange does.
    """
    forward = link.phase == "forward"
    other = link.stage + (1 if forward else -1)
    receiver = tables[link.replica, link.receiver]
    before = ends_before[link.replica, link.receiver]
    kinds = (FORWARD_COMPUTE,) if forward else (BACKWARD_COMPUTE, "backward-input")
    pairs = []
    for (step, kind, stage, call), op in tables[link.replica, link.sender].items():
        if kind in kinds and stage == link.stage and step in origins:
            keys = ((step, k, other, call) for k in kinds)
            pairs += [(key, op, receiver[key]) for key in keys if key in receiver]
    lags = [b.start - a.end for k, a, b in pairs if a.end >= before.get(k, a.end)]
    typical = max(round(statistics.median(lags)), 0) if lags else 0
    found: _Times = {}
    for key, sent, received in pairs:
        step, _, _, call = key
        end = max(received.start, sent.end)
        ready = before.get(key, _begin(receiver, step, origins[step]))
        if key in before and sent.end < ready and not waits:
            end = min(sent.end + typical, end)
        start = max(origins[step], min(ready, end))
        d, sender, receiver_rank = link.replica, link.sender, link.receiver
        found[d, sender, step, f"{link.phase}-send", link.stage, call] = sent.end, end
        found[d, receiver_rank, step, f"{link.phase}-recv", other, call] = start, end
    return found


def _begin(ops: _Ops, step: int, origin: int) -> int:
    """When a worker begins a step, after it has received its data."""
    loads = ops.get((step, LOAD_DATA, 0, 0))
    return origin if loads is None else max(origin, loads.start) + 1


def _ends_before(ops: _Ops) -> dict[_Key, int]:
    """The end of the op before each compute op in its step."""
    compute = sorted((op.start, key) for key, op in ops.items() if key[1] in COMPUTE)
    ends: dict[_Key, int] = {}
    for (_, before), (_, key) in it.pairwise(compute):
        if before[0] == key[0]:
            ends[key] = ops[before].end
    return ends


def _reductions(tables: dict[tuple[int, int], _Ops], origins: dict[int, int]) -> _Times:
    """Reductions from the last backward of a worker to its optimizer, if there are no ranges of
    them.
    """
    found: _Times = {}
    for (d, s), ops in tables.items():
        last: dict[int, int] = {}
        for (step, kind, *_), op in ops.items():
            if kind in COMPUTE:
                last[step] = max(last.get(step, op.end), op.end)
        for step in last.keys() & origins.keys():
            optimizer = ops.get((step, OPTIMIZER, 0, 0))
            if optimizer is not None and (step, REDUCE, 0, 0) not in ops:
                end = max(optimizer.start, last[step])
                found[d, s, step, REDUCE, 0, 0] = last[step], end
    return found
