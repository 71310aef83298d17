"""By how much predictions are off, by class of jobs, and how often their intervals hold.

    python benchmarks/expected_error.py            # coverage by class, families left out; a minute
    python benchmarks/expected_error.py --write    # and writes `kernels/expected_errors.toml`
    python benchmarks/expected_error.py --shipped --data DIR    # coverage of the shipped laws

The law of a class is a mixture: its families, each with the weight n / (n + 2) for n rows, so that
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
import pathlib
import sys
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

_DEGREES, _LEVEL, _FEWEST, _UNKNOWN = 3.0, 0.9, 20, 2.5
# With the last, the law of a kind holds 95 % and more of a generation that is left out whole.
_HALF, _ABOVE = 2, 0.5  # Rows with which a family weighs a half; the weight of the class above.
# Median of the mean of `simulate` over that of `predict`, of 60 of these jobs: 1.008 to 1.027.
_VARIABILITY = 0.014
_SOURCE = "published steps and systems of MLPerf Training (benchmarks/expected_error.py --write)"


class Row(NamedTuple):
    error: float
    family: str
    left_out: str
    key: tuple[str, bool, str, str]
    source: str
    job: Any


def rows_of(folder: pathlib.Path) -> list[Row]:
    """The logarithms of measured over predicted seconds."""
    import prism_jax as prism
    from benchmarks._published import published
    from prism_jax.data import generation_of
    from prism_jax.workload import has_experts

    found = []
    for one in published(folder):
        if (job := one.job) is None or not (job.model and job.training and job.cluster):
            continue
        error = float(np.log(one.seconds / prism.predict(job).mean))
        kind = ("experts" if has_experts(job.model) else "dense", job.training.zero == 3)
        key = (*kind, generation_of(job.cluster.device.name), job.training.software or "")
        model = f"{one.table} {job.model.num_layers} {job.model.hidden_size}"
        left_out = one.family if one.family != one.table else model
        found.append(Row(error, one.family, left_out, key, one.table.split(",")[0], job))
    return found


def classes_of(key: tuple) -> list[tuple]:
    """A class and those above it, from that of all rows."""
    return [(), key[:2], key[:3], key][: len(key) + (1 if len(key) > 3 and key[3] else 0)]


def law_of(rows: list[Row], classes: list[tuple]) -> tuple[float, float]:
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


def enough(rows: list[Row], key: tuple) -> list[tuple]:
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


def table(rows: list[Row], held: dict[int, bool]) -> str:
    """In Markdown: how many rows the intervals hold, of each class with enough rows."""
    header = ("class", "rows", "families", "median error", "90 % of rows", "left out", "shipped")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    shipped = {i: _shipped(row) for i, row in enumerate(rows)}
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
        cells += [f"{100 * np.mean([shipped[i] for i in mine]):.0f} %"]
        lines.append("| " + " | ".join(cells) + " |")
        if not key and held:
            each = 100 * np.mean([np.mean(one) for one in families.values()])
            lines.append(f"| each family once | | | | | {each:.0f} % | |")
    return "\n".join(lines)


def _shipped(row: Row) -> bool:
    """Whether the shipped interval holds a row."""
    import prism_jax as prism

    low, high = prism.expected_error(row.job).interval(_LEVEL)
    return low <= np.exp(row.error) <= high


def named(key: tuple) -> str:
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
        if not key:
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


def main() -> None:
    parser = argparse.ArgumentParser(description="How often intervals of expected errors hold.")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--shipped", action="store_true", help="only of the shipped laws")
    parser.add_argument("--write", action="store_true", help="write the laws that are shipped")
    arguments = parser.parse_args()
    from prism_jax.data import load_expected_errors

    rows = rows_of(arguments.data)
    if arguments.write:
        (ROOT / "kernels" / "expected_errors.toml").write_text(file_of(rows))
        load_expected_errors.cache_clear()
    print(table(rows, {} if arguments.shipped else left_out(rows, _LEVEL)))


if __name__ == "__main__":
    main()
