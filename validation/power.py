"""What a power limit does: the clocks of V100, and kernels on one chip at two limits.

Reads `gemm_variability/` and `operators/power.parquet`, and prints the constants of `[power]` in
`hardware/devices/` as they follow from them.
"""

from typing import Any

import msgspec
import numpy as np
import polars as pl
from scipy.special import ndtri

from prism_jax.cluster import clock_factor, clock_factors
from prism_jax.data import Power, load_device

from .tables import Folder, Row, by, table


# The highest clock of V100, in MHz, which BERT runs at throughout (`bert_v100.csv`).
_HIGHEST = 1530.0
_EXPONENT = 3.0
# Other levels of its static power, which clocks at one limit do not tell.
_OTHER_STATIC_W = (50.0, 120.0)
_DEVICES = {"h200_sxm": "h200-sxm", "b200_sxm": "b200", "gb200": "gb200"}
# Shares of the limit from which on a kernel is at it, and up to which it is not.
_IS_AT, _IS_BELOW = pl.col("share") > 0.95, pl.col("share") < 0.8
_SHAPE = ("m", "n", "k")
_LEAST_PAIRS = 30


def v100_power(gpus: pl.DataFrame, static_w: float) -> Power:
    """The power of V100 in SGEMM, from the clocks and temperatures of some GPUs at their limit."""
    limit = float(np.median(gpus["pwr"]))
    clock, temperature = np.log(gpus["freq"].to_numpy()), gpus["temp"].to_numpy()
    slope, constant = np.polyfit(temperature, clock, 1)
    # How far the static power's logarithm moves if the clock's moves by one.
    leaks = _EXPONENT * (limit - static_w) / static_w
    left = np.std(clock - slope * temperature - constant)
    draws = static_w + (limit - static_w) * (_HIGHEST / np.median(gpus["freq"])) ** _EXPONENT
    values: Any = dict.fromkeys(("limit_w", "rated_w", "moving_w"), limit)
    values |= dict.fromkeys(("gemm_w", "attention_w"), float(draws))
    values |= {"leakage_sigma": float(left * leaks), "leakage_per_k": float(-slope * leaks)}
    spread = float(np.std(temperature))
    return Power(**values, static_w=static_w, temperature_k=spread, exponent=_EXPONENT)


def v100_gpus(folder: Folder, name: str) -> pl.DataFrame:
    """The medians of each V100 over its runs."""
    medians = pl.col("perf", "freq", "temp", "pwr").median()
    return pl.read_csv(folder / "gemm_variability" / name).group_by("gpu").agg(medians).sort("gpu")


def static_of_v100(folder: Folder) -> float:
    """The least that a V100 draws at its highest clock, in watts: BERT between kernels."""
    runs = pl.read_csv(folder / "gemm_variability" / "bert_v100.csv")
    return float(np.min(runs["pwr"].to_numpy()))


def v100_rows(folder: Folder) -> list[Row]:
    """The p95 and the slowest of GPUs over their median, predicted from the others' clocks."""
    gpus, static = v100_gpus(folder, "sgemm_v100.csv"), static_of_v100(folder)
    even, odd = (gpus.filter(pl.col("gpu") % 2 == one) for one in (0, 1))
    rows = []
    for watts in (static, *_OTHER_STATIC_W):
        for name, mine, fitted in (("odd", odd, even), ("even", even, odd)):
            rows.append(_v100_row(f"SGEMM, {name} GPUs", v100_power(fitted, watts), mine, fitted))
    bert = v100_gpus(folder, "bert_v100.csv")
    power = msgspec.structs.replace(v100_power(gpus, static), gemm_w=_median(bert, "pwr"))
    return [*rows, _v100_row("BERT, below the limit", power, bert, gpus)]


def _v100_row(name: str, power: Power, others: pl.DataFrame, fitted: pl.DataFrame) -> Row:
    levels = np.array([0.5, 0.95, 0.5 ** (1 / len(others))])
    row = {"table": "v100", "name": name, "static_w": power.static_w, "gpus": len(others)}
    median, *rest = clock_factors(power, "gemm", ndtri(levels)).tolist()
    row |= {"predicted": [one / median for one in rest], "measured": _spread(others)}
    return row | {"of_fitted": _spread(fitted)}


def _spread(gpus: pl.DataFrame) -> list[float]:
    """The p95 of the times of GPUs and the largest, over the median."""
    times = gpus["perf"].to_numpy()
    return (np.quantile(times, [0.95, 1.0]) / np.median(times)).tolist()


def _sustained(folder: Folder) -> pl.DataFrame:
    rows = pl.read_parquet(folder / "operators" / "power.parquet")
    names = [pl.col(name).cast(pl.String) for name in ("device", "framework", "dtype")]
    return rows.with_columns(*names, share=pl.col("power_w") / pl.col("power_limit_w"))


def limit_rows(folder: Folder) -> list[Row]:
    """Latencies of the same kernels on B200 at 1,000 W over those on GB200, the same chip, at 1,200
    W: of those that draw their limit, and of those that draw far less.
    """
    rows, keys = _sustained(folder), ["op", "framework", "dtype"]
    power: Any = load_device("gb200").power
    lower = clock_factor(msgspec.structs.replace(power, limit_w=1000.0), "gemm")
    found = []
    cases = {"at the limit": (_IS_AT, lower), "below 80 %": (_IS_BELOW, 1.0)}
    ratio = (pl.col("latency_s") / pl.col("latency_s_other")).median().alias("ratio")
    for where, (chosen, predicted) in cases.items():
        some = rows.filter(chosen, pl.col("latency_s") > 3e-5, pl.col("dtype") != "fp8_block")
        one, other = (some.filter(pl.col("device") == name) for name in ("b200_sxm", "gb200"))
        pairs = one.join(other, on=[*keys, "shape"], suffix="_other").group_by(keys)
        for *names, number, measured in pairs.agg(pl.len(), ratio).sort(keys).iter_rows():
            if number >= _LEAST_PAIRS:
                row: Row = {"table": "limits", "name": ", ".join(names), "power": where}
                row |= {"pairs": number, "measured": measured, "predicted": predicted}
                found.append(row)
    return found


def device_rows(folder: Folder) -> list[Row]:
    """The constants of devices, as they follow from the data."""
    rows = _sustained(folder)
    sizes = [pl.col("shape").str.extract(rf"\b{x}=(\d+)").cast(pl.Int64).alias(x) for x in _SHAPE]
    columns = [pl.col("device", "dtype").cast(pl.String), *_SHAPE, pl.col("latency_s")]
    short = pl.read_parquet(folder / "operators" / "gemm.parquet").select(*columns)
    gemm = rows.filter(pl.col("op") == "gemm").with_columns(*sizes)
    gemm = gemm.with_columns(work=2.0 * pl.col("m") * pl.col("n") * pl.col("k"))
    long = gemm.join(short, on=["device", "dtype", *_SHAPE], suffix="_short")
    long = long.filter(pl.col("dtype") == "bfloat16", pl.col("work").is_between(1e10, 1e12))
    long = long.with_columns(ratio=pl.col("latency_s") / pl.col("latency_s_short"))
    found = []
    for key, name in _DEVICES.items():
        on = pl.col("device") == key
        own = long.filter(on)
        # How much longer kernels at the limit take than others, of what they take in short runs.
        some = own.partition_by("framework")
        at, below = ([_median(one.filter(x), "ratio") for one in some] for x in (_IS_AT, _IS_BELOW))
        slower = np.mean(np.divide(at, below))
        static = _median(gemm.filter(on, pl.col("work") < 1e7), "power_w")
        limit = _median(own, "power_limit_w")
        row: Row = {"table": "devices", "name": name, "limit_w": limit, "static_w": static}
        row["slower"] = float(slower)
        row["gemm_w"] = float(static + (limit - static) * slower**_EXPONENT)
        for kind, op, least in (("attention", "attention", 1e-3), ("moving", "quantize", 1e-4)):
            some = rows.filter(on, pl.col("op") == op, pl.col("latency_s") > least)
            row[f"{kind}_w"] = _median(some, "power_w")
        found.append(row)
    return found


def _median(rows: pl.DataFrame, column: str) -> float:
    return float(np.median(rows[column].to_numpy()))


def law_rows(folder: Folder) -> list[Row]:
    """The law of a GPU's static power, from all V100."""
    power = v100_power(v100_gpus(folder, "sgemm_v100.csv"), static_of_v100(folder))
    names = ("static_w", "leakage_sigma", "leakage_per_k", "temperature_k")
    return [{"table": "law", "name": "all", **{name: getattr(power, name) for name in names}}]


def power_rows(folder: Folder) -> list[Row]:
    """The rows of all tables."""
    return [*v100_rows(folder), *limit_rows(folder), *device_rows(folder), *law_rows(folder)]


def power_table(rows: list[Row]) -> str:
    """The tables, in Markdown."""
    half = ("predicted", "fitted half")
    heads: Row = {"v100": ("V100", "static", "GPUs", "p95/p50", *half, "slowest/p50", *half)}
    heads["limits"] = ("B200 over GB200", "power", "kernels", "measured", "predicted")
    draws = ("GEMM", "attention", "copies")
    heads["devices"] = ("device", "limit", "static", "slower at the limit", *draws)
    heads["law"] = ("V100", "static", "sigma", "1/K", "K")
    found = by("table", rows)
    return "\n\n".join(table(head, map(_cells, found[name])) for name, head in heads.items())


def _cells(row: Row) -> list[str]:
    """The values of a row, in the order of its head."""
    _, *values = row.values()
    if row["table"] == "v100":
        pairs = zip(row["measured"], row["predicted"], row["of_fitted"], strict=True)
        values = [row["name"], row["static_w"], row["gpus"], *(x for pair in pairs for x in pair)]
    return [_text(value) for value in values]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f} W" if value > 20 else f"{value:.3g}" if value < 1 else f"{value:.3f}"
    return str(value)
