"""Reads tables of measured step times, and of how much longer compute takes on each GPU or node."""

import os

import numpy as np
from jaxtyping import Float

from .._files import shown
from .._misc import quoted
from ._table import check_positive, collect, columns_of, scan, with_numbers


# From a nanosecond to thirty years.
_MOST_S = 1e9
# A larger factor is a mistake, such as another unit.
_MOST_FACTOR = 1e6


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


def read_factors(
    path: str | os.PathLike[str],
) -> tuple[Float[np.ndarray, " gpus_or_nodes"], str | None]:
    """Reads the column `factor` of a CSV or Parquet file: how much longer compute takes on each
    GPU, or on each node, than on the mean one. Factors are sorted by the column `gpu` or `node` or,
    without these, are in the order of the file. Also returns the name of that column.

    **Raises:**

    `ValueError` if there are no factors, one is not a positive number, or `gpu` or `node` do not
    count from 0 up.
    """
    import polars as pl

    frame = scan(path)
    given = columns_of(frame, path, ["factor"])
    by = [name for name in ("gpu", "node") if name in given]
    if len(by) == 2:
        raise ValueError(f"{shown(path)}: it has the columns `gpu` and `node`; keep one of them.")
    frame = with_numbers(frame, path, ["factor", *by], by)
    factor = pl.col("factor").cast(pl.Float64, strict=False).alias("value")
    table = collect(frame.select("factor", factor, *by), path)
    if not len(table):
        raise ValueError(f"{shown(path)}: it has no rows.")
    check_positive(table, path, "factor", tuple(by), "number", _MOST_FACTOR)
    if not by:
        return table["value"].to_numpy(), None
    table = table.sort(by[0])
    number = table[by[0]].to_numpy()
    wrong = np.flatnonzero(number != np.arange(len(number)))
    if len(wrong):
        raise ValueError(
            f"{shown(path)}: `{by[0]}` must count from 0 to {len(number) - 1}, each once; "
            f"{wrong[0]} is missing, or another number occurs twice."
        )
    return table["value"].to_numpy(), by[0]
