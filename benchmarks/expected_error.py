"""By how much predictions are off, by class of jobs, and how often their intervals hold.

    python benchmarks/expected_error.py            # coverage by class, families left out; a minute
    python benchmarks/expected_error.py --write    # and writes `kernels/expected_errors.toml`
    python benchmarks/expected_error.py --shipped --data DIR    # coverage of the shipped laws

The law of a class is a mixture: its families, each with the weight n / (n + 2) for n rows, so that
no family drowns the others, and the law of the class above it with the weight of one family. So a
further family may be like one of its class, or like one of any other. The bias is the median of the
mixture, and the spread that of Student's law whose 90 % interval holds 90 % of the mixture. The
degrees of freedom, 3, were chosen so that intervals of 50 to 99 % hold as many rows, left out.

Left out together are the rows of a family (`family` of the data), else those of a source with one
model. Families that are weighed are those of the data, else sources.
"""

import argparse
import pathlib
import sys
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

_DEGREES, _LEVEL, _FEWEST, _HALF, _UNKNOWN = 3.0, 0.9, 20, 2, 2.0
# Median of the mean of `simulate` over that of `predict`, of 60 of these jobs: 1.008 to 1.027.
_VARIABILITY = 0.014
_SOURCE = "published steps and systems of MLPerf Training (benchmarks/expected_error.py --write)"


class Row(NamedTuple):
    error: float
    family: str
    left_out: str
    key: tuple[str, bool, str, str]
    source: str
    shipped: bool  # Whether the shipped interval holds it.


def rows_of(folder: pathlib.Path, level: float) -> list[Row]:
    """The logarithms of measured over predicted seconds."""
    import prism_jax as prism
    from benchmarks._published import published
    from prism_jax.data import generation_of
    from prism_jax.workload import has_experts

    found = []
    for one in published(folder):
        if (job := one.job) is None or not (job.model and job.training and job.cluster):
            continue
        ratio = one.seconds / prism.predict(job).mean
        kind = ("experts" if has_experts(job.model) else "dense", job.training.zero == 3)
        key = (*kind, generation_of(job.cluster.device.name), job.training.software)
        model = f"{one.table} {job.model.num_layers} {job.model.hidden_size}"
        left_out = one.family if one.family != one.table else model
        low, high = prism.expected_error(job).interval(level)
        source = one.table.split(",")[0]
        found.append(
            Row(float(np.log(ratio)), one.family, left_out, key, source, low <= ratio <= high)
        )
    return found


def classes_of(key) -> list[tuple]:
    """A class and those above it, from that of all rows."""
    return [(), key[:2], key[:3], *([key] if key[3:] and key[3] else [])]


def law_of(rows: list[Row], key) -> tuple[float, float, list[Row]]:
    """The bias and the spread of a class, and the rows of the smallest class that has enough."""
    errors, weights, last = np.zeros(0), np.zeros(0), []
    for one in classes_of(key):
        families = defaultdict(list)
        for row in (mine := [row for row in rows if row.key[: len(one)] == one]):
            families[row.family].append(row.error)
        if last and len(mine) < _FEWEST:
            break
        each = [np.full(len(e), 1 / (len(e) + _HALF)) for e in families.values()]
        errors = np.concatenate([errors, *families.values()])
        weights = np.concatenate([weights, *each])
        weights, last = weights / weights.sum(), mine
    bias = _quantile(errors, weights, 0.5)
    half = _quantile(np.abs(errors - bias), weights, _LEVEL)
    return bias, half / float(stdtrit(_DEGREES, (1 + _LEVEL) / 2)), last


def _quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    levels = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(q, levels, values[order]))


def left_out(rows: list[Row], level: float) -> dict[int, bool]:
    """For each row by its place, whether the interval from the rows of others holds it."""
    found, far = {}, float(stdtrit(_DEGREES, (1 + level) / 2))
    for name in {row.left_out for row in rows}:
        rest = [row for row in rows if row.left_out != name]
        laws = {row.key: law_of(rest, row.key) for row in rows if row.left_out == name}
        for i, row in enumerate(rows):
            if row.left_out == name:
                bias, spread, _ = laws[row.key]
                found[i] = abs(row.error - bias) <= spread * far
    return found


def table(rows: list[Row], held: dict[int, bool]) -> str:
    """In Markdown: how many rows the intervals hold, of each class with enough rows."""
    header = ("class", "rows", "families", "median error", "90 % of rows", "left out", "shipped")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    counts = Counter(one for row in rows for one in classes_of(row.key))
    for key in sorted(one for one, count in counts.items() if count >= _FEWEST or len(one) < 2):
        mine = [i for i, row in enumerate(rows) if row.key[: len(key)] == key]
        errors = 100 * np.expm1([rows[i].error for i in mine])
        low, middle, high = np.quantile(errors, [0.05, 0.5, 0.95])
        families = defaultdict(list)
        for i in mine:
            families[rows[i].family].append(held.get(i, np.nan))
        cells = [named(key), f"{len(mine):,}", f"{len(families)}"]
        cells += [f"{middle:+.1f} %", f"{low:+.0f} .. {high:+.0f} %"]
        cells += [f"{100 * np.mean([held[i] for i in mine]):.0f} %" if held else ""]
        cells += [f"{100 * np.mean([rows[i].shipped for i in mine]):.0f} %"]
        lines.append("| " + " | ".join(cells) + " |")
        if not key and held:
            each = 100 * np.mean([np.mean(one) for one in families.values()])
            lines.append(f"| each family once | | | | | {each:.0f} % | |")
    return "\n".join(lines)


def named(key) -> str:
    if not key:
        return "all"
    return ", ".join([key[0], "FSDP" if key[1] else "no FSDP", *key[2:]])


def file_of(rows: list[Row]) -> str:
    """The shipped laws, in TOML. Classes with few rows have the law of the class above."""
    constants = {"degrees": _DEGREES, "variability": _VARIABILITY, "unknown": _UNKNOWN}
    lines = ['kind = "expected-errors"', f'source = "{_SOURCE}"']
    lines += [f"{name} = {value}" for name, value in constants.items()]
    counts = Counter(one for row in rows for one in classes_of(row.key))
    for key in sorted(one for one in counts if len(one) in (2, 3) or counts[one] >= _FEWEST):
        bias, spread, used = law_of(rows, key) if key else (0.0, 0.0, [])
        if not key:
            continue
        sources = ", ".join(f"{n} {name}" for name, n in Counter(r.source for r in used).items())
        lines += ["", "[[classes]]", f'model = "{key[0]}"', f"fsdp = {str(key[1]).lower()}"]
        names = zip(("generation", "software"), key[2:], strict=False)
        lines += [f'{name} = "{value}"' for name, value in names]
        lines += [f"bias = {bias:.4f}", f"spread = {spread:.4f}", f"num_runs = {len(used)}"]
        lines += [f'table = "{sources}"']
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="How often intervals of expected errors hold.")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--shipped", action="store_true", help="only of the shipped laws")
    parser.add_argument("--write", action="store_true", help="write the laws that are shipped")
    arguments = parser.parse_args()
    rows = rows_of(arguments.data, _LEVEL)
    if arguments.write:
        (ROOT / "kernels" / "expected_errors.toml").write_text(file_of(rows))
    print(table(rows, {} if arguments.shipped else left_out(rows, _LEVEL)))


if __name__ == "__main__":
    main()
