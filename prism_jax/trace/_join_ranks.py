"""Joins the ops of ranks to a table: how far their clocks are apart, from collectives, which all
ranks leave together; which rank is which worker; and what they exchange.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from .._estimate import typical
from .._misc import plural, quoted
from ..data import Job, Layout
from ..schedule import AbstractSchedule
from ._orders import check_places, numbered
from ._rank_ops import RankOps
from ._read_trace import COLUMNS
from ._tables import pl
from ._trace import BACKWARD_COMPUTE, COMPUTE, FORWARD_COMPUTE, LOAD_DATA, OPTIMIZER, REDUCE


_Worker = tuple[int, int]  # Replica and pipeline rank.
# The columns that tell workers and ops apart.
_WORKER = ["dp_rank", "stage"]
_OP = [*_WORKER, "virtual_stage", "step", "optype", "seq_id"]


def join_ranks(
    ranks: Sequence[RankOps], job: Job, schedule: AbstractSchedule | None, order: Sequence[str]
) -> tuple["pl.DataFrame", Job, list[str]]:
    """Joins the ops of ranks.

    Of ranks that hold parts of the same layers, one is used. A replica is left out if one of its
    stages has no rank. The times of transfers are inferred from the ops before and after them. So
    are those of reductions: all optimizers start when a reduction is done.

    **Arguments:**

    - `ranks`: the ops of the ranks of one job.
    - `job`, `schedule`: a job with its layout, and its `stated_schedule`.
    - `order`: the order of ranks, the innermost degree of parallelism first.

    **Returns:**

    The table that `read_trace` describes; the job, with as many replicas as are complete; and
    warnings for readers.

    **Raises:**

    `ValueError` if a rank is not in the layout, or if no replica is complete.
    """
    clocks, places = set_clocks(ranks), _places(job.layout, order)
    workers, notes = _workers(ranks, places)
    dp, pp = job.layout.dp, job.layout.pp
    absent = [worker for worker in it.product(range(dp), range(pp)) if worker not in workers]
    present = sorted(set(range(dp)) - {d for d, _ in absent})
    if absent:
        d, s = absent[0]
        numbers = [str(rank) for rank, place in enumerate(places) if place == (d, s)]
        ranks_of_worker = f"rank{'s' * (len(numbers) > 1)} {' or '.join(numbers[:8])}"
        first = f"replica {d}, stage {s}, {ranks_of_worker}"
        has = "has" if len(absent) == 1 else "have"
        without = f"{plural(len(absent), 'worker')} of {dp * pp} {has} no trace"
        if not present:
            raise ValueError(
                f"{without}, and no replica is whole; the first is {first}; add its trace, or "
                "give the layout that was traced."
            )
        notes.append(
            f"{without}, the first {first}: only {len(present)} of {dp} replicas are fitted"
        )
    if clocks.unknown:
        shown = quoted(", ".join(map(str, clocks.unknown)))
        notes.append(f"ranks {shown} share no collective with the first: their clocks are trusted")
    layout = msgspec.structs.replace(job.layout, dp=len(present))
    job = msgspec.structs.replace(job, layout=layout, world_size=None)
    rows = []
    for (i, d), s in it.product(enumerate(present), range(pp)):
        offset = clocks.offsets[workers[d, s].rank]
        for op in numbered(workers[d, s].ops, s, schedule, job):
            times = op.start + offset, op.end + offset
            rows.append((i, s, op.stage, op.step, op.op, op.microbatch, *times))
    kinds = {name: pl.String if name == "optype" else pl.Int64 for name in (*_OP, "start", "end")}
    ops = pl.DataFrame(rows, kinds, orient="row")
    ops = ops.unique(_OP, keep="last", maintain_order=True)
    check_places(ops.lazy(), pp, schedule)
    return _with_exchanges(ops, job), job, notes


def _places(layout: Layout, order: Sequence[str]) -> list[_Worker]:
    """The worker that each rank is a part of."""
    sizes = [getattr(layout, degree) for degree in reversed(order)]
    place = dict(zip(reversed(order), np.indices(sizes).reshape(len(order), -1), strict=True))
    return list(zip(place["dp"].tolist(), place["pp"].tolist(), strict=True))


def _workers(
    ranks: Sequence[RankOps], places: Sequence[_Worker]
) -> tuple[dict[_Worker, RankOps], list[str]]:
    """The rank that represents each replica and stage: the lowest one."""
    workers: dict[_Worker, RankOps] = {}
    for ops in sorted(ranks, key=lambda r: r.rank):
        if not 0 <= ops.rank < len(places):
            raise ValueError(
                f"it has rank {ops.rank}, where the layout tp * cp * dp * pp has {len(places)} "
                "ranks; give the layout that was traced."
            )
        workers.setdefault(places[ops.rank], ops)
    unused = len(ranks) - len(workers)
    notes = [f"not used: {plural(unused, 'rank')} with parts of the same layers as another"]
    return workers, notes if unused else []


def _with_exchanges(ops: "pl.DataFrame", job: Job) -> "pl.DataFrame":
    """The table of ops, with times from the start of each step, and with what is inferred; recorded
    times are kept.
    """
    # A step starts with the first op of a first stage. Other ranks wait for it.
    origins = ops.filter(stage=0).group_by("step").agg(origin=pl.col("start").min())
    ops = ops.join(origins, on="step", maintain_order="left")
    start = pl.max_horizontal("start", "origin")
    # Stages after the first one wait for a microbatch, not for data.
    waits = (pl.col("optype") == LOAD_DATA) & (pl.col("stage") > 0)
    recorded = ops.with_columns(start=start, end=pl.when(waits).then(start).otherwise("end"))
    parts = [*_transfers(ops, job.schedule.blocking is not False), recorded]
    joined = pl.concat(part.select(recorded.columns) for part in parts)
    joined = joined.unique(_OP, keep="last", maintain_order=True)
    if job.layout.dp > 1:
        joined = pl.concat([joined, _reductions(ops).select(joined.columns)])
    # Multiples of 2^-30 s, whose sums are exact, so that ops still end when others start.
    times = ((pl.col("start", "end") - pl.col("origin")) * 1e-9 * 2**30).round() / 2**30
    joined = joined.with_columns(times).filter(pl.col("end") >= pl.col("start"))
    joined = joined.with_columns(start_ts="start", duration=pl.col("end") - pl.col("start"))
    joined = joined.sort("step", *_WORKER, "start_ts", maintain_order=True)
    return joined.select(pl.col(name).cast(getattr(pl, kind)) for name, kind in COLUMNS.items())


def _transfers(ops: "pl.DataFrame", waits: bool) -> Iterator["pl.DataFrame"]:
    """Receives and sends between stages on two ranks.

    If the receiver was idle, its compute starts when the transfer has ended. If it was not, the
    transfer ended earlier, at an unknown time; it is assumed to have taken as long as other
    transfers do. If exchanges block (`waits`), it is instead assumed to end when both ranks are
    ready, as the first exchange does.
    """
    sent, start, before = pl.col("sent"), pl.col("start"), pl.col("before")
    loads = ops.filter(optype=LOAD_DATA).select(
        *_WORKER, "step", begin=pl.max_horizontal("start", "origin") + 1
    )
    compute = ops.filter(pl.col("optype").is_in(COMPUTE))
    compute = compute.sort("start", "step", "optype", "virtual_stage", "seq_id")
    same_step = pl.col("step") == pl.col("step").shift(1)
    # The end of the op before it in its step, and when its worker begins the step, with its data.
    compute = compute.with_columns(
        before=pl.when(same_step).then(pl.col("end").shift(1)).over(_WORKER)
    ).join(loads, on=[*_WORKER, "step"], how="left", maintain_order="left")
    backwards, call = (BACKWARD_COMPUTE, "backward-input"), ["dp_rank", "step", "seq_id"]
    for phase, kinds, next_ in (("backward", backwards, -1), ("forward", (FORWARD_COMPUTE,), 1)):
        computes = compute.filter(pl.col("optype").is_in(kinds))
        senders = computes.select(*call, "virtual_stage", sender="stage", sent="end")
        pairs = senders.with_columns(pl.col("virtual_stage") + next_)
        pairs = pairs.join(computes, on=[*call, "virtual_stage"], maintain_order="left")
        pairs = pairs.filter(pl.col("sender") != pl.col("stage"))
        idle = before.is_null() | (sent >= before)
        lag = (start - sent).filter(idle).median().round().cast(pl.Int64)
        lag = lag.over("dp_rank", "virtual_stage").fill_null(0).clip(0)
        end = pl.max_horizontal(start, sent)
        arrivals = pl.when(idle | waits).then(end).otherwise(pl.min_horizontal(sent + lag, end))
        ready = pl.min_horizontal(pl.coalesce("before", "begin", "origin"), arrivals)
        receives = pairs.with_columns(
            optype=pl.lit(f"{phase}-recv"), start=pl.max_horizontal("origin", ready), end=arrivals
        )
        yield receives
        yield receives.with_columns(
            optype=pl.lit(f"{phase}-send"),
            virtual_stage=pl.col("virtual_stage") - next_,
            stage="sender",
            start="sent",
        )


def _reductions(ops: "pl.DataFrame") -> "pl.DataFrame":
    """Reductions from the last backward of a worker to its optimizer, if there are no ranges of
    them.
    """
    of_step = [*_WORKER, "step"]
    compute = ops.filter(pl.col("optype").is_in(COMPUTE)).group_by(of_step, maintain_order=True)
    optimizers = ops.filter(optype=OPTIMIZER, seq_id=0).select(*of_step, "origin", begin="start")
    last = compute.agg(start=pl.col("end").max()).join(
        optimizers, on=of_step, maintain_order="left"
    )
    reductions = last.with_columns(
        virtual_stage=0, seq_id=0, optype=pl.lit(REDUCE), end=pl.max_horizontal("start", "begin")
    ).cast({"virtual_stage": pl.Int64, "seq_id": pl.Int64})
    return reductions.join(ops, on=_OP, how="anti")


# The largest difference, in scatters of two ends, that the order of leaving can explain.
_BY_CHANCE = 2.0
# All members leave these at the same time.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The offsets between the clocks of ranks.

    **Attributes:**

    - `offsets`: for each rank, the nanoseconds to add to its times.
    - `seen`: for each rank, by how much its clock was found to be ahead of that of the first rank.
    - `scatter_ns`: the robust standard deviation of the remaining differences, over all
        collectives.
    - `matched`: how many collectives were matched.
    - `unknown`: ranks that have no collective in common with the others.
    """

    offsets: dict[int, int]
    seen: dict[int, int]
    scatter_ns: float
    matched: int
    unknown: tuple[int, ...]


def set_clocks(ranks: Sequence[RankOps]) -> Clocks:
    """Finds the offsets between clocks: the median difference between the ends of the collectives
    that two ranks of a job ran together. A difference within twice their scatter is not corrected,
    because it may be the order in which ranks leave; neither is a difference between two ranks of
    one host.
    """
    first = min(ranks, key=lambda r: r.rank)
    seen, offsets, scatters = {first.rank: 0}, {first.rank: 0}, []
    matched: set = set()
    waiting = [first]
    while waiting:
        reference = waiting.pop()
        for ops in ranks:
            shared = _together(reference, ops)
            alike = reference.host == ops.host != ""
            if ops.rank in seen or not (shared or alike):
                continue
            apart = [ops.collectives[k][1] - reference.collectives[k][1] for k in shared] or [0]
            median, scatter = (float(x[0]) for x in typical(np.array(apart, float), (0,)))
            is_apart = not alike and abs(median) > _BY_CHANCE * scatter
            seen[ops.rank] = seen[reference.rank] + round(median)
            offsets[ops.rank] = offsets[reference.rank] - (round(median) if is_apart else 0)
            scatters.append(scatter)
            matched.update(shared)
            waiting.append(ops)
    unknown = tuple(sorted(r.rank for r in ranks if r.rank not in seen))
    offsets |= dict.fromkeys(unknown, 0)
    return Clocks(offsets, seen, max(scatters, default=0.0), len(matched), unknown)


def _together(first: RankOps, second: RankOps) -> list:
    """The collectives that both ranks ran together. If groups are not known, these are the kinds
    that both ran equally often, because others may belong to different groups.
    """
    shared = [k for k in second.collectives if k in first.collectives and k[0].name in _TOGETHER]
    calls = [collections.Counter(message for message, _ in r.collectives) for r in (first, second)]
    return [k for k in shared if k[0].group or calls[0][k[0]] == calls[1][k[0]]]
