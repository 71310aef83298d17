"""By how much predictions are off, by class of jobs, and how often their intervals hold.

The law of a class is a mixture: its families, each with the weight n / (n + 8) for n rows, so that
no family drowns the others, and the law of the class above it with half the weight of a family: a
further family may be like one of its class, or like any other. The bias is the median of the
mixture. The spread is that of Student's law whose 90 % interval holds 90 % of the mixture, times
the root of 1 + 1 / F, because the bias is known from F families only. Degrees of freedom: 3, with
which intervals of 50 to 99 % hold about as many rows.

Left out together are the rows of a family of the data (one model of one source, on all machines);
where the data names none, those of one model of a source. The weighed families are those of the
data, or whole sources.
"""

import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

import prism_jax as prism
from prism_jax.data import generation_of
from prism_jax.workload import has_experts

from ._means import VARIABILITY
from ._published import published
from ._rows import predicted
from ._tables import percent, table


_DEGREES, _LEVEL, _FEWEST, _UNKNOWN = 3.0, 0.9, 20, 2.5
# With the last, the law of a kind holds 95 % and more of a generation that is left out whole.
_WHOLE = 4  # The parts of a class: the kind of model, FSDP, the generation and the software.
_HALF, _ABOVE = 8, 0.5  # Rows with which a family weighs a half; the weight of the class above.
_SOURCE = "published steps and systems of MLPerf Training (benchmarks/expected_error.py)"


class Row(NamedTuple):
    error: float
    family: str
    left_out: str
    key: tuple[str, bool, str, str]
    source: str
    job: Any


def rows_of(folder: pathlib.Path) -> list[Row]:
    """The logarithms of measured over predicted seconds."""
    found = []
    for one in published(folder):
        if (job := one.job) is None or not (job.model and job.training and job.cluster):
            continue
        mean, _ = predicted(job)
        if not mean:
            continue
        error = float(np.log(one.seconds / mean))
        kind = ("experts" if has_experts(job.model) else "dense", job.training.zero == 3)
        key = (*kind, generation_of(job.cluster.device.name), job.training.software or "")
        model = f"{one.table} {job.model.num_layers} {job.model.hidden_size}"
        left_out = one.family if one.family != one.table else model
        found.append(Row(error, one.family, left_out, key, one.table.split(",")[0], job))
    return found


def classes_of(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A class and those above it, from that of all rows."""
    known = len(key) - (len(key) == _WHOLE and not key[-1])  # Software may not be stated.
    return [(), *(key[:n] for n in range(1, known + 1))]


def law_of(rows: list[Row], classes: list[tuple[Any, ...]]) -> tuple[float, float]:
    """The bias and the spread of the last of `classes`, each of which is part of the one before."""
    errors, weights, families = np.zeros(0), np.zeros(0), {}
    for key in classes:
        families = defaultdict(list)
        for row in rows:
            if row.key[: len(key)] == key:
                families[row.family].append(row.error)
        each = [np.full(len(e), 1 / (len(e) + _HALF)) for e in families.values()]
        errors = np.concatenate([errors, *families.values()])
        weights = np.concatenate([weights * _ABOVE, *each])
        weights = weights / weights.sum()
    bias = _quantile(errors, weights, 0.5)
    half = _quantile(np.abs(errors - bias), weights, _LEVEL) * np.sqrt(
        1 + 1 / max(1, len(families))
    )
    return bias, float(half / stdtrit(_DEGREES, (1 + _LEVEL) / 2))


def enough(rows: list[Row], key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A class and those above it, as far down as they have enough rows."""
    counts = Counter(one for row in rows for one in classes_of(row.key))
    return [one for one in classes_of(key) if not one or counts[one] >= _FEWEST]


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    levels = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(q, levels, values[order]))


def left_out(rows: list[Row], level: float) -> dict[int, bool]:
    """For each row by its place, whether the interval from the rows of others holds it."""
    found, far = {}, float(stdtrit(_DEGREES, (1 + level) / 2))
    chains = {key: enough(rows, key) for key in {row.key for row in rows}}
    for name in {row.left_out for row in rows}:
        rest = [row for row in rows if row.left_out != name]
        keys = {row.key for row in rows if row.left_out == name}
        laws = {key: law_of(rest, chains[key]) for key in keys}
        for i, row in enumerate(rows):
            if row.left_out == name:
                bias, spread = laws[row.key]
                found[i] = abs(row.error - bias) <= spread * far
    return found


def expected_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each class with enough published steps below a folder: how many of them the
    intervals from other families hold, and the shipped ones. The first is that of all."""
    rows = rows_of(folder)
    if not rows:
        return
    held, shipped = left_out(rows, _LEVEL), [_shipped(row) for row in rows]
    counts = Counter(one for row in rows for one in classes_of(row.key))
    for key in sorted(one for one, count in counts.items() if count >= _FEWEST or not one):
        mine = [i for i, row in enumerate(rows) if row.key[: len(key)] == key]
        families = defaultdict(list)
        for i in mine:
            families[rows[i].family].append(held[i])
        low, middle, high = np.quantile([np.exp(rows[i].error) for i in mine], [0.05, 0.5, 0.95])
        yield {
            "class": named(key),
            "rows": len(mine),
            "families": len(families),
            "median": middle,
            "p5": low,
            "p95": high,
            "left_out": np.mean([held[i] for i in mine]),
            "left_out_by_family": np.mean([np.mean(one) for one in families.values()]),
            "shipped": np.mean([shipped[i] for i in mine]),
        }


def expected_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: measured over predicted, less one, and the shares of rows in 90 % intervals."""
    header = ("class", "rows", "families", "median error", "90 % of rows")
    header += ("held, left out", "each family once", "held by the shipped")
    cells = []
    for row in rows:
        low, middle, high = (row[name] - 1 for name in ("p5", "median", "p95"))
        shares = (row[name] for name in ("left_out", "left_out_by_family", "shipped"))
        span = f"{100 * low:+.0f} .. {percent(high, 0)}"
        first = row["class"], f"{row['rows']:,}", row["families"], percent(middle), span
        cells.append((*first, *(f"{100 * share:.0f} %" for share in shares)))
    return table(header, cells)


def _shipped(row: Row) -> bool:
    """Whether the shipped interval holds a row."""
    low, high = prism.expected_error(row.job).interval(_LEVEL)
    return bool(low <= np.exp(row.error) <= high)


def named(key: tuple[Any, ...]) -> str:
    if not key:
        return "all"
    fsdp = ["FSDP" if one else "no FSDP" for one in key[1:2]]
    return ", ".join([key[0], *fsdp, *key[2:]])


def file_of_laws(rows: list[Row]) -> str:
    """The shipped laws, in TOML. Classes with few rows have the law of the class above."""
    constants = {"degrees": _DEGREES, "variability": round(VARIABILITY - 1, 4), "unknown": _UNKNOWN}
    lines = ['kind = "expected-errors"', f'source = "{_SOURCE}"']
    lines += [f"{name} = {value}" for name, value in constants.items()]
    counts = Counter(one for row in rows for one in classes_of(row.key))
    for key in sorted(one for one in counts if counts[one] >= _FEWEST or not one[3:]):
        if len(key) < 2:  # Laws of these are only above those of classes.
            continue
        classes = enough(rows, key)
        bias, spread = law_of(rows, classes)
        used = [row for row in rows if row.key[: len(classes[-1])] == classes[-1]]
        sources = ", ".join(f"{n} {name}" for name, n in Counter(r.source for r in used).items())
        lines += ["", "[[classes]]", f'model = "{key[0]}"', f"fsdp = {str(key[1]).lower()}"]
        names = zip(("generation", "software"), key[2:], strict=False)
        lines += [f'{name} = "{value}"' for name, value in names]
        lines += [f"bias = {bias:.4f}", f"spread = {spread:.4f}", f"num_runs = {len(used)}"]
        lines += [f'table = "{sources}"']
    return "\n".join(lines) + "\n"
