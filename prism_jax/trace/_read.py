"""Reading a trace: a table of ops with their starts and durations, checked against the job."""

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from .._misc import counted, unknown_name
from ..data import Job


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

# Ops that a worker runs once for each microbatch.
COMPUTE = ("forward-compute", "backward-compute")
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
# Ops that it runs once in a step, and with whom: the other replicas of its stage, the last stage
# of its replica, everyone, or nobody whose op is in the trace.
SCOPES = {
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "embedding-grads-all-reduce": "pp",
    "optimizer-clip-main-grad": "world",
    "layernorm-grads-all-reduce": "self",
    "optimizer": "self",
    "gc": "self",
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """Ops of some steps of a job, in seconds from the start of their step.

    **Attributes:**

    - `job`: the layout and schedule that it was recorded on.
    - `steps`: `(steps,)`, the numbers of the steps.
    - `start`, `end`: for each kind of op, `(steps, dp, pp, calls)`: a call for each microbatch, or
        one; `nan` where a worker has no such op.
    - `dropped`: what was left out, as reason and number.
    """

    job: Job
    steps: Int[np.ndarray, " steps"]
    start: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    end: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    dropped: dict[str, int]

    def step_times(self) -> Float[np.ndarray, " steps"]:
        """From the first start to the last end of each step, in seconds."""
        low = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in self.start.values()], axis=0)
        high = np.max([np.nanmax(x, axis=(1, 2, 3)) for x in self.end.values()], axis=0)
        return high - low

    def __getitem__(self, chosen: slice | Int[np.ndarray, " chosen"]) -> "Trace":
        """The same trace of some of its steps."""
        return dataclasses.replace(
            self,
            steps=self.steps[chosen],
            start={op: x[chosen] for op, x in self.start.items()},
            end={op: x[chosen] for op, x in self.end.items()},
        )


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
    import polars as pl

    rows = _typed(_scan(pathlib.Path(path)), path)
    pp, dp = job.layout.pp, job.layout.dp
    microbatches = job.schedule.num_microbatches
    _check_job(job)
    _check_rows(rows, path, dp, pp, microbatches)
    steps = _collect(rows.select(pl.col("step").unique().sort()), path)["step"].to_numpy()
    ops = _collect(rows.select(pl.col("optype").unique(maintain_order=True)), path)["optype"]
    again = {"duplicate rows": 0, "rows that contradict another": 0}
    start, end = {}, {}
    whole = np.ones(len(steps), bool)
    for op in ops:  # One kind at a time: a table of all rows may not fit into memory.
        calls = microbatches if op in COMPUTE + TRANSFERS else 1
        shape = (len(steps), dp, pp, calls)
        part = _collect(rows.filter(pl.col("optype") == op).drop("optype"), path)
        start[op], end[op], twice, contradicting = _placed(part, steps, shape)
        again["duplicate rows"] += twice
        again["rows that contradict another"] += contradicting
        there = ~np.isnan(start[op])
        expected = _expected(op, there)
        whole &= np.all(there | ~expected, axis=(1, 2, 3))
        start[op][:, ~expected] = np.nan
        end[op][:, ~expected] = np.nan
    needed = COMPUTE if pp == 1 else COMPUTE + TRANSFERS
    missing = [op for op in needed if op not in start]
    if missing:
        raise ValueError(
            f"{path}: it has no `{missing[0]}`; a trace of {counted(pp, 'stage')} needs "
            f"{', '.join(needed)}."
        )
    dropped = {what: number for what, number in again.items() if number}
    if not whole.all():
        dropped["steps with missing ops"] = int(np.sum(~whole))
    if not whole.any():
        raise ValueError(
            f"{path}: ops are missing in each of {counted(len(steps), 'step')}, for dp = {dp}, "
            f"pp = {pp} and num_microbatches = {microbatches}; check that the job is the traced "
            "one."
        )
    trace = Trace(job, steps, start, end, dropped)
    return trace if whole.all() else trace[np.flatnonzero(whole)]


def read_step_times(path: str | os.PathLike) -> Float[np.ndarray, " steps"]:
    """The column `step_time_s` of a CSV or Parquet file: measured step times, in seconds, run after
    run as in `read_runs`.

    **Raises:**

    As `read_runs`.
    """
    return np.concatenate(read_runs(path))


def read_runs(path: str | os.PathLike) -> list[Float[np.ndarray, " steps"]]:
    """As `read_step_times`, with the steps of each `run` apart, where there is such a column: runs
    in the order of their first row, the steps of each by their `step`, or in the order of the file
    where there is no such column.

    **Raises:**

    `ValueError` where there are no step times, one is not a positive number, a `run` is empty, or a
    `step` is no whole number or there twice in its run.
    """
    import polars as pl

    frame = _scan(pathlib.Path(path))
    given = frame.collect_schema()
    if "step_time_s" not in given:
        raise ValueError(f"{path}: the column `step_time_s` is missing; it has {', '.join(given)}.")
    integers = ["step"] if "step" in given else []
    _check_numbers(frame, path, ["step_time_s", *integers], integers)
    seconds = pl.col("step_time_s").cast(pl.Float64, strict=False).alias("value")
    run = pl.col("run") if "run" in given else pl.lit(0).alias("run")
    step = pl.col("step").cast(pl.Int64) if integers else pl.int_range(pl.len()).alias("step")
    table = _collect(frame.select(run, step, "step_time_s", seconds), path)
    if not len(table):
        raise ValueError(f"{path}: it has no rows.")
    _check_positive(table, path, "step_time_s", ("run", "step"), "number of seconds")
    twice = table.select("run", "step").is_duplicated()
    if twice.any():
        row = table.row(int(twice.arg_max() or 0), named=True)
        of_run = f" of run {row['run']}" if "run" in given else ""
        raise ValueError(
            f"{path}: step {row['step']}{of_run} is there twice; keep one of its rows, or tell the "
            "runs apart in a column `run`."
        )
    parts = table.partition_by("run", maintain_order=True)
    return [part.sort("step")["value"].to_numpy() for part in parts]


def read_factors(
    path: str | os.PathLike,
) -> tuple[Float[np.ndarray, " gpus_or_nodes"], str | None]:
    """The column `factor` of a CSV or Parquet file: how much longer compute takes on each GPU, or
    on each node, than on the mean one; by the column `gpu` or `node`, or in the order of the file
    where there is neither. Gives them with the name of that column.

    **Raises:**

    `ValueError` where there are no factors, one is not a positive number, or `gpu` or `node` do not
    count from 0 up.
    """
    import polars as pl

    frame = _scan(pathlib.Path(path))
    given = frame.collect_schema()
    if "factor" not in given:
        raise ValueError(f"{path}: the column `factor` is missing; it has {', '.join(given)}.")
    by = [name for name in ("gpu", "node") if name in given]
    if len(by) == 2:
        raise ValueError(f"{path}: it has the columns `gpu` and `node`; keep one of them.")
    _check_numbers(frame, path, ["factor", *by], by)
    factor = pl.col("factor").cast(pl.Float64, strict=False).alias("value")
    table = _collect(frame.select("factor", factor, *by), path)
    if not len(table):
        raise ValueError(f"{path}: it has no rows.")
    _check_positive(table, path, "factor", tuple(by), "number")
    if not by:
        return table["value"].to_numpy(), None
    table = table.sort(by[0])
    number = table[by[0]].cast(pl.Int64).to_numpy()
    wrong = np.flatnonzero(number != np.arange(len(number)))
    if len(wrong):
        raise ValueError(
            f"{path}: `{by[0]}` must count from 0 to {len(number) - 1}, each once; "
            f"{wrong[0]} is missing or another there twice."
        )
    return table["value"].to_numpy(), by[0]


def _check_positive(
    table: "pl.DataFrame", path, column: str, others: tuple[str, ...], what: str
) -> None:
    """Refuses empty cells, and what is no positive number in the column that was made `value`."""
    for name in (*others, column):
        if table[name].null_count():
            row = int(table[name].is_null().arg_max() or 0) + 1
            raise ValueError(f"{path}: `{name}` is empty in row {row}; fill or drop that row.")
    values = table["value"].fill_null(np.nan).to_numpy()
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{path}: `{column}` is {table[column][row]!r} in row {row + 1}, but must be a "
            f"positive {what}."
        )


def _scan(path: pathlib.Path) -> "pl.LazyFrame":
    import polars as pl

    readers = {".parquet": pl.scan_parquet, ".csv": pl.scan_csv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: give a `.parquet` or a `.csv` file.")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        frame = readers[path.suffix](path)
        frame.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(
            f"{path}: it cannot be read as {path.suffix[1:]}: {_line(error)}."
        ) from None
    return frame


def _check_job(job: Job) -> None:
    if job.schedule.virtual_stages > 1:
        raise ValueError(
            f"Job `{job.name}` has {job.schedule.virtual_stages} virtual stages on each rank; only "
            "traces with one stage on each can be read."
        )


def _typed(frame: "pl.LazyFrame", path) -> "pl.LazyFrame":
    """The columns that are needed, as what they should hold."""
    import polars as pl

    given = frame.collect_schema()
    missing = [name for name in COLUMNS if name not in given]
    if missing:
        raise ValueError(
            f"{path}: it has no column {', '.join(f'`{m}`' for m in missing)}; it has "
            f"{', '.join(given)}."
        )
    integers = [name for name, kind in COLUMNS.items() if kind.startswith("Int")]
    _check_numbers(frame, path, [n for n, kind in COLUMNS.items() if kind != "String"], integers)
    return frame.select(pl.col(n).cast(getattr(pl, t), strict=True) for n, t in COLUMNS.items())


def _check_numbers(frame: "pl.LazyFrame", path, numbers: list[str], integers: list[str]) -> None:
    """Refuses what a cast would change without a word: booleans, times, and fractions."""
    import polars as pl

    given = frame.collect_schema()
    for name in numbers:
        kind = given[name]
        if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
            raise ValueError(f"{path}: the column `{name}` holds {kind} values; give numbers.")
    floats = [name for name in integers if given[name].is_float()]
    if not floats:
        return
    fractional = [(pl.col(n).is_finite() & (pl.col(n) != pl.col(n).round())) for n in floats]
    found = _collect(frame.select(x.sum() for x in fractional), path).row(0)
    for name, wrong, number in zip(floats, fractional, found, strict=True):
        if number:
            first = _collect(frame.filter(wrong).select(name).head(1), path)[name][0]
            raise ValueError(
                f"{path}: {_rows(number)} a fractional `{name}`, the first {first:g}; give whole "
                "numbers."
            )


def _rows(number: int) -> str:
    return f"{counted(number, 'row')} {'has' if number == 1 else 'have'}"


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


def _collect(frame: "pl.LazyFrame", path) -> "pl.DataFrame":
    """In batches of rows, whatever the size of the file."""
    import polars as pl

    try:
        return frame.collect(engine="streaming")
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: a column holds something else: {_line(error)}.") from None


def _check_rows(rows: "pl.LazyFrame", path, dp: int, pp: int, microbatches: int) -> None:
    """Raises a `ValueError` of one sentence where a row cannot be of this job."""
    import polars as pl

    pipelined = pl.col("optype").is_in(COMPUTE + TRANSFERS)
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
    found = _collect(
        rows.select(
            pl.len().alias("rows"),
            *(pl.col(name).null_count().alias(f"empty {name}") for name in COLUMNS),
            *(wrong.sum().alias(what) for wrong, what in wrongs),
        ),
        path,
    ).row(0, named=True)
    if not found["rows"]:
        raise ValueError(f"{path}: it has no rows.")
    empty = [name for name in COLUMNS if found[f"empty {name}"]]
    if empty:
        raise ValueError(
            f"{path}: the column `{empty[0]}` has empty cells; fill or drop those rows."
        )
    known = (*COMPUTE, *TRANSFERS, *SCOPES)
    given = _collect(rows.select(pl.col("optype").unique()), path)["optype"]
    unknown = sorted({*given} - {*known})
    if unknown:
        raise ValueError(f"{path}: {unknown_name('op', unknown[0], known)}")
    for wrong, what in wrongs:
        if found[what]:
            row = _collect(rows.filter(wrong).head(1), path).row(0, named=True)
            raise ValueError(
                f"{path}: {_rows(found[what])} {what}, the first `{row['optype']}` of step "
                f"{row['step']}, dp_rank {row['dp_rank']}, stage {row['stage']}; mend the trace or "
                "give the job that was traced."
            )


def _expected(op: str, there: np.ndarray) -> np.ndarray:
    """Which calls every step should have: what the pipeline needs, or what most steps have."""
    _, dp, pp, calls = there.shape
    stage = np.arange(pp)
    runs = {
        "forward-send": stage < pp - 1,
        "forward-recv": stage > 0,
        "backward-send": stage > 0,
        "backward-recv": stage < pp - 1,
    }
    if op in COMPUTE:
        return np.ones((dp, pp, calls), bool)
    if op in runs:
        return np.broadcast_to(runs[op][:, None], (dp, pp, calls))
    return np.mean(there, axis=0) >= 0.5


def _line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
