"""Reads how much longer compute takes on each GPU or node."""

import os

import numpy as np
from jaxtyping import Float

from .._files import shown
from ._table import check_positive, collect, columns_of, scan, with_numbers


# A larger factor is a mistake, such as another unit.
_MOST_FACTOR = 1e6


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
