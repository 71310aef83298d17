"""Reading a trace: a table of ops with their starts and durations, checked against the job."""

import os
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from .._files import shown
from .._misc import counted, unknown_name
from ..data import Job
from ._ops import COMPUTE, PIPELINED, SCOPES, expected_calls
from ._table import collect, columns_of, rows_have, scan, with_numbers
from ._trace import Trace


if TYPE_CHECKING:
    import polars as pl


# Columns and their polars types, by the names of ByteDance's StragglerAnalysis (arXiv 2505.05713).
COLUMNS = {
    "dp_rank": "Int32",
    "stage": "Int32",
    "step": "Int64",
    "optype": "String",
    "seq_id": "Int32",
    "start_ts": "Float64",
    "duration": "Float64",
}


# Cells of a table of ops for each row of the trace; whole steps have fewer than one.
_MOST_SPARSE = 4


def read_trace(path: str | os.PathLike, job: Job) -> Trace:
    """Reads a trace of ops from a Parquet or CSV file.

    **Arguments:**

    - `path`: a table with a row for each op: `dp_rank`, `stage` (the pipeline rank), `step`,
        `optype`, `seq_id` (the number of the op among those of its type on its worker, in its
        step), `start_ts` and `duration` in seconds. Other columns are not read.
    - `job`: its layout and schedule must be those of the traced job.

    **Returns:**

    A [`Trace`][]. Rows that are there twice, rows that contradict an earlier one, and steps in
    which ops are missing, are left out and counted in `dropped`.

    **Raises:**

    `ValueError` where columns are missing or hold something else (a fractional rank, step or
    microbatch, or booleans), an op is unknown, a duration is negative or not finite, or a rank or
    microbatch does not fit the job.
    """
    return trace_of_rows(scan(path), path, job)


def trace_of_rows(frame: "pl.LazyFrame", path: str | os.PathLike, job: Job) -> Trace:
    """As `read_trace`, of rows that are read already; `path` is for messages."""
    import polars as pl

    rows = _typed(frame, path)
    pp, dp = job.layout.pp, job.layout.dp
    microbatches = job.schedule.num_microbatches
    _check_job(job)
    _check_rows(rows, path, dp, pp, microbatches)
    steps = collect(rows.select(pl.col("step").unique().sort()), path)["step"].to_numpy()
    ops = collect(rows.select(pl.col("optype").unique(maintain_order=True)), path)["optype"]
    # A job with many more ops than there are rows is another one, and its tables may not fit.
    cells, number = len(steps) * dp * pp * microbatches, collect(rows.select(pl.len()), path).item()
    if cells > _MOST_SPARSE * max(number, 1000):
        raise ValueError(
            f"{shown(path)}: it has {counted(number, 'row')}, but dp * pp * num_microbatches = "
            f"{dp} * {pp} * {microbatches} in {counted(len(steps), 'step')} are {cells:,} ops; "
            "check that the job is the traced one."
        )
    again = {"duplicate rows": 0, "rows that contradict another": 0}
    start, end = {}, {}
    whole = np.ones(len(steps), bool)
    for op in ops:  # One kind at a time: a table of all rows may not fit into memory.
        calls = microbatches if op in PIPELINED else 1
        shape = (len(steps), dp, pp, calls)
        part = collect(rows.filter(pl.col("optype") == op).drop("optype"), path)
        start[op], end[op], twice, contradicting = _placed(part, steps, shape)
        again["duplicate rows"] += twice
        again["rows that contradict another"] += contradicting
        there = ~np.isnan(start[op])
        expected = expected_calls(op, there)
        whole &= np.all(there | ~expected, axis=(1, 2, 3))
        start[op][:, ~expected] = np.nan
        end[op][:, ~expected] = np.nan
    needed = COMPUTE if pp == 1 else PIPELINED
    missing = [op for op in needed if op not in start]
    if missing:
        raise ValueError(
            f"{shown(path)}: it has no `{missing[0]}`; a trace of {counted(pp, 'stage')} needs "
            f"{', '.join(needed)}."
        )
    dropped = {what: number for what, number in again.items() if number}
    if not whole.all():
        dropped["steps with missing ops"] = int(np.sum(~whole))
    if not whole.any():
        raise ValueError(
            f"{shown(path)}: ops are missing in each of {counted(len(steps), 'step')}, for dp = "
            f"{dp}, pp = {pp} and num_microbatches = {microbatches}; check that the job is the "
            "traced one."
        )
    trace = Trace(job, steps, start, end, dropped)
    return trace if whole.all() else trace[np.flatnonzero(whole)]


def _check_job(job: Job) -> None:
    if job.schedule.virtual_stages > 1:
        raise ValueError(
            f"Job `{job.name}` has {job.schedule.virtual_stages} virtual stages on each rank; only "
            "traces with one stage on each can be read."
        )


def _typed(frame: "pl.LazyFrame", path) -> "pl.LazyFrame":
    """The columns that are needed, as what they should hold."""
    import polars as pl

    columns_of(frame, path, COLUMNS)
    integers = [name for name, kind in COLUMNS.items() if kind.startswith("Int")]
    numbers = [name for name, kind in COLUMNS.items() if kind != "String"]
    frame = with_numbers(frame, path, numbers, integers)
    return frame.select(pl.col(n).cast(getattr(pl, t), strict=True) for n, t in COLUMNS.items())


def _check_rows(rows: "pl.LazyFrame", path, dp: int, pp: int, microbatches: int) -> None:
    """Raises a `ValueError` of one sentence where a row cannot be of this job."""
    import polars as pl

    pipelined = pl.col("optype").is_in(PIPELINED)
    finite = pl.col("start_ts").is_finite() & pl.col("duration").is_finite()
    wrongs = (
        (~finite, "a start or duration that is not finite"),
        (pl.col("duration") < 0, "a negative duration"),
        (~pl.col("dp_rank").is_between(0, dp - 1), f"a `dp_rank` that is not below dp = {dp}"),
        (~pl.col("stage").is_between(0, pp - 1), f"a `stage` that is not below pp = {pp}"),
        (
            pipelined & ~pl.col("seq_id").is_between(0, microbatches - 1),
            f"a microbatch (`seq_id`) that is not below num_microbatches = {microbatches}",
        ),
        (~pipelined & (pl.col("seq_id") != 0), "an op that runs twice in a step (`seq_id` over 0)"),
    )
    found = collect(
        rows.select(
            pl.len().alias("rows"),
            *(pl.col(name).null_count().alias(f"empty {name}") for name in COLUMNS),
            *(wrong.sum().alias(what) for wrong, what in wrongs),
        ),
        path,
    ).row(0, named=True)
    if not found["rows"]:
        raise ValueError(f"{shown(path)}: it has no rows.")
    empty = [name for name in COLUMNS if found[f"empty {name}"]]
    if empty:
        raise ValueError(
            f"{shown(path)}: the column `{empty[0]}` has empty cells; fill or drop those rows."
        )
    known = (*PIPELINED, *SCOPES)
    given = collect(rows.select(pl.col("optype").unique()), path)["optype"]
    unknown = sorted({*given} - {*known})
    if unknown:
        raise ValueError(f"{shown(path)}: {unknown_name('op', unknown[0], known)}")
    for wrong, what in wrongs:
        if found[what]:
            row = collect(rows.filter(wrong).head(1), path).row(0, named=True)
            raise ValueError(
                f"{shown(path)}: {rows_have(found[what])} {what}, the first `{row['optype']}` of "
                f"step {row['step']}, dp_rank {row['dp_rank']}, stage {row['stage']}; mend the "
                "trace or give the job that was traced."
            )


def _placed(
    part: "pl.DataFrame", steps: Int[np.ndarray, " steps"], shape: tuple[int, int, int, int]
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Starts and ends of one kind of op, and how many rows are there twice or contradict one that
    came before.
    """
    number = np.searchsorted(steps, part["step"].to_numpy())
    index = tuple(part[c].to_numpy() for c in ("dp_rank", "stage", "seq_id"))
    place = np.ravel_multi_index((number, *index), shape)[::-1]
    tables, again, other = [], 0, np.zeros((), bool)
    for column in (part["start_ts"], part["start_ts"] + part["duration"]):
        values = column.to_numpy()[::-1]
        table = np.full(shape, np.nan)
        # Backwards, so that of rows that are there twice the first stays.
        table.reshape(-1)[place] = values
        again = len(place) - int(np.count_nonzero(~np.isnan(table)))
        if again:
            other = other | (table.reshape(-1)[place] != values)
        tables.append(table)
    contradicting = int(np.sum(other))
    return tables[0], tables[1], again - contradicting, contradicting
