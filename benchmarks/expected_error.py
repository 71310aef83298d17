"""Writes `kernels/expected_errors.toml`, the laws of `prism.expected_error`, from published steps.

    python benchmarks/expected_error.py [--data DIR]    # a minute

`python benchmarks/accuracy.py --expected` says how often they hold. Run both after each change of
what `predict` says.

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

import argparse
import functools as ft
import pathlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
import prism_jax as prism
from benchmarks._means import VARIABILITY
from benchmarks._published import published
from benchmarks._rows import DATA, ROOT, predicted
from benchmarks._tables import percent, table
from prism_jax.data import generation_of
from prism_jax.workload import has_experts


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
    held: bool = False
    shipped: bool = False


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
        for row in _of(rows, key):
            families[row.family].append(row.error)
        each = [np.full(len(e), 1 / (len(e) + _HALF)) for e in families.values()]
        errors = np.concatenate([errors, *families.values()])
        weights = np.concatenate([weights * _ABOVE, *each])
        weights = weights / weights.sum()
    bias = _quantile(errors, weights, 0.5)
    wider = np.sqrt(1 + 1 / max(1, len(families)))
    half = _quantile(np.abs(errors - bias), weights, _LEVEL) * wider
    return bias, float(half / stdtrit(_DEGREES, (1 + _LEVEL) / 2))


def _of(rows: list[Row], key: tuple[Any, ...]) -> list[Row]:
    """The rows of a class."""
    return [row for row in rows if row.key[: len(key)] == key]


def enough(rows: list[Row], key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A class and those above it, as far down as they have enough rows."""
    counts = Counter(one for row in rows for one in classes_of(row.key))
    return [one for one in classes_of(key) if not one or counts[one] >= _FEWEST]


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    levels = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(q, levels, values[order]))


def _held(rows: list[Row]) -> list[Row]:
    """The rows, with whether the interval of the rows of others, and the shipped one, hold them."""
    far = float(stdtrit(_DEGREES, (1 + _LEVEL) / 2))

    @ft.cache
    def law(name: str, key: tuple[Any, ...]) -> tuple[float, float]:
        return law_of([row for row in rows if row.left_out != name], enough(rows, key))

    found = []
    for row in rows:
        bias, spread = law(row.left_out, row.key)
        low, high = prism.expected_error(row.job).interval(_LEVEL)
        held = bool(abs(row.error - bias) <= spread * far)
        found.append(row._replace(held=held, shipped=bool(low <= np.exp(row.error) <= high)))
    return found


def expected_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each class with enough published steps below a folder: how many of them the
    intervals from other families hold, and the shipped ones. The first is that of all."""
    rows = _held(rows_of(folder))
    counts = Counter(one for row in rows for one in classes_of(row.key))
    for key in sorted(one for one, count in counts.items() if count >= _FEWEST or not one):
        mine = _of(rows, key)
        low, middle, high = np.quantile([np.exp(row.error) for row in mine], [0.05, 0.5, 0.95])
        families = dict.fromkeys(row.family for row in mine)
        shares = [np.mean([r.held for r in mine if r.family == family]) for family in families]
        yield {
            "class": named(key),
            "rows": len(mine),
            "families": len(families),
            "median": middle,
            "p5": low,
            "p95": high,
            "left_out": np.mean([row.held for row in mine]),
            "left_out_by_family": np.mean(shares),
            "shipped": np.mean([row.shipped for row in mine]),
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
        used = _of(rows, classes[-1])
        sources = ", ".join(f"{n} {name}" for name, n in Counter(r.source for r in used).items())
        lines += ["", "[[classes]]", f'model = "{key[0]}"', f"fsdp = {str(key[1]).lower()}"]
        names = zip(("generation", "software"), key[2:], strict=False)
        lines += [f'{name} = "{value}"' for name, value in names]
        lines += [f"bias = {bias:.4f}", f"spread = {spread:.4f}", f"num_runs = {len(used)}"]
        lines += [f'table = "{sources}"']
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the laws of expected errors.")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; name one with --data")
    rows = rows_of(arguments.data)
    if not rows:
        parser.error(f"{arguments.data} has no step that can be predicted; nothing was written")
    path = ROOT / "kernels" / "expected_errors.toml"
    path.write_text(file_of_laws(rows))


if __name__ == "__main__":
    main()
