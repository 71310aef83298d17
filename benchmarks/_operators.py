"""Measured latencies of single kernels, and those of the shipped tables by shape.

The tables are fitted to the shapes of `../shared/data/operators` by `fit_operators.py`; a folder
with other shapes of the same kinds says how well they predict what they were not fitted to.
"""

import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from prism_jax.cluster import Measured, shape_latencies
from prism_jax.data import ShapeTable
from prism_jax.data._load_kernels import load_shapes
from prism_jax.data._shapes import shape_key
from prism_jax.trace import measured_kernels

from ._rows import attempt, note
from ._tables import by, percent, table


_WORDS: dict[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("operators.toml").read_text()
)
# The names of the devices in the data, those of `hardware/devices`, and their multiprocessors.
DEVICES: dict[str, tuple[str, int]] = {name: tuple(one) for name, one in _WORDS["devices"].items()}
SOURCE, CONSTANTS = _WORDS["source"], _WORDS["constants"]  # Of the tables.
_LARGE = 10e9  # FLOPs of a product that counts in the first of two tables.


def read_operators(folder: pathlib.Path) -> Iterator[tuple[str, Measured]]:
    """The rows of the files that are in a folder, with their device; those that cannot be read are
    counted on stderr."""
    for name, (prepare, sizes) in _PREPARED.items():
        path = folder / f"{name}.parquet"
        if not path.is_file():
            continue
        try:
            whole = prepare(pl.read_parquet(path))
            frame = whole.filter(pl.col("device").is_in(list(DEVICES)), _is_usable(sizes))
        except pl.exceptions.PolarsError as error:
            note(f"{path} is left out: {str(error).splitlines()[0]}")
            continue
        if left := len(whole) - len(frame):
            note(f"{left} rows of {path} are left out: no known device, size or latency")
        for (device,), rows in sorted(frame.group_by("device"), key=lambda one: str(one[0])):
            for measured in _of_device(rows, str(path)):
                yield str(device), measured


def _is_usable(sizes: str) -> pl.Expr:
    """Whether a row has a latency and all sizes, of which those after a `|` may be zero."""
    positive, _, others = sizes.partition("|")
    each = [(name, 1e-12) for name in ("latency_s", *positive.split())]
    each += [(name, 0.0) for name in others.split()]
    return pl.all_horizontal(
        pl.col(name).cast(pl.Float64, strict=False).is_between(least, 1e15) for name, least in each
    )


def _of_device(rows: pl.DataFrame, path: str) -> list[Measured]:
    """The rows of a device, without kernels and dtypes that are not known."""
    found, reason = attempt(measured_kernels, rows, path)
    if reason:
        found = []
        for _, part in sorted(rows.group_by("kernel", "dtype"), key=lambda one: str(one[0])):
            known, reason = attempt(measured_kernels, part, path)
            found += known or []
            if reason:
                note(f"{len(part)} rows are left out: {reason}")
    return found


def names_of(measured: Measured) -> list[str]:
    """The shapes as texts."""
    sizes = measured.sizes()
    case = f" case={measured.case:g}" if measured.case else ""
    return [
        f"{measured.kernel}{case} "
        + " ".join(f"{name}={value:g}" for name, value in zip(sizes, row, strict=True))
        for row in zip(*sizes.values(), strict=True)
    ]


def _text(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.String)


def _gemm(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(kernel=pl.lit("gemm"))


def _attention(frame: pl.DataFrame) -> pl.DataFrame:
    # SGLang falls back to Triton, seven times slower, where 3 or 6 heads share one key.
    fallback = (_text("kernel") == "triton") & (pl.col("dtype") == "bfloat16")
    fallback &= (pl.col("head_dim") == 256) & (pl.col("window") == 0)
    kernel = pl.when(fallback).then(pl.lit("attention:triton")).otherwise(pl.lit("attention"))
    return frame.with_columns(kernel=kernel)


def _mla(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("scope") == "kernel").with_columns(kernel=pl.lit("mla"))


def _moe(frame: pl.DataFrame) -> pl.DataFrame:
    exponent = _text("distribution").replace({"balanced": "0"}).str.replace("power_law_", "")
    exponent = exponent.cast(pl.Float64, strict=False)
    return frame.with_columns(kernel=pl.lit("experts"), exponent=exponent)


def _collectives(frame: pl.DataFrame) -> pl.DataFrame:
    # Rows of one byte and of two take equally long.
    kernel = pl.col("op").replace({"alltoall": "all_to_all"})
    return frame.with_columns(kernel=kernel, dtype=pl.lit(""))


def _deepep(frame: pl.DataFrame) -> pl.DataFrame:
    """The dispatches and the combines, without the notify kernels, which wait."""
    parts = []
    for part in ("dispatch", "combine"):
        columns = {"tokens": "tokens_per_gpu", "sms": f"{part}_sms", "latency_s": f"{part}_s"}
        parts.append(frame.with_columns(kernel=pl.lit(f"deepep_{part}"), **columns))
    return pl.concat(parts)


def _nvlink(frame: pl.DataFrame) -> pl.DataFrame:
    kernel = pl.col("op").str.replace(" NVLinkOneSided", "_one_sided")
    kernel = pl.lit("nvlink_") + kernel.str.replace(" NVLinkTwoSided", "_two_sided")
    return frame.with_columns(kernel=kernel)


_PREPARED = {
    "gemm": (_gemm, "m n k"),
    "attention": (_attention, "batch sequence heads kv_heads head_dim | window causal"),
    "mla": (_mla, "batch sequence heads"),
    "moe": (_moe, "tokens hidden intermediate topk experts ep tp | gated exponent"),
    "collectives": (_collectives, "bytes gpus"),
    "deepep": (_deepep, "tokens hidden topk experts sms nodes"),
    "nvlink_alltoall": (_nvlink, "tokens ep"),
}


def class_of(device: str, measured: Measured) -> np.ndarray:
    """The name of the table in which each row counts."""
    kind = measured.kernel.partition(":")[0]
    if kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
        kind = "collectives"
    kind = next((k for k in ("attention", "deepep", "nvlink") if kind.startswith(k)), kind)
    if kind == "experts" and measured.case:
        kind = "skewed experts"
    kinds = np.full(len(measured.seconds), kind, object)
    if kind == "gemm":
        flop = 2 * np.prod([measured.columns[name] for name in "mnk"], axis=0)
        kinds[flop < _LARGE] = "gemm below 10 GFLOP"
    rest = " ".join(filter(None, (measured.dtype, device)))
    return kinds + f" {rest}"


def find_table(device: str, measured: Measured) -> ShapeTable | None:
    """The shipped table for rows; `None` if there is none."""
    shapes = load_shapes(DEVICES[device][0])
    tables = shapes.get(shape_key(measured.kernel, measured.dtype), ())
    return next((table for table in tables if table.case == measured.case), None)


def operator_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each measured kernel that a shipped table has: `table`, which is its kind, dtype
    and device; the shape as `name`; and `measured` and `predicted` seconds.
    """
    rows = []
    for device, measured in read_operators(folder):
        shapes = find_table(device, measured)
        if shapes is None:
            about = " ".join(filter(None, (device, measured.kernel, measured.dtype)))
            note(f"{len(measured.seconds)} rows are left out: no table of {about}")
            continue
        seconds = measured.seconds.tolist(), shape_latencies(shapes, measured.columns).tolist()
        each = zip(class_of(device, measured), names_of(measured), *seconds, strict=True)
        keys = ("table", "name", "measured", "predicted")
        rows += [dict(zip(keys, row, strict=True)) for row in each]
    return rows


def operator_table(rows: list[dict[str, Any]]) -> str:
    """The errors of each table in Markdown."""
    return error_table(
        {
            name: [np.log(row["predicted"] / row["measured"]) for row in mine]
            for name, mine in by("table", rows).items()
        }
    )


def error_table(errors: dict[str, list[float]]) -> str:
    """For each table, how many rows it has, and the mean and the spread of their errors."""
    cells = []
    for name, found in sorted(errors.items()):
        values = np.array(found)
        # The spread that the bulk has, if it is normal.
        bulk = 1.4826 * np.median(np.abs(values - np.median(values)))
        bias = percent(np.expm1(values.mean()))
        cells.append((name, len(values), f"{values.std():.3f}", f"{bulk:.3f}", bias))
    return table(("kernels", "rows", "std of the log", "median deviation", "bias"), cells)
