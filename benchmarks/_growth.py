"""Growth of a step with GPUs at equal work a GPU: the weak-scaling series of `steps/growth.csv`.

Its rows are those of `steps/step_means.csv`, whose columns give their jobs. Each is compared with
the first of its series, which is left out.
"""

import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from prism_jax import data

from ._published_jobs import of_steps
from ._rows import attempt, count, job_of, note, number, predicted, read
from ._tables import by, percent, table


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
    series = defaultdict(list)
    for row in read(folder / "steps" / "growth.csv"):
        if not row["scaling"].startswith("weak"):
            continue
        step, reason = attempt(_step, row, means)
        if step is None:
            note(f"a row of {row['series']} is left out: {reason}")
        else:
            # Rows of one name have other work where the first of their series took longer.
            first = number(row["step_time_s"]) or 0.0
            series[row["series"]].append((first / (step.measured + 1), step))
    for steps in series.values():
        yield from _alike(steps)


def _alike(steps: list[tuple[float, Step]]) -> Iterator[list[Step]]:
    """Series of one name, each sorted by GPUs, by the time of their first row."""
    fewest = min(step.gpus for _, step in steps)
    firsts = [time for time, one in steps if one.gpus == fewest and one.measured == 0] or [0.0]
    for first in dict.fromkeys(firsts):
        mine = [s for time, s in steps if first == min(firsts, key=lambda one: abs(one - time))]
        yield sorted(mine, key=lambda step: step.gpus)


def _step(row: dict[str, str], means: list[dict[str, str]]) -> Step:
    relative = number(row["relative_time"])
    if relative is None:
        raise ValueError("`relative_time` is no number above 0")
    about = row["series"], row["family"], count(row, "gpus"), relative - 1
    joined, reason = attempt(_joined, row, means)
    if joined is not None:
        joined, reason = attempt(job_of, of_steps, joined)
    return Step(*about, joined, reason)


def _joined(row: dict[str, str], means: list[dict[str, str]]) -> dict[str, str]:
    """The row of `step_means.csv` that a row of a series is."""
    numbers = ("gpus", "global_batch", "step_time_s")
    for one in means:
        same = all(one[key] == row[key] for key in ("family", "dtype"))
        same = same and one["model"].partition(" (")[0] == row["model"].partition(" (")[0]
        same = same and row["release"] in one["release"].split(", ")
        if same and all(number(one[key]) == (number(row[key]) or -1) for key in numbers):
            return one
    raise ValueError("no row of step_means.csv is the same")


def growth_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """How much longer a step is than that of the fewest GPUs of its series, minus one: `measured`
    and `predicted`; a row that cannot be predicted has a `reason` instead.
    """
    found: list[dict[str, Any]] = []
    for steps in series_of(folder):
        base = steps[0]
        first, missing = predicted(base.job, base.reason)
        for one in steps[1:]:
            row: dict[str, Any] = {"table": "growth", "name": f"{one.series}, {one.gpus} GPUs"}
            # The first is 0 unless the row of the fewest GPUs is lost.
            measured = (one.measured - base.measured) / (1 + base.measured)
            row |= {"family": one.family, "measured": measured}
            mean, reason = predicted(one.job, one.reason) if first else (0.0, one.reason or missing)
            found.append(row | ({"predicted": mean / first - 1} if mean else {"reason": reason}))
    return found


def growth_table(rows: list[dict[str, Any]]) -> str:
    """The errors of `growth_rows` in percentage points, by family, in Markdown."""
    header = ("family", "rows", "median measured", "median error", "median absolute error")
    known = [row for row in rows if "predicted" in row]
    cells = []
    for name, some in {"all": known, **by("family", known)}.items() if known else ():
        errors = [100 * (row["predicted"] - row["measured"]) for row in some]
        measured = percent(statistics.median(row["measured"] for row in some))
        bias, size = statistics.median(errors), statistics.median(map(abs, errors))
        cells.append((name, len(some), measured, f"{bias:+.1f}", f"{size:.1f}"))
    return table(header, cells)
