"""The constants that were chosen with steps of models with experts, fitted again without a family.

A fit minimises the mean absolute error of the logarithm, in which a family of n steps weighs
n / (n + 8). It starts from the shipped constants and has no prior, because these have seen all
steps. For the fit, the logarithm of a prediction is taken to be additive in the constants, each by
linear interpolation between `_GRID`; scores are of `predict` with the fitted constants. A family is
one model of one source, on all machines.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import minimize

import prism_jax as prism
from prism_jax import data
from prism_jax.workload import has_experts

from ._means import VARIABILITY
from ._published import Published, published
from ._rows import predicted
from ._tables import by, table


# Latencies of kernels of Blackwell: of each, the kernel, and its link or dtype.
_TABLES = {
    "hybridep, Blackwell": ("hybridep", "nvlink"),
    "elementwise, Blackwell": ("elementwise", ""),
}
_CONSTANTS = ("host_experts_s", *_TABLES)
_GRID = np.array([0.5, 0.7, 1.0, 1.4, 2.0])
_STARTS = ((0.1, 0.1, -0.1), (0.3, -0.3, 0.3), (-0.3, -0.3, 0.3), (-0.3, 0.3, -0.3))
_HALF = 8


def expert_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each published step of a model with experts: measured seconds, and those predicted
    with the shipped constants, with constants fitted to all steps, and without the step's family.
    """
    rows = [one for one in published(folder) if _counts(one.job)]
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
        seconds = {name: VARIABILITY * _seconds(row.job, one) for name, one in factors.items()}
        job: Any = row.job
        of = f"{data.generation_of(job.cluster.device.name)}, {job.training.software}"
        about = {"table": of, "name": row.name, "family": str(family)}
        constants = {f"{name}_constants": one.tolist() for name, one in factors.items()}
        yield {**about, "measured": row.seconds, **seconds, **constants}


def expert_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: mean absolute errors by class, and the factors on the shipped constants."""
    if not rows:
        return "no steps of models with experts"
    cells = []
    for name, mine in [*sorted(by("table", rows).items()), ("all", rows)]:
        errors = (
            np.mean([abs(row[kind] / row["measured"] - 1) for row in mine])
            for kind in ("shipped", "fitted", "left_out")
        )
        sizes = (f"{100 * error:.1f} %" for error in errors)
        cells.append((name, len(mine), len(by("family", mine)), *sizes))
    header = ("steps with experts", "rows", "families", "shipped", "fitted", "left out")
    constants = []
    for k, name in enumerate(_CONSTANTS):
        found = [row["left_out_constants"][k] for row in rows]
        whole = f"{rows[0]['fitted_constants'][k]:.2f}"
        constants.append((name, whole, f"{min(found):.2f} to {max(found):.2f}"))
    of_constants = table(("constant", "fitted over shipped", "with a family left out"), constants)
    return f"{table(header, cells)}\n\n{of_constants}"


def _counts(job: Any) -> bool:
    return job is not None and has_experts(job.model) and predicted(job)[0] > 0


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
    host, *slower = factors.tolist()
    blackwell = data.generation_of(job.cluster.device.name) == "Blackwell"
    by = dict(zip(_TABLES.values(), slower, strict=True)) if blackwell else {}
    tables = tuple(
        msgspec.structs.replace(
            one, values=tuple(v / by.get((one.kernel, one.variant), 1.0) for v in one.values)
        )
        for one in job.kernels.efficiency
    )
    kernels = msgspec.structs.replace(job.kernels, efficiency=tables)
    launches = host * job.training.host_experts_s
    training = msgspec.structs.replace(job.training, host_experts_s=launches)
    return prism.predict(msgspec.structs.replace(job, training=training, kernels=kernels)).mean
