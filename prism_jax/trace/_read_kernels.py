"""Reads measured latencies of single kernels."""

import os
from collections.abc import Iterable

import numpy as np

from .._files import shown
from .._misc import quoted, unknown_name
from ..cluster import KINDS, MeasuredLatencies, attention_sizes
from ._tables import check_rows, collect, columns_of, pl, scanned, with_numbers


# The columns that the rows of a kernel have, and the values of those that may be left out.
_OTHERS = ("attention", "experts", "deepep")  # Their tables have other columns than their rows.
_GIVEN = {name: kind.columns for name, kind in KINDS.items() if not name.startswith(_OTHERS)}
_GIVEN["attention"] = ("batch", "sequence", "heads", "kv_heads", "head_dim", "window", "causal")
_GIVEN["experts"] = ("tokens", "hidden", "intermediate", "topk", "experts", "ep", "tp")
_GIVEN["experts"] += ("gated", "exponent")
_GIVEN["deepep_dispatch"] = ("tokens", "hidden", "topk", "experts", "sms", "nodes")
_GIVEN["deepep_combine"] = _GIVEN["deepep_dispatch"]
_DEFAULTS = {"window": 0, "causal": 1, "tp": 1, "gated": 1, "exponent": 0, "nodes": 1}
# Zero is a value of these.
_SWITCHES = ("window", "causal", "gated", "exponent")
_DTYPES = {"bfloat16": "bf16", "float16": "bf16", "fp16": "bf16", "nvfp4": "fp4"}
_TEXTS = ("kernel", "dtype", "phase")
_PHASES = ("", "forward", "backward", "step")
_KNOWN = ("", "fp32", "tf32", "bf16", "fp8", "fp8_block", "mxfp8", "fp4")
_MOST, _MOST_SHAPES = 1e15, 10**6
_ROW = "row of the table"  # A column with the number of each row; no kernel has one of this name.


def read_kernels(path: str | os.PathLike[str]) -> list[MeasuredLatencies]:
    """Reads measured latencies of kernels from a CSV or Parquet file.

    Its rows have `kernel`, `dtype` (which may be empty), `latency_s`, and the sizes of the kernel's
    shape; the columns of other kernels are empty. A kernel is `gemm`, `attention`, `mla`,
    `experts`, a collective within a node, `deepep_dispatch`, `deepep_combine`, or a part of an
    `nvlink_` all-to-all; or a call of training, whose `phase` is `forward` where it is empty,
    `backward` or `step`. What follows a colon in its name keeps another implementation apart.

    **Raises:**

    A `ValueError` of one sentence if a kernel, a dtype or a column is not known or is missing, or a
    size or a latency is not a positive number.
    """
    with scanned(path) as frame:
        columns = columns_of(frame, ["kernel", "latency_s"])
        check_columns(columns)
        check_rows(frame, _MOST_SHAPES)
        numbers = [name for name in columns if name not in _TEXTS]
        frame = with_numbers(frame, numbers, [])
        texts = [pl.col(name).cast(pl.String) for name in columns if name in _TEXTS]
        floats = [pl.col(name).cast(pl.Float64, strict=False) for name in numbers]
        table = collect(frame.select(*texts, *floats))
    return measured_kernels(table, shown(path))


def check_columns(columns: Iterable[str]) -> None:
    """Raises a `ValueError` if a column is not one of `read_kernels`."""
    allowed = {*_TEXTS, "latency_s", *(name for of in _GIVEN.values() for name in of)}
    for name in columns:
        if name not in allowed:
            raise ValueError(unknown_name("column", name, allowed))


def measured_kernels(table: "pl.DataFrame", where: str) -> list[MeasuredLatencies]:
    """The rows of a table that `read_kernels` describes, by the table that is fitted to them.

    **Arguments:**

    - `where`: the origin of the table, for messages.

    Other columns are left alone.
    """
    if "dtype" not in table.columns:
        table = table.with_columns(dtype=pl.lit(""))
    dtype = pl.col("dtype").fill_null("").replace(_DTYPES)
    table = table.with_columns(dtype=dtype, kernel=pl.col("kernel").fill_null(""))
    table = _with_phases(table.with_row_index(_ROW, offset=1), where)
    measured = []
    for (name, dtype), rows in sorted(
        table.group_by("kernel", "dtype"), key=lambda group: group[0]
    ):
        kind, colon, suffix = str(name).partition(":")
        first = f"{where}, row {rows[_ROW].min()}"
        if kind not in _GIVEN:
            raise ValueError(f"{first}: {unknown_name('kernel', kind, _GIVEN)}")
        if dtype not in _KNOWN:
            raise ValueError(f"{first}: {unknown_name('dtype', dtype, (*_KNOWN[1:], *_DTYPES))}")
        sizes = _sizes(rows, kind, where)
        seconds = sizes.pop("latency_s")
        tables, cases = _tables_and_cases(kind, sizes)
        for table_name, case in sorted({*zip(tables.tolist(), cases.tolist(), strict=True)}):
            chosen = (tables == table_name) & (cases == case)
            columns = {name: values[chosen] for name, values in sizes.items()}
            if kind == "attention":
                columns = attention_sizes(table_name.removeprefix("attention_"), **columns)
            labels = (f"{table_name}{colon}{suffix}", str(dtype), case)
            measured.append(MeasuredLatencies(*labels, columns, seconds[chosen]))
    return measured


def _with_phases(table: "pl.DataFrame", where: str) -> "pl.DataFrame":
    """The rows with the phase after the name of the kernel, unless it is the forward."""
    if "phase" not in table.columns:
        return table
    phase = pl.col("phase").fill_null("")
    unknown = table.filter(~phase.is_in(_PHASES))
    if len(unknown):
        name = unknown["phase"][0]
        first = f"{where}, row {unknown[_ROW][0]}"
        raise ValueError(f"{first}: {unknown_name('phase', name, _PHASES[1:])}")
    later = pl.when(phase.is_in(("", "forward"))).then(pl.lit("")).otherwise(":" + phase)
    return table.with_columns(kernel=pl.col("kernel") + later)


def _tables_and_cases(kind: str, sizes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The table and the case of each row of a kernel; what these say is taken out of `sizes`."""
    number = len(next(iter(sizes.values())))
    tables, cases = np.full(number, kind), np.zeros(number)
    if kind == "attention":
        causal, cases = sizes.pop("causal"), sizes.pop("head_dim")
        windows = np.where(sizes["window"] > 0, "attention_window", "attention_causal")
        tables = np.where(causal == 0, "attention_full", windows)
    if kind == "experts":
        cases = sizes.pop("exponent")
        sizes["width"] = sizes.pop("intermediate") / sizes.pop("tp")
        sizes["matrices"] = 2 + (sizes.pop("gated") > 0)
    if kind in ("deepep_dispatch", "deepep_combine"):
        tables = np.where(sizes["nodes"] > 1, f"{kind}_nodes", kind)
    return tables, cases


def _sizes(rows: "pl.DataFrame", kind: str, where: str) -> dict[str, np.ndarray]:
    """The columns of the rows of a kernel, which are all positive."""
    sizes = {}
    for name in (*_GIVEN[kind], "latency_s"):
        default = _DEFAULTS.get(name)
        if name not in rows.columns and default is None:
            raise ValueError(f"{where}: `{kind}` needs a column `{name}`; add it.")
        cells = pl.col(name) if name in rows.columns else pl.repeat(None, pl.len())
        filled = cells.cast(pl.Float64).fill_null(np.nan if default is None else default)
        values = rows.select(filled).to_series().to_numpy()
        least = 0.0 if name in _SWITCHES else 1e-12 if name == "latency_s" else 1.0
        wrong = ~((values >= least) & (values <= _MOST))
        if wrong.any():
            value, row = values[wrong][0], rows[_ROW].to_numpy()[wrong][0]
            shown_value = "no number" if np.isnan(value) else f"{value:g}"
            raise ValueError(
                f"{where}: `{name}` of row {row} (`{quoted(kind)}`) is {shown_value}, but must be "
                f"a number from {least:g} to {_MOST:g}; correct or drop that row."
            )
        sizes[name] = values
    return sizes
