"""Fits the shipped tables by shape, `kernels/shapes/`, to measured kernels.

    python benchmarks/fit_operators.py ../shared/data/operators

The printed errors are those of shapes that were left out of the fit. `python benchmarks/accuracy.py
--operators` compares the tables with measured latencies of single kernels: a folder with other
shapes of the same kinds says how well they predict what they were not fitted to.
"""

import os
import pathlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any


# Threads gain nothing on systems of a hundred equations, and wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np
import polars as pl


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from prism_jax.cluster import MeasuredLatencies, cross_validate, fit_shapes, shape_latencies
from prism_jax.data import Constant, ShapeTable, Source, save_shapes
from prism_jax.data._load_kernels import load_shapes
from prism_jax.data._shapes import shape_key
from prism_jax.trace import measured_kernels
from validation.rows import ROOT, attempt, note, note_left_out, words
from validation.tables import Folder, Row, by, error_of, options, percent, table


_WORDS = words("operators")
# The names of the devices in the data, those of `hardware/devices`, and their multiprocessors.
DEVICES: dict[str, tuple[str, int]] = {name: tuple(one) for name, one in _WORDS["devices"].items()}
SOURCE, CONSTANTS = _WORDS["source"], _WORDS["constants"]  # Of the tables.
_LARGE = 10e9  # FLOPs of a product that counts in the first of two tables.
_KEYS = ("table", "name", "measured", "predicted")


# Each a file, and what its rows are.
SERVING = tuple(_WORDS["files"].items())
TRAINING = tuple((part["file"], part) for part in _WORDS["training"])
_FITTED_NODES = 4  # Collectives over more nodes are predicted from those over so many.


def read_operators(folder: Folder, parts: Any = SERVING) -> Iterator[tuple[str, MeasuredLatencies]]:
    """The rows of the files that are in a folder, with their device; those that cannot be read are
    counted on stderr."""
    for name, about in parts:
        path = folder / f"{name}.parquet"
        if not path.is_file():
            continue
        try:
            read = pl.read_parquet(path).rename({"seconds": "latency_s"}, strict=False)
            made = ({k: pl.sql_expr(sql) for k, sql in one.items()} for one in about["columns"])
            whole = pl.concat([read.with_columns(**columns) for columns in made])
            whole = whole.filter(pl.col("kernel").is_not_null())
            frame = whole.filter(pl.col("device").is_in(list(DEVICES)), _is_usable(about["sizes"]))
        except pl.exceptions.PolarsError as error:
            note(f"{path} is left out: {str(error).splitlines()[0]}")
            continue
        note_left_out(len(whole) - len(frame), path, "no known device, size or latency")
        for (device,), rows in sorted(frame.group_by("device"), key=lambda one: str(one[0])):
            for measured in _of_device(rows, str(path)):
                yield str(device), measured


def _is_usable(sizes: str) -> pl.Expr:
    """Whether a row has a latency and all sizes."""
    positive, _, others = sizes.partition("|")
    each = dict.fromkeys(("latency_s", *positive.split()), 1e-12)
    each |= dict.fromkeys(others.split(), 0.0)
    values = {name: pl.col(name).cast(pl.Float64, strict=False) for name in each}
    return pl.all_horizontal(values[n].is_between(least, 1e15) for n, least in each.items())


def _of_device(rows: pl.DataFrame, path: str) -> list[MeasuredLatencies]:
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


def names_of(measured: MeasuredLatencies) -> list[str]:
    """The shapes as texts."""
    sizes = measured.sizes()
    start = measured.kernel + (f" case={measured.case:g}" if measured.case else "")
    form = " ".join([start, *(f"{name}={{:g}}" for name in sizes)])
    return [form.format(*row) for row in zip(*sizes.values(), strict=True)]


def class_of(device: str, measured: MeasuredLatencies) -> np.ndarray:
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


def operator_rows(folder: Folder) -> list[Row]:
    """A row for each measured kernel that a shipped table has: `table`, which is its kind, dtype
    and device; the shape as `name`; and `measured` and `predicted` seconds.
    """
    rows = []
    for device, measured in read_operators(folder):
        shapes = load_shapes(DEVICES[device][0])
        tables = shapes.get(shape_key(measured.kernel, measured.dtype), ())
        shapes = next((table for table in tables if table.case == measured.case), None)
        if shapes is None:
            about = " ".join(filter(None, (device, measured.kernel, measured.dtype)))
            note(f"{len(measured.seconds)} rows are left out: no table of {about}")
            continue
        seconds = measured.seconds.tolist(), shape_latencies(shapes, measured.columns).tolist()
        each = zip(class_of(device, measured), names_of(measured), *seconds, strict=True)
        rows += [dict(zip(_KEYS, row, strict=True)) for row in each]
    return rows


def operator_table(rows: list[Row]) -> str:
    """The errors of each table in Markdown."""
    tables = by("table", rows).items()
    return error_table({name: [np.log1p(error_of(r)) for r in mine] for name, mine in tables})


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


def main() -> None:
    folder = {"dest": "folder", "type": pathlib.Path, "help": "the Parquet files"}
    out: Any = {"type": pathlib.Path, "default": ROOT / "kernels" / "shapes"}
    arguments = options(__doc__, folder=folder, out=out)
    tables: dict[str, list[ShapeTable]] = defaultdict(list)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    errors: dict[str, list[float]] = defaultdict(list)
    for name, measured in read_operators(arguments.folder, (*SERVING, *TRAINING)):
        device, sms = DEVICES[name]
        if "sent" in measured.columns:
            measured = measured.only(measured.columns["nodes"] <= _FITTED_NODES)
        tables[device].append(fit_shapes(measured, sms))
        counts[device][f"rows of {measured.kernel.partition(':')[0]}"] += len(measured.seconds)
        found = cross_validate(measured, sms)
        for row, error in zip(class_of(name, measured), found, strict=True):
            errors[row].append(error)
    for device, fitted in tables.items():
        folder = arguments.out / device
        folder.mkdir(parents=True, exist_ok=True)
        constants = tuple(Constant(**about) for about in CONSTANTS)
        trains = any(table.kernel.startswith("rowwise") for table in fitted)
        more = _WORDS["training_source"] if trains else {}
        about = {key: text + more.get(key, "") for key, text in SOURCE.items()}
        source = Source(**about, sample_counts=counts[device], constants=constants)
        save_shapes(folder, fitted, source)
    print(error_table(errors))


if __name__ == "__main__":
    main()
