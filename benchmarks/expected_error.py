"""Writes `kernels/expected_errors.toml`, the laws of `prism.expected_error`, from published steps.

    python benchmarks/expected_error.py [--data DIR]    # a minute

`python benchmarks/accuracy.py --expected` says how often they hold. Run both after each change of
what `predict` says.

The law of a class is a mixture: its families, each with the weight n / (n + 8) for n rows, so that
no family drowns the others, and the law of the class above it with half the weight of a family: a
further family may be like one of its class, or like any other. The bias is the median of the
mixture. The spread is that of Student's law whose 90 % interval holds 90 % of the mixture, times
the root of 1 + 1 / F, because the bias is known from F families only; where three constants of
each chip are as well, 1 + 4 / F. Degrees of freedom: 3, with which intervals of 50 to 99 % hold
about as many rows.

Left out together are the rows of a family of the data (one model of one source, on all machines);
where the data names none, those of one model of a source. The weighed families are those of the
data, or whole sources.
"""

import functools as ft
import itertools as it
import sys
from collections import Counter
from typing import Any

import numpy as np
from scipy.special import stdtrit


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.data import generation_of
from prism_jax.workload import has_experts
from validation.machines import is_scored, timed_steps
from validation.means import VARIABILITY
from validation.published import published
from validation.rows import MEASUREMENTS, ROOT, note, predicted
from validation.tables import Folder, Row, Rows, by, options, table_of


_DEGREES, _LEVEL, _FEWEST, _UNKNOWN = 3.0, 0.9, 20, 2.5
_FAR = float(stdtrit(_DEGREES, (1 + _LEVEL) / 2))
# With the last, the law of a kind holds 95 % and more of a generation that is left out whole.
_WHOLE = 4  # The parts of a class: the kind of model, FSDP, the generation and the software.
_CONSTANTS = {"TPU": 3}  # Of each chip, chosen with the rows of the class (`machines.py`).
_HALF, _ABOVE = 8, 0.5  # Rows with which a family weighs a half; the weight of the class above.
_SOURCE = "published steps and systems of MLPerf Training (benchmarks/expected_error.py)"


def rows_of(folder: Folder) -> list[Row]:
    """The logarithms of measured over predicted seconds."""
    found = []
    known = ((one, predicted(one.job)[0]) for one in published(folder))
    others = ((one, mean) for one, mean, _ in timed_steps(folder) if mean and is_scored(one))
    for one, mean in it.chain(known, others):
        job: Any = one.job
        if mean:
            error = float(np.log(one.seconds / mean))
            kind = ("experts" if has_experts(job.model) else "dense", job.training.zero == 3)
            key = (*kind, generation_of(job.cluster.device.name), job.training.software or "")
            model = f"{one.table} {job.model.num_layers} {job.model.hidden_size}"
            left_out = one.family if one.family != one.table else model
            about = {"error": error, "family": one.family, "left_out": left_out, "key": key}
            found.append(about | {"source": one.table.split(",")[0], "job": job})
    return found


def classes_of(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A class and those above it, from that of all rows."""
    known = len(key) - (len(key) == _WHOLE and not key[-1])  # Software may not be stated.
    return [(), *(key[:n] for n in range(1, known + 1))]


def law_of(rows: list[Row], classes: list[tuple[Any, ...]]) -> tuple[float, float]:
    """The bias and the spread of the last of `classes`, each of which is part of the one before."""
    errors, weights, families = np.zeros(0), np.zeros(0), {}
    for key in classes:
        families = by("family", _of(rows, key))
        each = [np.full(len(some), 1 / (len(some) + _HALF)) for some in families.values()]
        mine = [row["error"] for some in families.values() for row in some]
        errors = np.concatenate([errors, mine])
        weights = np.concatenate([weights * _ABOVE, *each])
        weights = weights / weights.sum()
    bias = _quantile(errors, weights, 0.5)
    known_from = 1 + _CONSTANTS.get(classes[-1][2] if len(classes[-1]) > 2 else "", 0)
    wider = np.sqrt(1 + known_from / max(1, len(families)))
    half = _quantile(np.abs(errors - bias), weights, _LEVEL) * wider
    return bias, float(half / _FAR)


def _of(rows: list[Row], key: tuple[Any, ...]) -> list[Row]:
    """The rows of a class."""
    return [row for row in rows if row["key"][: len(key)] == key]


def _counted(rows: list[Row]) -> Counter[tuple[Any, ...]]:
    """How many rows each class has."""
    return Counter(one for row in rows for one in classes_of(row["key"]))


def enough(rows: list[Row], key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A class and those above it, as far down as they have enough rows."""
    counts = _counted(rows)
    return [one for one in classes_of(key) if not one or counts[one] >= _FEWEST]


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    levels = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(q, levels, values[order]))


def _held(rows: list[Row]) -> list[Row]:
    """The rows, with whether the interval of the rows of others, and the shipped one, hold them."""

    @ft.cache
    def law(name: str, key: tuple[Any, ...]) -> tuple[float, float]:
        return law_of([row for row in rows if row["left_out"] != name], enough(rows, key))

    found = []
    for row in rows:
        bias, spread = law(row["left_out"], row["key"])
        low, high = prism.expected_error(row["job"]).interval(_LEVEL)
        held = bool(abs(row["error"] - bias) <= spread * _FAR)
        shipped = bool(low <= np.exp(row["error"]) <= high)
        found.append(row | {"held": held, "shipped": shipped})
    return found


def expected_rows(folder: Folder) -> Rows:
    """A row for each class with enough published steps below a folder: how many of them the
    intervals from other families hold, and the shipped ones. The first is that of all."""

    def held(some: list[Row]) -> float:
        return float(np.mean([row["held"] for row in some]))

    rows = _held(rows_of(folder))
    for key in sorted(one for one, n in _counted(rows).items() if n >= _FEWEST or not one):
        mine = _of(rows, key)
        low, middle, high = np.quantile([np.exp(row["error"]) for row in mine], [0.05, 0.5, 0.95])
        families = by("family", mine)
        fsdp = ["FSDP" if one else "no FSDP" for one in key[1:2]]
        name = ", ".join([*key[:1], *fsdp, *key[2:]]) or "all"
        row = {"class": name, "rows": len(mine), "families": len(families)}
        row |= {"median": middle, "p5": low, "p95": high}
        row["left_out"] = held(mine)
        row["left_out_by_family"] = np.mean([held(some) for some in families.values()])
        yield row | {"shipped": np.mean([row["shipped"] for row in mine])}


def expected_table(rows: list[Row]) -> str:
    """In Markdown: measured over predicted, minus one, and the shares of rows in 90 % intervals."""
    columns = {"class": "{class}", "rows": "{rows:,}", "families": "{families}"}
    columns |= {"median error": "{middle:+.1%}", "90 % of rows": "{low:+.0fc} .. {high:+.0%}"}
    columns |= {"held, left out": "{left_out:.0%}", "each family once": "{left_out_by_family:.0%}"}
    columns["held by the shipped"] = "{shipped:.0%}"
    names = {"low": "p5", "middle": "median", "high": "p95"}
    shown = [row | {name: row[key] - 1 for name, key in names.items()} for row in rows]
    return table_of(shown, columns)


def file_of_laws(rows: list[Row]) -> str:
    """The shipped laws, in TOML. Classes with few rows have the law of the class above."""
    constants = {"degrees": _DEGREES, "variability": round(VARIABILITY - 1, 4), "unknown": _UNKNOWN}
    lines = ['kind = "expected-errors"', f'source = "{_SOURCE}"']
    lines += [f"{name} = {value}" for name, value in constants.items()]
    # Laws of classes with fewer parts than two are only above those of others.
    shown = [one for one, n in _counted(rows).items() if n >= _FEWEST or not one[3:]]
    for key in sorted(one for one in shown if len(one) >= 2):
        classes = enough(rows, key)
        bias, spread = law_of(rows, classes)
        used = _of(rows, classes[-1])
        sources = ", ".join(f"{n} {name}" for name, n in Counter(r["source"] for r in used).items())
        lines += ["", "[[classes]]", f'model = "{key[0]}"', f"fsdp = {str(key[1]).lower()}"]
        for name, value in zip(("generation", "software"), key[2:], strict=False):
            lines.append(f'{name} = "{value}"')
        lines += [f"bias = {bias:.4f}", f"spread = {spread:.4f}"]
        lines += [f"num_runs = {len(used)}", f'table = "{sources}"']
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = options(__doc__, data=MEASUREMENTS).data
    if not (rows := rows_of(folder)):
        note(f"{folder} has no step that can be predicted; nothing was written")
        sys.exit(2)
    (ROOT / "kernels" / "expected_errors.toml").write_text(file_of_laws(rows))


if __name__ == "__main__":
    main()
