"""Growth of a step with GPUs, and the level of jobs that are not calibrated.

Growth is that at equal work a GPU: the weak-scaling series of `steps/growth.csv`. Its rows are
those of `steps/step_means.csv`, whose columns give their jobs. Each is compared with the first of
its series, which is left out.

The level of jobs that are not calibrated: `network`, `constant_s` and `growth`.

They are fitted to how steps of one configuration differ between numbers of GPUs, in the series of
`steps/growth.csv` and the families of MLPerf Training. Each family of series counts as one
observation, because its series share a machine and software. What the level of a family is off by
does not count. The runs of `mlperf_v6` differ from each other by up to 7 % at one number of GPUs,
which is more than they grow by, so they say nothing of it. `variants_text` compares published steps
with other levels.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

import prism_jax as prism
from prism_jax import data
from prism_jax.workload import has_experts

from .means import VARIABILITY
from .priors import BEFORE, machine_of
from .published import FAMILIES, published
from .published_jobs import of_steps
from .rows import attempt, count, job_of, note, number, predicted, read, slower, with_kernels
from .tables import Folder, Row, by, percent, table, table_of


class Step(NamedTuple):
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


def series_of(folder: Folder) -> Iterator[list[Step]]:
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
    return Step(*about, *attempt(lambda: job_of(of_steps, _joined(row, means))))


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


def growth_rows(folder: Folder) -> list[Row]:
    """How much longer a step is than that of the fewest GPUs of its series, minus one: `measured`
    and `predicted`; a row that cannot be predicted has a `reason` instead.
    """
    found = []
    for base, *others in series_of(folder):
        first, missing = predicted(base.job, base.reason)
        for one in others:
            # The first is 0 unless the row of the fewest GPUs is lost.
            measured = (one.measured - base.measured) / (1 + base.measured)
            row: Row = {"table": "growth", "name": f"{one.series}, {one.gpus} GPUs"}
            row |= {"family": one.family, "measured": measured}
            mean, reason = predicted(one.job, one.reason) if first else (0.0, one.reason or missing)
            found.append(row | ({"predicted": mean / first - 1} if mean else {"reason": reason}))
    return found


def growth_table(rows: list[Row]) -> str:
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


# What a step of a series and a median of MLPerf are off by in any case.
_NOISE, _MEDIAN_NOISE = 0.01, 0.002
_NETWORKS, _GROWTH = (0.0, 0.1, 0.25, 0.5), 0.01
# Tables of dense models whose errors grew when the level was added.
_DENSE = ["MLPerf families", "Megatron-Core r0.8", "Megatron-LM 2021"]
_DENSE += ["Megatron-LM Llama", "SimuMax"]
_REPLICAS, _FASTER = 8, 0.97
_STARTS = ((0.1, 0.01, 0.004), (0.1, 0.04, 0.006), (0.3, 0.01, 0.006), (0.3, 0.04, 0.004))


class Series(NamedTuple):
    """A series: what was measured over its first step, and what is predicted without a constant for
    each of `_NETWORKS` without growth, and in the last column with `_GROWTH`, in seconds.
    """

    family: str
    is_median: bool
    measured: np.ndarray
    predicted: np.ndarray

    def errors(self, level: np.ndarray) -> np.ndarray:
        """Predicted over first predicted, less measured, of all but the first."""
        network, constant, growth = np.maximum(level, 0.0)
        steps = np.array([np.interp(network, _NETWORKS, row[:-1]) for row in self.predicted])
        steps = steps * (self.predicted[:, -1] / self.predicted[:, 0]) ** (growth / _GROWTH)
        steps = steps + np.minimum(constant, data.load_priors().constant_share.value * steps)
        return (steps / steps[0] - self.measured)[1:]


def all_series(folder: Folder) -> list[Series]:
    """The series of a folder like `../shared/data` whose steps can be written as jobs."""
    found = []
    for steps in series_of(folder):
        if all(one.job for one in steps):
            each = [(one.job, 1 + one.measured) for one in steps]
            found.append(_series(steps[0].family, False, each))
    medians = defaultdict(list)
    for one in published(folder):
        if one.table == FAMILIES and one.job is not None:
            medians[one.family].append((one.job, one.seconds))
    each = ((machine_of(f).rstrip(")"), True, steps) for f, steps in medians.items())
    return found + [_series(*one) for one in each if len(one[-1]) > 1]


def _series(family: str, is_median: bool, steps: Sequence[tuple[Any, float]]) -> Series:
    levels = [{"network": float(np.exp(x)), "growth": 0.0} for x in _NETWORKS]
    levels.append({"network": 1.0, "growth": _GROWTH})
    jobs = [[with_kernels(job, constant_s=0.0, **one) for one in levels] for job, _ in steps]
    predicted = np.array([[prism.predict(job).mean for job in row] for row in jobs])
    measured = np.array([seconds for _, seconds in steps])
    return Series(family, is_median, measured / measured[0], predicted)


def fitted(series: Sequence[Series]) -> np.ndarray:
    """The logarithm of `network`, `constant_s` in seconds, and `growth`."""
    families = list(dict.fromkeys(one.family for one in series))

    def loss(level: np.ndarray) -> float:
        total = float(np.sum(((level - BEFORE[:, 0]) / BEFORE[:, 1]) ** 2)) / 2
        for family in families:
            mine = [one for one in series if one.family == family]
            errors = np.concatenate([one.errors(level) for one in mine])
            if mine[0].is_median:
                total += float(np.sum((errors / _MEDIAN_NOISE) ** 2)) / 2
            else:  # Single last steps have outliers.
                total += float(np.mean(np.log1p((errors / _NOISE) ** 2)))
        return total + 1e6 * float(np.sum(np.minimum(level, 0.0) ** 2))

    steps = np.array([[0, 0, 0], [0.1, 0, 0], [0, 0.02, 0], [0, 0, 0.003]])
    tries = []
    for x in _STARTS:
        options = {"maxiter": 400, "initial_simplex": x + steps}
        tries.append(minimize(loss, x, method="Nelder-Mead", options=options))
    return np.maximum(min(tries, key=lambda one: one.fun).x, 0.0)


def level_text(folder: Folder) -> str:
    """The three with all families and with each left out in turn, and how far off the growth of the
    family that is left out then is, in percentage points; in Markdown.
    """
    series, rows, apart = all_series(folder), [], []
    for family in (None, *dict.fromkeys(one.family for one in series)):
        level = fitted([one for one in series if one.family != family])
        mine = [one for one in series if family in (None, one.family)]
        errors = 100 * np.concatenate([one.errors(level) for one in mine])
        if family and not mine[0].is_median:
            apart.append(errors)
        level = np.exp(level[0]), *level[1:]
        rows.append({"family": family or "none", "level": level, **_sizes(errors)})
    columns = {"family left out": "{family}", "`network`": "{level[0]:.3f}"}
    columns |= {"`constant_s`": "{level[1]:.4f}", "`growth`": "{level[2]:.5f}"}
    columns |= {"bias": "{bias:+.2f}", "median error": "{size:.2f}"}
    text = "\n\nSteps of `growth.csv`, each by a fit without its family: {}, median error "
    text += "{bias:+.2f}, median absolute error {size:.2f} percentage points."
    errors = np.concatenate(apart)
    return table_of(rows, columns) + text.format(len(errors), **_sizes(errors))


def _sizes(errors: np.ndarray) -> Row:
    return {"bias": np.median(errors), "size": np.median(np.abs(errors))}


def variants_text(folder: Folder) -> str:
    """Mean absolute errors by kind of job, each table of steps once, and of `_DENSE`."""
    rows, names = [], []
    for one in published(folder):
        job: Any = one.job
        if job is not None:
            fsdp, experts = job.training.zero == 3, has_experts(job.model)
            kind = "FSDP" if fsdp else "experts" if experts else "dense"
            names, changes = zip(*_variants(job).items(), strict=True)
            means = [prism.predict(with_kernels(job, **keys)).mean for keys in changes]
            off = np.abs(VARIABILITY * np.array(means) / one.seconds - 1)
            rows.append({"kind": kind, "table": one.table, "off": off})
    cells = []
    chosen = [(kind, kind, "") for kind in ("dense", "FSDP", "experts")]
    for label, kind, part in [*chosen, *((part, "dense", part) for part in _DENSE)]:
        mine = [row for row in rows if row["kind"] == kind and row["table"].startswith(part)]
        tables = [[row["off"] for row in some] for some in by("table", mine).values()]
        means = np.mean([np.mean(some, axis=0) for some in tables], axis=0)
        cells.append([label, *(percent(mean, form=".2") for mean in means)])
    return table(["", *names], cells)


def _variants(job: Any) -> dict[str, Any]:
    """The keys of the kernels of a job with each level."""
    beyond = {"num_replicas": _REPLICAS} if job.layout.dp >= _REPLICAS else {"growth": 0.0}
    products = slower(job.kernels, lambda one: _FASTER if one.kernel == "gemm" else 1.0)
    found = {"shipped": {}, "no constant": {"constant_s": 0.0}}
    found["half the constant"] = {"constant_s": job.kernels.constant_s / 2}
    found[f"growth beyond {_REPLICAS} replicas"] = beyond
    return found | {f"products x {_FASTER}": {"efficiency": products}}
