"""Growth of a step with GPUs at equal work a GPU: the weak-scaling series of `steps/growth.csv`.

Its rows are those of `steps/step_means.csv`, whose columns give their jobs. Each is compared with
the first of its series, which is left out.
"""

import itertools as it
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

import prism_jax as prism
from prism_jax import data

from ._published import read
from ._published_jobs import of_steps


class Step(msgspec.Struct, frozen=True):
    """A row of a series.

    **Attributes:**

    - `series`, `family`, `gpus`: what it is of.
    - `measured`: its step time over that of the first of its series, minus one.
    - `job`: its job; `None` for a `reason`.
    """

    series: str
    family: str
    gpus: int
    measured: float
    job: data.Job | None
    reason: str = ""


def series_of(folder: pathlib.Path) -> Iterator[list[Step]]:
    """The weak-scaling series of a folder like `../shared/data`, each from its fewest GPUs on."""
    means = read(folder / "steps" / "step_means.csv")
    rows = [r for r in read(folder / "steps" / "growth.csv") if r["scaling"].startswith("weak")]
    for _, group in it.groupby(rows, key=lambda row: row["series"]):
        steps: list[Step] = []
        for row in group:
            if steps and row["relative_time"] == "1.0" and int(row["gpus"]) == steps[0].gpus:
                yield steps  # A series of the same name with other work.
                steps = []
            steps.append(_step(row, means))
        yield steps


def _step(row: dict[str, str], means: list[dict[str, str]]) -> Step:
    about = row["series"], row["family"], int(row["gpus"]), float(row["relative_time"]) - 1
    try:
        return Step(*about, of_steps(_joined(row, means)))
    except ValueError as error:
        return Step(*about, None, str(error))


def _joined(row: dict[str, str], means: list[dict[str, str]]) -> dict[str, str]:
    """The row of `step_means.csv` that a row of a series is."""
    numbers = ("gpus", "global_batch", "step_time_s")
    for one in means:
        same = all(one[key] == row[key] for key in ("family", "dtype"))
        same = same and one["model"].partition(" (")[0] == row["model"].partition(" (")[0]
        same = same and row["release"] in one["release"].split(", ")
        if same and all(_number(one[key]) == _number(row[key]) for key in numbers):
            return one
    raise ValueError("no row of step_means.csv is the same")


def _number(text: str) -> float:
    return float(text or "nan")


def growth_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """How much longer a step is than that of the fewest GPUs of its series, minus one: `measured`
    and `predicted`; a row that cannot be predicted has a `reason` instead.
    """
    found: list[dict[str, Any]] = []
    for steps in series_of(folder):
        base = steps[0]
        first = None if base.job is None else prism.predict(base.job).mean
        for one in steps[1:]:
            row = {"table": "growth", "name": f"{one.series}, {one.gpus} GPUs"}
            row |= {"family": one.family, "measured": one.measured}
            if first is None or one.job is None:
                found.append({**row, "reason": one.reason or base.reason})
            else:
                found.append({**row, "predicted": prism.predict(one.job).mean / first - 1})
    return found


def growth_table(rows: list[dict[str, Any]]) -> str:
    """The errors of `growth_rows` in percentage points, by family, in Markdown."""
    lines = ["| family | rows | median measured | median error | median absolute error |"]
    lines.append("|---|---|---|---|---|")
    known = [row for row in rows if "predicted" in row]
    families = dict.fromkeys(row["family"] for row in known)
    for name in ("all", *families):
        some = [row for row in known if name in ("all", row["family"])]
        if not some:
            continue
        errors = [100 * (row["predicted"] - row["measured"]) for row in some]
        measured = 100 * statistics.median(row["measured"] for row in some)
        bias, size = statistics.median(errors), statistics.median(map(abs, errors))
        lines.append(f"| {name} | {len(some)} | {measured:+.1f} % | {bias:+.1f} | {size:.1f} |")
    return "\n".join(lines)
