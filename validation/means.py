"""Means of published steps, predicted from configuration alone: their errors by table, and how long
`predict` takes.

A fault in a kernel table causes an error in all rows of its machine, so the tables name machines.
Rows that cannot be written as a job are counted with the reason.

The constants that were chosen with steps of models with experts are fitted again without a family.
A fit minimises the mean absolute error of the logarithm, in which a family of n steps weighs
n / (n + 8). It starts from the shipped constants and has no prior, because these have seen all
steps. For the fit, the logarithm of a prediction is taken to be additive in the constants, each by
linear interpolation between `_GRID`; scores are of `predict` with the fitted constants. A family is
one model of one source, on all machines.
"""

import time
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import minimize

import prism_jax as prism
from prism_jax import data
from prism_jax.workload import has_experts

from .published import Published, published
from .rows import predicted, reason_lines, slower, with_kernels
from .tables import Folder, Row, Rows, by, error_of, percent, table, table_of


# What variability adds to a mean: the median over 60 of these jobs, two of each table; 1.008 to
# 1.027. A simulation of each would take a quarter of an hour.
VARIABILITY = 1.014
_TIMED = ("gpt3-175b-h100-4096", "llama-3-405b-h100-16384")
_CALLS = 3  # The shortest of so many counts, because other work on the machine only adds.


def mean_rows(folder: Folder) -> Rows:
    """A row for each published step below a folder. One that cannot be written as a job has a
    `reason`."""
    for one in published(folder):
        row = {"table": one.table, "name": one.name, "measured": one.seconds}
        mean, reason = predicted(one.job, one.reason)
        yield row | ({"predicted": VARIABILITY * mean} if mean else {"reason": reason})


def mean_table(rows: list[Row]) -> str:
    """In Markdown."""
    expressed = [row for row in rows if "predicted" in row]
    cells = []
    for name, mine in sorted(by("table", expressed).items()):
        errors = np.array([error_of(row) for row in mine])
        size = percent(np.abs(errors).mean(), form=".1")
        worst = percent(errors[np.argmax(np.abs(errors))])
        cells.append((name, len(errors), percent(errors.mean()), size, worst))
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    text = f"{len(expressed):,} of {len(rows):,} rows can be written as jobs."
    if reasons := reason_lines(rows):
        text += " The others cannot, for these reasons:\n"
    return "\n".join([table(header, cells), "", text, *reasons])


def time_rows(folder: Folder) -> Rows:
    """A row for two shipped jobs and for each published step below a folder: the seconds of CPU
    time of `predict` in a process that has predicted the same job before."""
    jobs = [(name, prism.load_job(name)) for name in _TIMED]
    jobs += [(one.table, one.job) for one in published(folder) if one.job]
    for name, job in jobs:
        prism.predict(job)  # Builds the graph of its schedule.
        starts = [time.process_time()]
        for _ in range(_CALLS):
            prism.predict(job)
            starts.append(time.process_time())
        yield {"name": name, "seconds": float(np.diff(starts).min())}


def time_table(rows: list[Row]) -> str:
    """In Markdown."""
    seconds = [row["seconds"] for row in rows[len(_TIMED) :]]
    middle: Row = {"name": f"the {len(seconds):,} published steps, median"}
    middle["seconds"] = np.median(seconds or [np.nan])
    shown = [*rows[: len(_TIMED)], middle]
    return table_of(shown, {"`predict` of": "{name}", "CPU ms": "{seconds:.1fm}"})


# Latencies of kernels of Blackwell: of each, the kernel, and its link or dtype.
_TABLES = {"hybridep, Blackwell": ("hybridep", "nvlink")}
_TABLES["elementwise, Blackwell"] = ("elementwise", "")
_CONSTANTS = ("host_experts_s", *_TABLES)
_KINDS = ("shipped", "fitted", "left_out")
_GRID = np.array([0.5, 0.7, 1.0, 1.4, 2.0])
_STARTS = ((0.1, 0.1, -0.1), (0.3, -0.3, 0.3), (-0.3, -0.3, 0.3), (-0.3, 0.3, -0.3))
_HALF = 8


def expert_rows(folder: Folder) -> Rows:
    """A row for each published step of a model with experts: measured seconds, and those predicted
    with the shipped constants, with constants fitted to all steps, and without the step's family.
    """
    known = [(one, one.job) for one in published(folder) if predicted(one.job)[0]]
    rows = [one for one, job in known if job and job.model and has_experts(job.model)]
    if not rows:
        return
    families = np.array([_family_of(one) for one in rows])
    weights = np.array([1 / (np.sum(families == one) + _HALF) for one in families])
    measured = np.log([one.seconds for one in rows])
    # The logarithms of predictions: steps, constants, and the factors of each.
    table = np.log([[_curve(row, k) for k in range(len(_CONSTANTS))] for row in rows])

    def fitted(keep: np.ndarray) -> np.ndarray:
        def loss(x: np.ndarray) -> float:
            errors = _interpolated(table[keep], x) - measured[keep]
            return float(weights[keep] @ np.abs(errors))

        bounds: Any = [tuple(np.log(_GRID[[0, -1]]))] * len(_CONSTANTS)
        tries = [minimize(loss, x, method="Nelder-Mead", bounds=bounds) for x in _STARTS]
        return np.exp(min(tries, key=lambda one: one.fun).x)

    everything = fitted(np.ones(len(rows), bool))
    without = {family: fitted(families != family) for family in dict.fromkeys(families)}
    for row, family in zip(rows, families, strict=True):
        factors = {"shipped": np.ones(len(_CONSTANTS)), "fitted": everything}
        factors["left_out"] = without[family]
        job: Any = row.job
        of = f"{data.generation_of(job.cluster.device.name)}, {job.training.software}"
        about = {"table": of, "name": row.name, "family": str(family), "measured": row.seconds}
        about |= {name: VARIABILITY * _seconds(job, one) for name, one in factors.items()}
        yield about | {f"{name}_constants": one.tolist() for name, one in factors.items()}


def expert_table(rows: list[Row]) -> str:
    """In Markdown: mean absolute errors by class, and the factors on the shipped constants."""
    if not rows:
        return "no steps of models with experts"
    cells = []
    for name, mine in [*sorted(by("table", rows).items()), ("all", rows)]:
        ratios = np.array([[row[k] / row["measured"] for k in _KINDS] for row in mine])
        sizes = (percent(off, form=".1") for off in np.abs(ratios - 1).mean(axis=0))
        cells.append((name, len(mine), len(by("family", mine)), *sizes))
    header = ("steps with experts", "rows", "families", "shipped", "fitted", "left out")
    left_out = np.array([row["left_out_constants"] for row in rows])
    each = (_CONSTANTS, rows[0]["fitted_constants"], left_out.min(axis=0), left_out.max(axis=0))
    constants: list[Row] = [{"of": one} for one in zip(*each, strict=True)]
    columns = {"constant": "{of[0]}", "fitted over shipped": "{of[1]:.2f}"}
    columns["with a family left out"] = "{of[2]:.2f} to {of[3]:.2f}"
    return f"{table(header, cells)}\n\n{table_of(constants, columns)}"


def _family_of(row: Published) -> str:
    model: Any = row.job and row.job.model
    own = row.family if row.family != row.table else f"{model.num_layers} {model.hidden_size}"
    return f"{row.table.split(',')[0]}, {own}"


def _curve(row: Published, constant: int) -> list[float]:
    """Predicted seconds for each factor on one constant."""
    factors = np.ones((len(_GRID), len(_CONSTANTS)))
    factors[:, constant] = _GRID
    return [VARIABILITY * _seconds(row.job, one) for one in factors]


def _interpolated(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    grid, base = np.log(_GRID), table[:, 0, len(_GRID) // 2]
    each = [[np.interp(a, grid, one) for a, one in zip(x, row, strict=True)] for row in table]
    return base + np.sum(np.array(each) - base[:, None], axis=1)


def _seconds(job: Any, factors: np.ndarray) -> float:
    """Of `predict` for these factors on the constants; efficiencies are divided by theirs."""
    host, *others = factors.tolist()
    blackwell = data.generation_of(job.cluster.device.name) == "Blackwell"
    of = dict(zip(_TABLES.values(), others, strict=True)) if blackwell else {}
    tables = slower(job.kernels, lambda one: of.get((one.kernel, one.variant), 1.0))
    launches = host * job.training.host_experts_s
    training = msgspec.structs.replace(job.training, host_experts_s=launches)
    changed: Any = msgspec.structs.replace(job, training=training)
    return prism.predict(with_kernels(changed, efficiency=tables)).mean
