"""Joins the ops of ranks to rows of a table: which rank is which worker, and what they exchange."""

import itertools as it
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .._misc import counted, quoted
from ..data import Job, Layout
from ._orders import check_places, numbered, stated_schedule
from ._rank_ops import RankOps, set_clocks
from ._spans import RankOp
from ._trace import (
    BACKWARD_COMPUTE,
    COMPUTE,
    FORWARD_COMPUTE,
    LOAD_DATA,
    OPTIMIZER,
    PIPELINED,
    REDUCE,
)


Row = tuple[int, int, int, int, str, int, float, float]
_Worker = tuple[int, int]  # Replica and pipeline rank.
_Key = tuple[int, str, int, int]  # Step, kind, virtual stage and microbatch.
_Ops = dict[_Key, RankOp]
_Times = dict[tuple[int, int, *_Key], tuple[int, int]]  # Replica and pipeline rank before.


def join_ranks(
    ranks: Sequence[RankOps], job: Job, order: Sequence[str], path: str
) -> tuple[list[Row], Job, list[str]]:
    """Joins the ops of ranks.

    Of ranks that hold parts of the same layers, one is used. A replica is left out if one of its
    stages has no rank. The times of transfers are inferred from the ops before and after them. So
    are those of reductions: all optimizers start when a reduction is done.

    **Arguments:**

    - `ranks`: the ops of the ranks of one job.
    - `job`: a job with its layout and schedule.
    - `order`: the order of ranks, the innermost degree of parallelism first.
    - `path`: a path for messages.

    **Returns:**

    Rows of `dp_rank`, `stage`, `virtual_stage`, `step`, `optype`, `seq_id`, `start_ts`, `duration`,
    with times in seconds; the job, with as many replicas as are complete; and warnings for readers.

    **Raises:**

    `ValueError` if a rank is not in the layout, or if no replica is complete.
    """
    clocks = set_clocks(ranks)
    workers, notes = _workers(ranks, job.layout, order, path)
    dp, pp = job.layout.dp, job.layout.pp
    absent = [worker for worker in it.product(range(dp), range(pp)) if worker not in workers]
    whole = sorted(set(range(dp)) - {d for d, _ in absent})
    if absent:
        d, s = absent[0]
        first = f"replica {d}, stage {s}, {_ranks_of(d, s, job.layout, order)}"
        has = "has" if len(absent) == 1 else "have"
        without = f"{counted(len(absent), 'worker')} of {dp * pp} {has} no trace"
        if not whole:
            raise ValueError(
                f"{path}: {without}, and no replica is whole; the first is {first}; "
                "add its trace, or give the layout that was traced."
            )
        notes.append(f"{without}, the first {first}: only {len(whole)} of {dp} replicas are fitted")
    if clocks.unknown:
        shown = quoted(", ".join(map(str, clocks.unknown)))
        notes.append(f"ranks {shown} share no collective with the first: their clocks are trusted")
    layout = msgspec.structs.replace(job.layout, dp=len(whole))
    job = msgspec.structs.replace(job, layout=layout, world_size=None)
    schedule = stated_schedule(job)
    tables: dict[_Worker, _Ops] = {}
    for (i, d), s in it.product(enumerate(whole), range(pp)):
        offset = clocks.offsets[workers[d, s].rank]
        ops = numbered(workers[d, s].ops, s, schedule, job.schedule.num_microbatches, path)
        tables[i, s] = {
            (op.step, op.op, op.stage, op.microbatch): op.at((op.start + offset, op.end + offset))
            for op in ops
        }
    pairs = {(key[2], s) for (_, s), ops in tables.items() for key in ops if key[1] in PIPELINED}
    stage_to_rank = check_places(list(pairs), pp, schedule, path)
    return _rows(tables, job, stage_to_rank), job, notes


def _workers(
    ranks: Sequence[RankOps], layout: Layout, order: Sequence[str], path: str
) -> tuple[dict[_Worker, RankOps], list[str]]:
    """The rank that represents each replica and stage: the lowest one."""
    workers: dict[_Worker, RankOps] = {}
    for ops in sorted(ranks, key=lambda r: r.rank):
        if not 0 <= ops.rank < layout.world_size:
            raise ValueError(
                f"{path}: it has rank {ops.rank}, where the layout tp * cp * dp * pp has "
                f"{layout.world_size} ranks; give the layout that was traced."
            )
        workers.setdefault(_worker(ops.rank, layout, order), ops)
    others = len(ranks) - len(workers)
    notes = [f"{others} ranks hold parts of the same layers as another and are not used"]
    return workers, notes if others else []


def _worker(rank: int, layout: Layout, order: Sequence[str]) -> _Worker:
    place = {}
    for degree in order:
        rank, place[degree] = divmod(rank, getattr(layout, degree))
    return place["dp"], place["pp"]


def _ranks_of(d: int, s: int, layout: Layout, order: Sequence[str]) -> str:
    every = range(layout.world_size)
    found = [str(rank) for rank in every if _worker(rank, layout, order) == (d, s)]
    return f"rank{'s' * (len(found) > 1)} {' or '.join(found[:8])}"


def _rows(tables: dict[_Worker, _Ops], job: Job, stage_to_rank: Sequence[int]) -> list[Row]:
    found: _Times = {}
    origins = _origins(tables)
    for (d, s), ops in tables.items():
        for key, op in ops.items():
            step, kind, *_ = key
            if step in origins:
                start = max(op.start, origins[step])
                # Stages after the first one wait for a microbatch, not for data.
                found[d, s, *key] = start, start if kind == LOAD_DATA and s else op.end
    before = {worker: _ends_before(ops) for worker, ops in tables.items()}
    waits = job.schedule.blocking is not False
    for d, (stage, (low, high)) in it.product(
        range(job.layout.dp), enumerate(it.pairwise(stage_to_rank))
    ):
        if low != high:
            for link in (
                _Link(d, "forward", stage, low, high),
                _Link(d, "backward", stage + 1, high, low),
            ):
                # Recorded times are kept.
                found = _transfers(tables, before, link, origins, waits) | found
    if job.layout.dp > 1:
        found |= _reductions(tables, origins)
    rows = []
    for (d, s, step, kind, stage, call), times in found.items():
        # Multiples of 2^-30 s, whose sums are exact, so that ops still end when others start.
        start, end = (round((time - origins[step]) * 1e-9 * 2**30) / 2**30 for time in times)
        if end >= start:
            rows.append((d, s, stage, step, kind, call, start, end - start))
    return rows


def _origins(tables: dict[_Worker, _Ops]) -> dict[int, int]:
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
    tables: dict[_Worker, _Ops],
    ends_before: dict[_Worker, dict[_Key, int]],
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
    pairs = it.pairwise(key for _, key in compute)
    return {key: ops[before].end for before, key in pairs if before[0] == key[0]}


def _reductions(tables: dict[_Worker, _Ops], origins: dict[int, int]) -> _Times:
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
