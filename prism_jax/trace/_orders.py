"""The stages of the ranks of a trace, their ops for each microbatch, and the order of these ops."""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from jaxtyping import Bool

from .._misc import plural, quoted
from ..data import Job
from ..schedule import TRACED, AbstractSchedule, order_of, parse_token
from ._spans import RankOp
from ._tables import collect, pl
from ._trace import FORWARD_COMPUTE, LETTERS, PIPELINED, TRANSFERS, Trace


# The most steps of replicas whose order is compared.
_MOST_LOOKS = 1000
# A larger share of steps with other orders gives a note.
_NOTED = 0.05
# A mean step time beyond these limits, in seconds, is likely in another unit.
_SHORTEST, _LONGEST = 1e-3, 600.0


def stated_schedule(job: Job) -> AbstractSchedule | None:
    """The schedule that a job gives; `None` if it is to be taken from the trace.

    **Raises:**

    `ValueError` unless it is of whole ops on one chain of stages.
    """
    if job.schedule.kind == TRACED and job.schedule.orders is None:
        return None
    schedule = order_of(job.schedule, job.layout)
    orders = schedule.orders()
    pairs = any(token.startswith("(") for order in orders for token in order)
    if pairs or len(schedule.chain_starts) > 1:
        unsupported = "pairs of overlapped ops" if pairs else "several chains of stages"
        raise ValueError(
            f"Job `{job.name}` runs `{job.schedule.kind}` with {unsupported}; only traces of "
            "forwards and backwards by themselves, on one chain of stages, can be read."
        )
    return schedule


def stages_of_ranks(stage_to_rank: Sequence[int], pp: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank."""
    return tuple(
        tuple(stage for stage, place in enumerate(stage_to_rank) if place == rank)
        for rank in range(pp)
    )


def check_places(
    rows: "pl.LazyFrame", pp: int, schedule: AbstractSchedule | None
) -> tuple[int, ...]:
    """The rank of each stage in a table of ops of `pp` ranks.

    **Raises:**

    `ValueError` if a stage is on two ranks or on another rank than in the job's schedule, a stage
    is missing, or ranks have different numbers of stages.
    """
    places = rows.filter(pl.col("optype").is_in(PIPELINED)).select("virtual_stage", "stage")
    pairs = collect(places.unique()).rows()
    if not pairs:
        raise ValueError("it has no pipeline ops; give at least `forward-compute`.")
    rank_of: dict[int, int] = {}
    for stage, rank in sorted(pairs):
        if rank_of.setdefault(stage, rank) != rank:
            raise ValueError(
                f"`virtual_stage` {stage} is on the ranks (`stage`) {rank_of[stage]} and {rank}; "
                "number the stages through all ranks."
            )
    if schedule is not None:
        stated = schedule.stage_to_rank
        for stage, rank in rank_of.items():
            if stage >= len(stated) or stated[stage] != rank:
                has = f"puts it on {stated[stage]}" if stage < len(stated) else "has no such stage"
                raise ValueError(
                    f"`virtual_stage` {stage} is on rank (`stage`) {rank}, but the job's schedule "
                    f"{has}; give the schedule that was traced."
                )
        return stated
    stage_to_rank = tuple(rank_of.get(stage, -1) for stage in range(max(rank_of, default=-1) + 1))
    numbers = sorted({len(stages) for stages in stages_of_ranks(stage_to_rank, pp)})
    problem = f"ranks have {numbers[0]} to {numbers[-1]} stages" if len(numbers) > 1 else ""
    if -1 in stage_to_rank:
        problem = f"`virtual_stage` {stage_to_rank.index(-1)} is missing"
    if problem:
        raise ValueError(
            f"{problem}; number them from 0 without a gap, equally many for each rank."
        )
    return stage_to_rank


def numbered(
    ops: Sequence[RankOp], rank: int, schedule: AbstractSchedule | None, job: Job
) -> Iterator[RankOp]:
    """The ops of one pipeline rank with their stages, which are -1 if names do not give them. They
    are then those of the schedule that the job gives, in its order.

    **Raises:**

    `ValueError` if a step has more ops of a kind than microbatches, and no schedule is given.
    """
    seen = collections.defaultdict(it.count)
    for op in sorted(ops, key=lambda op: op.start):
        if op.op not in PIPELINED:
            yield dataclasses.replace(op, stage=0)
        elif op.stage >= 0:
            yield op
        elif schedule is None or schedule.num_stages == schedule.num_ranks:
            yield dataclasses.replace(op, stage=rank)
        else:
            number = next(seen[op.step, op.op])
            places = _calls_of(op.op, rank, schedule)
            if number < len(places):  # Further ops are not part of this schedule.
                stage, microbatch = places[number]
                yield dataclasses.replace(op, stage=stage, microbatch=microbatch)
    unknown = {op.microbatch for op in ops if op.op in LETTERS and op.stage < 0}
    if schedule is None and max(unknown, default=-1) >= job.schedule.num_microbatches:
        raise ValueError(
            f"a step has {plural(max(unknown) + 1, 'call')} ops of a kind for "
            f"{job.schedule.num_microbatches} microbatches, and their names do not give their "
            "stages; give the schedule that was traced in place of `traced`."
        )


def _calls_of(op: str, rank: int, schedule: AbstractSchedule) -> list[tuple[int, int]]:
    """Stages and microbatches of a kind of op on a rank, in the order in which it runs them."""
    forward = op.startswith("forward")
    letters = ("F" if forward else "BI") if op in TRANSFERS else LETTERS[op]
    calls = []
    for token in schedule.orders()[rank]:
        letter, stage, microbatch, *_ = parse_token(token, rank, 0)
        peer = stage + TRANSFERS.get(op, 0)
        at = schedule.stage_to_rank[peer] if 0 <= peer < schedule.num_stages else rank
        if letter in letters and (op not in TRANSFERS or at != rank):
            calls.append((stage, microbatch))
    return calls


def expected_calls(
    op: str,
    there: Bool[np.ndarray, "steps dp pp calls"],
    stage_to_rank: Sequence[int],
    schedule: AbstractSchedule | None,
) -> Bool[np.ndarray, "dp pp calls"]:
    """The calls that every step should have: those that the schedule needs, and most steps have."""
    usual = np.mean(there, axis=0) >= 0.5
    if op not in PIPELINED:
        return usual
    expected = np.zeros(there.shape[1:], bool)
    stated = set() if schedule is None else set(it.chain(*schedule.orders()))
    for rank, stages in enumerate(stages_of_ranks(stage_to_rank, there.shape[2])):
        for i, stage in enumerate(stages):
            number = there.shape[3] // len(stages)
            calls = slice(i * number, (i + 1) * number)
            if op in TRANSFERS:
                peer = stage + TRANSFERS[op]
                is_stage = 0 <= peer < len(stage_to_rank)
                expected[:, rank, calls] = is_stage and stage_to_rank[peer] != rank
            elif schedule is not None:
                tokens = (f"{stage}{LETTERS[op]}{m}" for m in range(number))
                expected[:, rank, calls] = [token in stated for token in tokens]
            else:
                expected[:, rank, calls] = op == FORWARD_COMPUTE
    return expected if op in TRANSFERS else expected | usual


def in_order(
    trace: Trace, stage_to_rank: tuple[int, ...], schedule: AbstractSchedule | None
) -> Trace:
    """The trace with the order of its ops, which must be that of the job if the job gives one, and
    with notes about what is unlikely.
    """
    orders, unusual = _traced_orders(trace, stage_to_rank, schedule)
    notes, mean = [], float(np.mean(trace.step_times()))
    if unusual > _NOTED:
        notes.append(
            f"in {100 * unusual:.2g} % of its steps a rank starts its ops in another order than in "
            "most"
        )
    if not _SHORTEST < mean < _LONGEST:
        notes.append(
            f"a step takes {mean:.4g} s on average: `start_ts` and `duration` are read as seconds, "
            "so check that they are in seconds"
        )
    trace = dataclasses.replace(trace, notes=tuple(notes))
    if schedule is not None:
        _check_orders(orders, schedule, trace.job.schedule.kind)
        return trace
    _check_backwards(orders)
    config = msgspec.structs.replace(
        trace.job.schedule,
        orders=tuple(" ".join(order) for order in orders),
        virtual_stages=len(stage_to_rank) // trace.job.layout.pp,
    )
    try:
        order_of(config, trace.job.layout)
    except ValueError as error:
        raise ValueError(f"the order of its ops could not run: {error}") from None
    return dataclasses.replace(trace, job=msgspec.structs.replace(trace.job, schedule=config))


def _traced_orders(
    trace: Trace, stage_to_rank: Sequence[int], schedule: AbstractSchedule | None
) -> tuple[list[list[str]], float]:
    """The tokens of each rank in the order in which most replicas start them in most steps, and the
    largest share of a rank's steps with another order. Ops that start at the same time are in the
    order of the schedule, if one is given.
    """
    orders, unusual = [], 0.0
    for rank, stages in enumerate(stages_of_ranks(stage_to_rank, trace.job.layout.pp)):
        columns = {}
        for op in (op for op in LETTERS if op in trace.start):
            calls = trace.start[op].shape[3] // max(len(stages), 1)
            for number, (stage, m) in enumerate(it.product(stages, range(calls))):
                times = [x[op][:, :, rank, number].reshape(-1) for x in (trace.start, trace.end)]
                if not np.isnan(times[0]).all():
                    columns[f"{stage}{LETTERS[op]}{m}"] = times
        stated = [] if schedule is None else schedule.orders()[rank]
        tokens = [token for token in stated if token in columns]
        tokens += [token for token in columns if token not in {*stated}]
        starts, ends = (np.array([columns[token][i] for token in tokens]) for i in (0, 1))
        stride = max(starts.shape[1] // _MOST_LOOKS, 1)
        rows = np.lexsort((ends[:, ::stride], starts[:, ::stride]), axis=0).T
        kinds, counts = np.unique(rows, axis=0, return_counts=True)
        orders.append([tokens[i] for i in kinds[np.argmax(counts)]])
        unusual = max(unusual, 1 - float(counts.max()) / len(rows))
    return orders, unusual


def _check_orders(orders: list[list[str]], schedule: AbstractSchedule, kind: str) -> None:
    """Raises a `ValueError` that names the first op that differs from the schedule."""
    differs = [
        (position, rank, traced, stated)
        for rank, pair in enumerate(zip(orders, schedule.orders(), strict=True))
        for position, (traced, stated) in enumerate(it.zip_longest(*pair))
        if traced != stated
    ]
    if differs:
        position, rank, traced, stated = min(differs, key=lambda place: place[:2])
        traced, stated = (f"`{x}`" if x else "none" for x in (traced, stated))
        raise ValueError(
            f"op {position + 1} of rank {rank} is {traced} in the trace, but {stated} in the "
            f'schedule `{quoted(kind)}`; give the schedule that was traced, or `kind = "{TRACED}"` '
            "to take that of the trace."
        )


def _check_backwards(orders: list[list[str]]) -> None:
    """Raises a `ValueError` that names a forward without a backward, or with half a backward."""
    tokens = set(it.chain(*orders))
    for token in it.chain(*orders):
        if "F" in token and token.replace("F", "B") not in tokens:
            absent = [half for half in (token.replace("F", x) for x in "IW") if half not in tokens]
            if absent:
                missing = "backward" if len(absent) == 2 else f"`{absent[0]}`"
                raise ValueError(
                    f"`{token}` has no {missing} in most steps; check that the job's "
                    "`num_microbatches` is that of the trace."
                )
