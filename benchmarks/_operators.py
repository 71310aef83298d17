"""Measured latencies of single kernels, and those of the shipped tables by shape.

The tables are fitted to the shapes of `../shared/data/operators` by `fit_operators.py`; a folder
with other shapes of the same kinds says how well they predict what they were not fitted to.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from prism_jax.cluster import attention_sizes, find_kind, shape_latencies
from prism_jax.data import ShapeTable, load_shapes


# The names of the devices in the data, those of `hardware/devices`, and their multiprocessors.
DEVICES = {
    "a100_sxm": ("a100-80g-sxm", 108),
    "h100_sxm": ("h100-sxm", 132),
    "h200_sxm": ("h200-sxm", 132),
    "b200_sxm": ("b200", 148),
    "b300_sxm": ("b300", 148),
    "gb200": ("gb200", 152),
    "gb300": ("gb300", 152),
}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}
_LARGE = 10e9  # FLOPs of a product that counts in the first of two tables.


@dataclasses.dataclass(frozen=True)
class Measured:
    """Rows of one kernel on one device: which table they belong to, their shapes, and seconds."""

    device: str
    kernel: str
    dtype: str
    case: float
    columns: dict[str, np.ndarray]
    seconds: np.ndarray

    def names(self) -> list[str]:
        """The shapes as texts."""
        names = [name for name in find_kind(self.kernel).columns if name in self.columns]
        rows = zip(*(self.columns[name] for name in names), strict=True)
        case = f" case={self.case:g}" if self.case else ""
        return [
            f"{self.kernel}{case} "
            + " ".join(f"{name}={value:g}" for name, value in zip(names, row, strict=True))
            for row in rows
        ]


def read_operators(folder: pathlib.Path) -> Iterator[Measured]:
    """The rows of the files that are in a folder, by device and table."""
    for name, prepare in _PREPARED.items():
        path = folder / f"{name}.parquet"
        if not path.is_file():
            continue
        frame = prepare(pl.read_parquet(path))
        if "case" not in frame.columns:
            frame = frame.with_columns(case=pl.lit(0.0))
        frame = frame.filter(pl.col("seconds") > 0, pl.col("device").is_in(list(DEVICES)))
        about = ["device", "kernel", "dtype", "case"]
        for key, group in sorted(frame.group_by(about), key=lambda pair: pair[0]):
            device, kernel, dtype, case = key
            columns = {
                name: group[name].to_numpy().astype(float)
                for name in ("window", *find_kind(kernel).columns)
                if name in group.columns
            }
            if kernel.startswith("attention"):
                mode = kernel.partition(":")[0].removeprefix("attention_")
                columns |= attention_sizes(mode, **columns)
            yield Measured(device, kernel, dtype, case, columns, group["seconds"].to_numpy())


def _dtype() -> pl.Expr:
    return pl.col("dtype").cast(str).replace(DTYPES)


def _gemm(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(kernel=pl.lit("gemm"), dtype=_dtype(), seconds="latency_s")


def _attention(frame: pl.DataFrame) -> pl.DataFrame:
    # SGLang falls back to Triton, seven times slower, where 3 or 6 heads share one key.
    fallback = (
        (pl.col("kernel").cast(str) == "triton")
        & (pl.col("head_dim") == 256)
        & (pl.col("window") == 0)
        & (pl.col("dtype") == "bfloat16")
    )
    mode = pl.when(pl.col("causal") == 0).then(pl.lit("full"))
    mode = mode.when(pl.col("window") > 0).then(pl.lit("window")).otherwise(pl.lit("causal"))
    suffix = pl.when(fallback).then(pl.lit(":triton")).otherwise(pl.lit(""))
    return frame.with_columns(
        kernel=pl.concat_str(pl.lit("attention_"), mode, suffix),
        dtype=_dtype(),
        case=pl.col("head_dim").cast(float),
        seconds="latency_s",
    )


def _mla(frame: pl.DataFrame) -> pl.DataFrame:
    frame = frame.filter(pl.col("scope") == "kernel")
    return frame.with_columns(kernel=pl.lit("mla"), dtype=_dtype(), seconds="latency_s")


def _moe(frame: pl.DataFrame) -> pl.DataFrame:
    loads = pl.col("distribution").cast(str)
    return frame.with_columns(
        kernel=pl.lit("experts"),
        dtype=_dtype(),
        case=loads.replace({"balanced": "0"}).str.replace("power_law_", "").cast(float),
        width=pl.col("intermediate") / pl.col("tp"),
        matrices=pl.col("gated") + 2,
        seconds="latency_s",
    )


def _collectives(frame: pl.DataFrame) -> pl.DataFrame:
    kernel = pl.col("op").replace({"alltoall": "all_to_all"})
    return frame.with_columns(kernel=kernel, dtype=pl.lit(""), seconds="latency_s")


def _deepep(frame: pl.DataFrame) -> pl.DataFrame:
    """The dispatches and the combines, without the notify kernels, which wait."""
    between = pl.when(pl.col("nodes") > 1).then(pl.lit("_nodes")).otherwise(pl.lit(""))
    parts = [
        frame.with_columns(
            kernel=pl.concat_str(pl.lit(f"deepep_{part}"), between),
            dtype=pl.lit(""),
            tokens="tokens_per_gpu",
            sms=f"{part}_sms",
            seconds=f"{part}_s",
        )
        for part in ("dispatch", "combine")
    ]
    return pl.concat(parts)


def _nvlink(frame: pl.DataFrame) -> pl.DataFrame:
    kernel = pl.col("op").str.replace(" NVLinkOneSided", "_one_sided")
    kernel = pl.lit("nvlink_") + kernel.str.replace(" NVLinkTwoSided", "_two_sided")
    return frame.with_columns(kernel=kernel, dtype=_dtype(), seconds="latency_s")


_PREPARED = {
    "gemm": _gemm,
    "attention": _attention,
    "mla": _mla,
    "moe": _moe,
    "collectives": _collectives,
    "deepep": _deepep,
    "nvlink_alltoall": _nvlink,
}


def class_of(measured: Measured) -> np.ndarray:
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
    rest = " ".join(filter(None, (measured.dtype, measured.device)))
    return kinds + f" {rest}"


def find_table(measured: Measured) -> ShapeTable | None:
    """The shipped table for rows; `None` if there is none."""
    shapes = load_shapes(DEVICES[measured.device][0])
    tables = shapes.get(f"{measured.kernel} {measured.dtype}", ())
    return next((table for table in tables if table.case == measured.case), None)


def operator_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each measured kernel for which a table is shipped: its table, name, and measured and
    predicted seconds.
    """
    rows = []
    for measured in read_operators(folder):
        table = find_table(measured)
        if table is None:
            continue
        predicted = shape_latencies(table, measured.columns).tolist()
        each = zip(
            class_of(measured), measured.names(), measured.seconds.tolist(), predicted, strict=True
        )
        keys = ("table", "name", "measured", "predicted")
        rows += [dict(zip(keys, row, strict=True)) for row in each]
    return rows


def operator_table(rows: list[dict[str, Any]]) -> str:
    """The errors of each table in Markdown."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["table"], []).append(np.log(row["predicted"] / row["measured"]))
    return error_table(errors)


def error_table(errors: dict[str, list[float]]) -> str:
    """For each table, how many rows it has, and the mean and the spread of their errors."""
    lines = [
        "| kernels | rows | std of the log | median deviation | bias |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in sorted(errors.items()):
        values = np.array(found)
        # The spread that the bulk has, if it is normal.
        bulk = 1.4826 * np.median(np.abs(values - np.median(values)))
        lines.append(
            f"| {name} | {len(values)} | {values.std():.3f} | {bulk:.3f} | "
            f"{100 * (np.exp(values.mean()) - 1):+.1f} % |"
        )
    return "\n".join(lines)
