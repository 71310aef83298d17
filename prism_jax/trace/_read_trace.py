"""Reads a trace: a table of ops with their starts and durations, checked against a job."""

import math
import os
from collections.abc import Collection

import numpy as np
from jaxtyping import Int

from .._misc import check_type, plural, unknown_name
from ..data import Job
from ..schedule import AbstractSchedule
from ._orders import check_places, expected_calls, in_order, stages_of_ranks, stated_schedule
from ._tables import collect, columns_of, pl, rows_have, scanned, with_numbers
from ._trace import BACKWARD_COMPUTE, FORWARD_COMPUTE, OPS, PIPELINED, TRANSFERS, Trace


# Columns and their polars types, by the names of ByteDance's StragglerAnalysis (arXiv 2505.05713).
COLUMNS = {
    "dp_rank": "Int32",
    "stage": "Int32",
    "virtual_stage": "Int32",
    "step": "Int64",
    "optype": "String",
    "seq_id": "Int32",
    "start_ts": "Float64",
    "duration": "Float64",
}


# The most cells of a table of ops for each row of the trace; complete steps have less than one.
_MOST_SPARSE = 4
# The most rows for each op.
_MOST_AGAIN = 4
_MOST_STAGES = 10**5


def read_trace(path: str | os.PathLike[str], job: Job) -> Trace:
    """Reads a trace of ops from a Parquet or CSV file.

    **Arguments:**

    - `path`: a table with a row for each op and these columns: `dp_rank`, `stage` (the pipeline
        rank), `step`, `optype`, `seq_id` (the number of the op among the ops of its type on its
        worker in its step), `start_ts` and `duration` (in seconds). If ranks have several stages,
        the column `virtual_stage` is the global virtual stage. Other columns are ignored.
    - `job`: a job with the layout and the schedule of the traced job. If the kind of the schedule
        is `traced`, the order of ops is taken from the trace.

    **Returns:**

    A [`Trace`][]. Duplicate rows, rows that contradict an earlier row, and steps in which ops are
    missing are left out and counted in `dropped`.

    **Raises:**

    `ValueError` if columns are missing or have the wrong type (fractional ranks, steps or
    microbatches, or booleans), if an op is unknown, if a duration is negative or not finite, if a
    rank, stage or microbatch does not fit the job, or if ops do not start in the order of its
    schedule.
    """
    check_type(job, Job, "job", "use `load_job` to get one")
    schedule = stated_schedule(job)
    with scanned(path) as frame:
        return trace_of_rows(frame, job, schedule)


def trace_of_rows(
    frame: "pl.LazyFrame",
    job: Job,
    schedule: AbstractSchedule | None,
    hint: str = "check that the job is the traced one",
) -> Trace:
    """`read_trace`, from rows and the `stated_schedule` of the job. `hint` is a reason for missing
    ops, for messages.
    """
    rows = _typed(frame, job)
    pp, dp = job.layout.pp, job.layout.dp
    microbatches = job.schedule.num_microbatches
    _check_rows(rows, dp, pp, microbatches)
    stage_to_rank = check_places(rows, pp, schedule)
    local = {s: i for stages in stages_of_ranks(stage_to_rank, pp) for i, s in enumerate(stages)}
    virtual_stages = max(local.values(), default=0) + 1
    own_chunk = pl.col("virtual_stage").replace_strict(local, return_dtype=pl.Int32)
    rows = rows.with_columns(seq_id=pl.col("seq_id") + microbatches * own_chunk)
    steps = collect(rows.select(pl.col("step").unique().sort()))["step"].to_numpy()
    ops = collect(rows.select(pl.col("optype").unique(maintain_order=True)))["optype"]
    number = collect(rows.select(pl.len())).item()
    _check_number(number, len(steps), job, virtual_stages, hint)
    again = {"duplicate rows": 0, "rows that contradict another": 0}
    start, end = {}, {}
    complete = np.ones(len(steps), bool)
    for op in ops:  # One kind at a time: a table of all rows may not fit into memory.
        calls = microbatches * virtual_stages if op in PIPELINED else 1
        shape = (len(steps), dp, pp, calls)
        part = collect(rows.filter(pl.col("optype") == op).drop("optype"))
        start[op], end[op], twice, contradicting = _placed(part, steps, shape)
        again["duplicate rows"] += twice
        again["rows that contradict another"] += contradicting
        there = ~np.isnan(start[op])
        expected = expected_calls(op, there, stage_to_rank, schedule)
        complete &= np.all(there | ~expected, axis=(1, 2, 3))
        start[op][:, ~expected] = np.nan
        end[op][:, ~expected] = np.nan
    needed = _needed_ops(pp, start)
    missing = [op for op in needed if op not in start]
    if missing:
        raise ValueError(
            f"it has no `{missing[0]}`; a trace of {plural(pp, 'stage')} needs {', '.join(needed)}."
        )
    dropped = {reason: number for reason, number in again.items() if number}
    if not complete.all():
        dropped["steps with missing ops"] = int(np.sum(~complete))
    if not complete.any():
        raise ValueError(
            f"ops are missing in each of {plural(len(steps), 'step')}, for dp = {dp}, pp = {pp} "
            f"and num_microbatches = {microbatches}; {hint}."
        )
    trace = Trace(job, steps, start, end, dropped)
    trace = trace if complete.all() else trace[np.flatnonzero(complete)]
    return in_order(trace, stage_to_rank, schedule)


def _check_number(number: int, num_steps: int, job: Job, virtual_stages: int, hint: str) -> None:
    """Raises a `ValueError` for far fewer or far more rows than the steps of this job have ops."""
    dp, pp, microbatches = job.layout.dp, job.layout.pp, job.schedule.num_microbatches
    cells, steps = num_steps * dp * pp * microbatches, plural(num_steps, "step")
    # A job with many more ops than rows is not the traced one, and its tables may not fit.
    if cells * virtual_stages > _MOST_SPARSE * max(number, 1000):
        raise ValueError(
            f"it has {plural(number, 'row')}, but dp * pp * num_microbatches = {dp} * {pp} * "
            f"{microbatches} in {steps} are {cells:,} ops; {hint}."
        )
    # A small file may hold the same row many times.
    if number > (most := _MOST_AGAIN * len(OPS) * max(cells * virtual_stages, 1000)):
        raise ValueError(
            f"it has {number:,} rows, and {steps} of this job up to {most // _MOST_AGAIN:,} ops; "
            "leave out what is there several times."
        )


def _needed_ops(pp: int, ops: Collection[str]) -> tuple[str, ...]:
    """Kinds of ops that every step needs, besides those that were found."""
    halves = {"backward-input", "backward-weight"} & {*ops}
    compute = (FORWARD_COMPUTE, "backward-input" if halves else BACKWARD_COMPUTE)
    return compute if pp == 1 else (*compute, *TRANSFERS)


def _typed(frame: "pl.LazyFrame", job: Job) -> "pl.LazyFrame":
    """The required columns, with the right types. If all ranks have one stage, `virtual_stage` may
    be missing. Ops that run once in a step have none, and get zero.
    """
    columns = columns_of(frame, [name for name in COLUMNS if name != "virtual_stage"])
    if "virtual_stage" not in columns:
        if job.schedule.virtual_stages > 1:
            raise ValueError(
                "the column `virtual_stage` is missing, but the job has "
                f"{job.schedule.virtual_stages} virtual stages on each rank; add it, with the "
                "virtual stage of each op."
            )
        frame = frame.with_columns(virtual_stage=pl.col("stage"))
    integers = [name for name, kind in COLUMNS.items() if kind.startswith("Int")]
    numbers = [name for name, kind in COLUMNS.items() if kind != "String"]
    frame = with_numbers(frame, numbers, integers)
    frame = frame.select(pl.col(n).cast(getattr(pl, t), strict=True) for n, t in COLUMNS.items())
    pipelined = pl.col("optype").is_in(PIPELINED)
    return frame.with_columns(virtual_stage=pl.when(pipelined).then("virtual_stage").otherwise(0))


def _check_rows(rows: "pl.LazyFrame", dp: int, pp: int, microbatches: int) -> None:
    """Raises a `ValueError` of one sentence if a row cannot belong to this job."""
    pipelined = pl.col("optype").is_in(PIPELINED)
    finite = pl.col("start_ts").is_finite() & pl.col("duration").is_finite()
    wrongs = (
        (~finite, "a start or duration that is not finite"),
        (pl.col("duration") < 0, "a negative duration"),
        (~pl.col("dp_rank").is_between(0, dp - 1), f"a `dp_rank` that is not below dp = {dp}"),
        (~pl.col("stage").is_between(0, pp - 1), f"a `stage` that is not below pp = {pp}"),
        (
            ~pl.col("virtual_stage").is_between(0, _MOST_STAGES - 1),
            f"a `virtual_stage` that is not below {_MOST_STAGES}",
        ),
        (
            pipelined & ~pl.col("seq_id").is_between(0, microbatches - 1),
            f"a microbatch (`seq_id`) that is not below num_microbatches = {microbatches}",
        ),
        (~pipelined & (pl.col("seq_id") != 0), "an op that runs twice in a step (`seq_id` over 0)"),
    )
    counts = collect(
        rows.select(
            pl.len().alias("rows"),
            *(pl.col(name).null_count().alias(f"empty {name}") for name in COLUMNS),
            *(wrong.sum().alias(problem) for wrong, problem in wrongs),
        )
    ).row(0, named=True)
    if not counts["rows"]:
        raise ValueError("it has no rows.")
    empty = [name for name in COLUMNS if counts[f"empty {name}"]]
    if empty:
        raise ValueError(f"the column `{empty[0]}` has empty cells; fill or drop those rows.")
    optypes = collect(rows.select(pl.col("optype").unique()))["optype"]
    unknown = sorted({*optypes} - {*OPS})
    if unknown:
        raise ValueError(unknown_name("op", unknown[0], OPS))
    for wrong, problem in wrongs:
        if counts[problem]:
            row = collect(rows.filter(wrong).head(1)).row(0, named=True)
            raise ValueError(
                f"{rows_have(counts[problem])} {problem}, the first `{row['optype']}` of step "
                f"{row['step']}, dp_rank {row['dp_rank']}, stage {row['stage']}; correct the "
                "trace, or give the job that was traced."
            )


def _placed(
    part: "pl.DataFrame", steps: Int[np.ndarray, " steps"], shape: tuple[int, int, int, int]
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The starts and ends of one kind of op, and how many rows are duplicates or contradict an
    earlier row.
    """
    number = np.searchsorted(steps, part["step"].to_numpy())
    index = (part[name].to_numpy() for name in ("dp_rank", "stage", "seq_id"))
    place = np.ravel_multi_index((number, *index), shape)
    start, duration = (part[name].to_numpy() for name in ("start_ts", "duration"))
    times, tables = (start, start + duration), np.full((2, math.prod(shape)), np.nan)
    for table, values in zip(tables, times, strict=True):
        # Backwards, so that the first of duplicate rows is written last and remains.
        table[place[::-1]] = values[::-1]
    again = len(place) - int(np.count_nonzero(~np.isnan(tables[0])))
    contradicting = int(np.sum(np.any(tables[:, place] != times, axis=0))) if again else 0
    return *tables.reshape(2, *shape), again - contradicting, contradicting
