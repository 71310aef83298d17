"""Faults of 400 servers and their repairs: fitted to two thirds of the days, scored on the last.

Reads `faults/infinitehbd_faults.csv`. `fitted` gives the numbers of
`hardware/failures/infinitehbd.toml`, from all days.
"""

import math
from typing import Any

import msgspec
import numpy as np
import polars as pl
from jaxtyping import Float
from scipy import stats

from prism_jax.data import Cause, Failures, UnequalNodes, UnequalWeeks
from prism_jax.runs import RunCosts
from prism_jax.runs._cycles import run_cycles
from prism_jax.runs._rates import draw_hazards

from .tables import Folder, Row, table_of


DAY = 86_400.0
_SERVERS, _DEVICES = 400, 8  # GPUs of a server: an assumption, for the source does not say.
_DAYS = 232.0
# Whatever is repaired within ten minutes: many repairs are logged with no duration at all.
_SHORT_DAYS = 10 / 1440
_RUNS = 20_000


def faults(folder: Folder) -> pl.DataFrame:
    """The faults, by the day on which they start."""
    return pl.read_csv(folder / "infinitehbd_faults.csv").sort("start_day")


def fitted(rows: pl.DataFrame, begin: float, end: float) -> Failures:
    """The faults from day `begin` to `end`, and how far they differ by what is known at the end.

    Shapes are those of a gamma law that explains by how much the variance of counts exceeds their
    mean, over servers and over weeks. Repairs are a Weibull law of the greatest likelihood.
    """
    rows = rows.filter(pl.col("start_day").is_between(begin, end, closed="left"))
    weeks = np.bincount(((rows["start_day"] - begin) // 7).cast(int))[: int((end - begin) // 7)]
    found: Any = stats.weibull_min.fit(_repairs(rows, end), floc=0)
    shape, _, scale = map(float, found)
    hours = _SERVERS * _DEVICES * 24 * (end - begin)
    # Announced, so that a run without costs lasts as many days as it works.
    cause = Cause(name="fault", count=len(rows), takes_node=True, announced=True)
    keys: Any = {"repair_s": DAY * scale * math.gamma(1 + 1 / shape), "repair_power": 1 / shape}
    keys["nodes"] = UnequalNodes(_shape(_by_server(rows)), _DEVICES)
    keys["weeks"] = UnequalWeeks(_shape(weeks), (end - begin) / 7)
    return Failures(hours, (cause,), 0.0, 0.0, "stepfun-ai/InfiniteHBD-Trace", **keys)


def _shape(counts: np.ndarray) -> float:
    mean = counts.mean()
    return float(mean**2 / (counts.var(ddof=1) - mean))


def _repairs(rows: pl.DataFrame, end: float) -> stats.CensoredData:
    """The days of repairs, of which some are only known to be short, or to last beyond the end."""
    lasts, going = _lasts(rows, end)
    short = ~going & (lasts < _SHORT_DAYS)
    limits = np.full(short.sum(), _SHORT_DAYS)
    return stats.CensoredData(lasts[~going & ~short], left=limits, right=lasts[going])


def _lasts(rows: pl.DataFrame, end: float) -> tuple[np.ndarray, np.ndarray]:
    """The days that repairs last by the end, and which are not over then."""
    until = rows["end_day"].fill_null(np.inf).to_numpy()
    return np.minimum(until, end) - rows["start_day"].to_numpy(), until > end


def fault_rows(folder: Folder) -> list[Row]:
    """Figures of the last third of the days, as predicted from those before and as they were."""
    rows, split = faults(folder), 2 / 3 * _DAYS
    before = fitted(rows, 0, split)
    parts = (_count_rows, _server_rows, _repair_rows)
    return [row for part in parts for row in part(before, rows, split)]


def _interruptions(failures: Failures, devices: int, days: float) -> Float[np.ndarray, "runs"]:
    """The interruptions of simulated runs of so many days."""
    rng = np.random.default_rng(0)
    hazards, costs = draw_hazards(failures, devices, _RUNS, rng), RunCosts(days * DAY, 0.0, 0.0)
    runs = run_cycles(np.full(_RUNS, days * DAY), np.ones((_RUNS, 1)), hazards, costs, rng)
    return runs.interruptions.sum(axis=1)


def _count_rows(before: Failures, rows: pl.DataFrame, split: float) -> list[Row]:
    happened = len(rows.filter(pl.col("start_day") >= split))
    cases = {"faults": before, "faults, if all weeks were alike": _alike(before, "weeks")}
    cases["faults, if servers were too"] = _alike(before, "weeks", "nodes")
    found = []
    for name, failures in cases.items():
        drawn = _interruptions(failures, _SERVERS * _DEVICES, _DAYS - split)
        low, middle, high = np.quantile(drawn, (0.05, 0.5, 0.95)).tolist()
        found.append(_row(name, middle, happened) | {"low": low, "high": high})
    return found


def _row(name: str, predicted: float, happened: float) -> Row:
    return {"name": name, "predicted": float(predicted), "happened": float(happened)}


def _alike(failures: Failures, *names: str) -> Failures:
    return msgspec.structs.replace(failures, **dict.fromkeys(names))


def _server_rows(before: Any, rows: pl.DataFrame, split: float) -> list[Row]:
    """How unequal servers are, and whether those that were bad stay bad."""
    one = _interruptions(_alike(before, "weeks"), _DEVICES, _DAYS - split)
    early = _by_server(rows.filter(pl.col("start_day") < split))
    late = _by_server(rows.filter(pl.col("start_day") >= split))
    # A gamma law of rates is one again once faults were counted.
    shares = (before.nodes.shape + early) / (before.nodes.shape + early.mean())
    bad = early >= 2
    shared, seen = shares[bad].sum() / shares.sum(), late[bad].sum() / late.sum()
    spread = late.var(ddof=1) / late.mean()
    name = f"share of faults on the {bad.sum()} servers with two or more before"
    first = _row("variance over mean of the faults of a server", one.var() / one.mean(), spread)
    alike = _row("the same, if all servers were alike", bad.mean(), seen)
    return [first, _row(name, shared, seen), alike]


def _by_server(rows: pl.DataFrame) -> Float[np.ndarray, "servers"]:
    """The faults of each server. Those without any, of which the data do not tell, come last."""
    names = rows["server"].str.slice(1).cast(int)
    return np.bincount(names - 1, minlength=_SERVERS).astype(float)


def _repair_rows(before: Failures, rows: pl.DataFrame, split: float) -> list[Row]:
    """Quantiles of repairs; what happened by Kaplan and Meier, for some are not over."""
    scale = before.repair_s / 3600 / math.gamma(1 + before.repair_power)
    law = stats.weibull_min(1 / before.repair_power, scale=scale)
    after = rows.filter(pl.col("start_day") >= split)
    lasts, going = _lasts(after, _DAYS)
    seen = stats.ecdf(stats.CensoredData(24 * lasts[~going], right=24 * lasts[going])).cdf
    levels = np.array([0.25, 0.5, 0.75, 0.9])
    happened = seen.quantiles[np.searchsorted(seen.probabilities, levels)]
    rows_of = zip(levels, law.ppf(levels), happened, strict=True)
    return [_row(f"hours of repair, p{round(100 * q)}", *values) for q, *values in rows_of]


def fault_table(rows: list[Row]) -> str:
    """A table in Markdown."""
    span = "{low:.0f} .. {high:.0f}".format
    shown = [row | {"span": span(**row) if "low" in row else ""} for row in rows]
    columns = {"last third of the days": "{name}", "predicted": "{predicted:.3g}"}
    return table_of(shown, columns | {"90 % interval": "{span}", "happened": "{happened:.3g}"})
