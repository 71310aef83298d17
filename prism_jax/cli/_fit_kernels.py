import datetime
import os
from typing import Any

import numpy as np

from .._files import shown
from .._misc import quoted
from .._summary import Column, Table
from . import _load
from ._options import PROGRESS, Given, Output, argument, command, flag
from ._values import check_out_folder, count


_FILES = ("shapes.csv", "source.toml")


@command(
    "kernels.csv --device my-gpu --out shapes/my-gpu",
    argument(
        "table TABLE",
        "a .csv or .parquet file with a row for each measured shape: kernel, dtype, latency_s, and "
        "m n k (gemm), batch sequence heads kv_heads head_dim window causal (attention), tokens "
        "hidden intermediate topk experts ep tp gated exponent (experts), or bytes gpus "
        "(all_reduce and other collectives within a node)",
    ),
    argument("--device DEVICE", "the name of the device that was measured", required=True),
    argument("--sms N", "its multiprocessors, for the waves of a product's tiles", count, 0),
    argument("--software TEXT", "with which software it was measured", default="not stated"),
    argument(
        "--ask SHAPE",
        "predict a shape, such as 'gemm bf16 m=4096 n=4096 k=4096', and say whether it lies in the "
        "fitted range",
    ),
    argument("--out FOLDER", "the folder to write", required=True),
    flag("--force", "overwrite tables that are there"),
    PROGRESS,
    csv=True,
)
def run(given: Given) -> Output:
    """Fit latencies by shape to measured kernels, and test them on shapes that are left out. They
    do not change predicted steps."""
    from ..cluster import cross_validate, fit_shapes
    from ..data import save_shapes
    from ..trace import read_kernels

    check_out_folder(given.out)
    there = [name for name in _FILES if os.path.lexists(os.path.join(given.out, name))]
    if there and not given.force:
        raise ValueError(
            f"--out `{shown(given.out)}` has a `{there[0]}` already; give another folder, or "
            "`--force` to overwrite it."
        )
    tables, rows = [], []
    for one in read_kernels(given.table):
        _load.say(given, f"fitting {one.kernel} {one.dtype}")
        tables.append(fit_shapes(one, given.sms))
        rows.append(_row(one, tables[-1], cross_validate(one, given.sms)))
    asked = _asked(given.ask, tables) if given.ask is not None else None
    os.makedirs(given.out, exist_ok=True)
    save_shapes(given.out, tables, _source(given, rows))
    result = {"kernels": given.out, "device": given.device, "tables": rows, "asked": asked}
    written = f"{shown(given.out)}: written, for {quoted(given.device)}"
    return Output(result, [_table(rows), written, asked["text"] if asked else ""])


def _row(measured: Any, table: Any, errors: np.ndarray) -> dict[str, Any]:
    known = not np.isnan(errors).any()
    return {
        "kernel": measured.kernel,
        "dtype": measured.dtype,
        "case": measured.case,
        "rows": len(errors),
        "error": float(np.std(errors)) if known else None,
        "bias": float(np.mean(errors)) if known else None,
        "range": {name: list(ends) for name, ends in table.ranges.items()},
    }


def _source(given: Given, rows: list[dict[str, Any]]) -> Any:
    from ..data import Constant, Source

    counts: dict[str, int] = {}
    for row in rows:
        name = f"rows of {row['kernel']} {row['dtype']}".rstrip()
        counts[name] = counts.get(name, 0) + row["rows"]
    command = f"prism-jax fit-kernels {quoted(os.path.basename(given.table))}"
    made = Constant("command", command, f"fitted to measurements of {quoted(given.device)}")
    today = datetime.date.today().isoformat()
    who = "the owner of the measurements"
    return Source(who, today, given.software or "not stated", "not stated", counts, (made,))


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "kernel",
        "dtype",
        Column("case", lambda row: f"{row['case']:g}" if row["case"] else ""),
        "rows",
        Column("error", "error", ".3f"),
        Column("bias", "bias", "+.3f"),
        Column("range", lambda row: _range_text(row["range"])),
    )
    title = (
        "errors of shapes that were left out of the fit: the standard deviation and the mean of "
        "log(predicted / measured); `case` is the size of heads, or the exponent of loads:"
    )
    return Table(columns, rows, title, most=None)


def _range_text(ranges: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())


def _asked(text: str, tables: list[Any]) -> dict[str, Any]:
    """What a table predicts for a shape, and which of its sizes lie beyond the fitted range."""
    import polars as pl

    from ..cluster import shape_latency
    from ..data import outside
    from ..trace import check_columns, measured_kernels

    kernel, *words = text.split() or [""]
    dtype = words.pop(0) if words and "=" not in words[0] else ""
    sizes = {name: _size(value) for name, _, value in (word.partition("=") for word in words)}
    check_columns(sizes, "--ask")
    row = {"latency_s": 1.0, **sizes, "kernel": kernel, "dtype": dtype}
    (one,) = measured_kernels(pl.DataFrame([row]), "--ask")
    key = (one.kernel, one.dtype, one.case)
    table = next((t for t in tables if (t.kernel, t.dtype, t.case) == key), None)
    if table is None:
        known = ", ".join(dict.fromkeys(map(_name, tables)))
        raise ValueError(
            f"--ask: no table is fitted for `{quoted(_name(one))}`; ask for one of "
            f"{quoted(known, 300)}."
        )
    shape = {name: float(values[0]) for name, values in one.columns.items()}
    latency, beyond = shape_latency(table, shape), outside(table, shape)
    said = f"{quoted(text)}: {latency:.4g} s"
    for name in beyond:
        low, high = table.ranges[name]
        said += f"; `{name}` is {shape[name]:g}, beyond the fitted range from {low:g} to {high:g}"
    said += ", whose end is used in its place" if beyond else ", within the fitted range"
    return {"text": said, "latency_s": latency, "outside": list(beyond)}


def _name(table: Any) -> str:
    case = f"{table.case:g}" if table.case else ""
    return " ".join(filter(None, (table.kernel, table.dtype, case)))


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--ask: `{quoted(text)}` is not a number; write sizes such as `m=4096`."
        ) from None
