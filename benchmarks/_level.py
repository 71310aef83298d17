"""The level of jobs that are not calibrated: `network`, `constant_s` and `growth`.

They are fitted to how steps of one configuration differ between numbers of GPUs, in the series of
`steps/growth.csv` and the families of MLPerf Training. Each family of series counts as one
observation, because its series share a machine and software. What the level of a family is off by
does not count. The runs of `mlperf_v6` differ from each other by up to 7 % at one number of GPUs,
which is more than they grow by, so they say nothing of it. `variants_text` compares published steps
with other levels.
"""

import pathlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import minimize

import prism_jax as prism
from prism_jax import data
from prism_jax.workload import has_experts

from ._growth import series_of
from ._means import VARIABILITY
from ._priors import BEFORE, machine_of
from ._published import FAMILIES, published
from ._tables import table


# What a step of a series and a median of MLPerf are off by in any case.
_NOISE, _MEDIAN_NOISE = 0.01, 0.002
_NETWORKS, _GROWTH = (0.0, 0.1, 0.25, 0.5), 0.01
# Tables of dense models whose errors grew when the level was added.
_DENSE = ("MLPerf families", "Megatron-Core r0.8", "Megatron-LM 2021")
_DENSE += ("Megatron-LM Llama", "SimuMax")
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


def all_series(folder: pathlib.Path) -> list[Series]:
    """The series of a folder like `../shared/data` whose steps can be written as jobs."""
    found: dict[str, list[tuple[data.Job, float]]] = {}
    for one in published(folder):
        if one.table == FAMILIES and one.job is not None:
            found.setdefault(one.family, []).append((one.job, one.seconds))
    medians = [
        (machine_of(f).rstrip(")"), True, steps) for f, steps in found.items() if len(steps) > 1
    ]
    return [_series(*one) for one in (*_of_growth(folder), *medians)]


def _of_growth(folder: pathlib.Path) -> Iterator[tuple[str, bool, list[tuple[data.Job, float]]]]:
    for steps in series_of(folder):
        known = [(one.job, 1 + one.measured) for one in steps if one.job is not None]
        if len(known) == len(steps):
            yield steps[0].family, False, known


def _series(family: str, is_median: bool, steps: Sequence[tuple[data.Job, float]]) -> Series:
    levels = [(np.exp(network), 0.0) for network in _NETWORKS] + [(1.0, _GROWTH)]
    predicted = np.array([[_seconds(job, *level) for level in levels] for job, _ in steps])
    measured = np.array([seconds for _, seconds in steps])
    return Series(family, is_median, measured / measured[0], predicted)


def _seconds(job: data.Job, network: float, growth: float) -> float:
    assert job.kernels is not None
    level = {"network": float(network), "growth": growth, "constant_s": 0.0}
    kernels = msgspec.structs.replace(job.kernels, **level)
    return prism.predict(msgspec.structs.replace(job, kernels=kernels)).mean


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
    options = {"maxiter": 400}
    tries = [
        minimize(loss, x, method="Nelder-Mead", options={**options, "initial_simplex": x + steps})
        for x in map(np.array, _STARTS)
    ]
    return np.maximum(min(tries, key=lambda one: one.fun).x, 0.0)


def level_text(folder: pathlib.Path) -> str:
    """The three with all families and with each left out in turn, and how far off the growth of the
    family that is left out then is, in percentage points; in Markdown.
    """
    series = all_series(folder)
    header = ("family left out", "`network`", "`constant_s`", "`growth`", "bias", "median error")
    cells, apart = [], []
    for family in (None, *dict.fromkeys(one.family for one in series)):
        level = fitted([one for one in series if one.family != family])
        mine = [one for one in series if family in (None, one.family)]
        errors = 100 * np.concatenate([one.errors(level) for one in mine])
        if family and not mine[0].is_median:
            apart.append(errors)
        found = f"{np.exp(level[0]):.3f}", f"{level[1]:.4f}", f"{level[2]:.5f}"
        cells.append((family or "none", *found, *_sizes(errors)))
    bias, size = _sizes(errors := np.concatenate(apart))
    return (
        f"{table(header, cells)}\n\nSteps of `growth.csv`, each by a fit without its family: "
        f"{len(errors)}, median error {bias}, median absolute error {size} percentage points."
    )


def _sizes(errors: np.ndarray) -> tuple[str, str]:
    return f"{np.median(errors):+.2f}", f"{np.median(np.abs(errors)):.2f}"


def variants_text(folder: pathlib.Path) -> str:
    """Mean absolute errors by kind of job, each table of steps once, and of `_DENSE`."""
    errors: Any = defaultdict(lambda: defaultdict(list))
    for one in published(folder):
        job: Any = one.job
        if job is None:
            continue
        experts, fsdp = has_experts(job.model), job.training.zero == 3
        kind = "FSDP" if fsdp else "experts" if experts else "dense"
        for name, kernels in _variants(job).items():
            changed = msgspec.structs.replace(job, kernels=kernels)
            ratio = VARIABILITY * prism.predict(changed).mean / one.seconds
            errors[kind, one.table][name].append(abs(ratio - 1))
    names = list(next(iter(errors.values())))
    cells = []
    chosen = [(kind, kind, "") for kind in ("dense", "FSDP", "experts")]
    chosen += [(part, "dense", part) for part in _DENSE]
    for label, kind, part in chosen:
        mine = [e for (k, table), e in errors.items() if k == kind and table.startswith(part)]
        means = [np.mean([np.mean(one[name]) for one in mine]) for name in names]
        cells.append([label, *(f"{100 * mean:.2f} %" for mean in means)])
    return table(["", *names], cells)


def _variants(job: Any) -> dict[str, Any]:
    """The kernels of a job with each level."""
    kernels, new = job.kernels, msgspec.structs.replace
    beyond = {"num_replicas": _REPLICAS} if job.layout.dp >= _REPLICAS else {"growth": 0.0}
    products = tuple(
        new(one, values=tuple(v / _FASTER for v in one.values)) if one.kernel == "gemm" else one
        for one in kernels.efficiency
    )
    return {
        "shipped": kernels,
        "no constant": new(kernels, constant_s=0.0),
        "half the constant": new(kernels, constant_s=kernels.constant_s / 2),
        f"growth beyond {_REPLICAS} replicas": new(kernels, **beyond),
        f"products x {_FASTER}": new(kernels, efficiency=products),
    }
