"""Reading measured step times."""

import os

import numpy as np
from jaxtyping import Float

from .._files import shown
from .._misc import quoted
from ._table import check_positive, collect, columns_of, scan, with_numbers


# From a nanosecond to thirty years.
_MOST_S = 1e9


def read_step_times(path: str | os.PathLike[str]) -> Float[np.ndarray, " steps"]:
    """Reads measured step times, in seconds, from the column `step_time_s` of a CSV or Parquet
    file.

    If there is a column `run`, the runs follow one another in the order of their first rows. If
    there is a column `step`, the steps of a run are sorted by it.

    **Raises:**

    `ValueError` if there are no step times, one is not a positive number, a `run` is empty, or a
    `step` is not an integer or occurs twice in its run.
    """
    return np.concatenate(read_runs(path))


def read_runs(path: str | os.PathLike[str]) -> list[Float[np.ndarray, " steps"]]:
    """As `read_step_times`, but with a separate array for each `run`, if there is such a column.
    Runs are in the order of their first rows. The steps of a run are sorted by the column `step`
    or, without it, are in the order of the file.

    **Raises:**

    As `read_step_times`.
    """
    import polars as pl

    frame = scan(path)
    given = columns_of(frame, path, ["step_time_s"])
    integers = ["step"] if "step" in given else []
    frame = with_numbers(frame, path, ["step_time_s", *integers], integers)
    if "run" in given and frame.collect_schema()["run"].is_nested():
        raise ValueError(f"{shown(path)}: the column `run` holds lists or tables; give names.")
    seconds = pl.col("step_time_s").cast(pl.Float64, strict=False).alias("value")
    run = pl.col("run") if "run" in given else pl.lit(0).alias("run")
    step = pl.col("step") if integers else pl.int_range(pl.len()).alias("step")
    table = collect(frame.select(run, step, "step_time_s", seconds), path)
    if not len(table):
        raise ValueError(f"{shown(path)}: it has no rows.")
    check_positive(table, path, "step_time_s", ("run", "step"), "number of seconds", _MOST_S)
    twice = table.select("run", "step").is_duplicated()
    if twice.any():
        row = table.row(int(twice.arg_max() or 0), named=True)
        of_run = f" of run {quoted(str(row['run']))}" if "run" in given else ""
        raise ValueError(
            f"{shown(path)}: step {row['step']}{of_run} has two rows; keep one of them, or name "
            "the runs in a column `run`."
        )
    parts = table.partition_by("run", maintain_order=True)
    return [part.sort("step")["value"].to_numpy() for part in parts]
