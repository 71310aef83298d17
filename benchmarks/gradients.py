"""How accurate derivatives are, compared with central differences, and what they cost.

    python benchmarks/gradients.py                  # tables in Markdown
    python benchmarks/gradients.py --coverage 200   # how often 95 % intervals hold (slow)

A pair is a program, one of its parameters (or an array of them, changed in proportion) and an
objective. Its derivative is compared with the central difference, with the same random numbers. The
standard error of the difference of the two is that of a jackknife of 32 groups, so over it the
difference is Student's t with 31 degrees of freedom; `z` is the normal deviate that is as
improbable. `relative error` is a standard error of a derivative relative to the largest derivative
of the program: nine in ten do not exceed it. `cost` is the CPU time of value and derivatives of all
parameters over that of the value.
"""

import sys
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np
from scipy.special import ndtri, stdtr


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks import _coverage
from benchmarks._coverage import programs
from prism_jax.analysis import CVaR, Exceedance, Mean, Quantile, Std
from prism_jax.analysis._derivative import figure_gradient, figure_gradients
from prism_jax.analysis._figure import figure, figure_of, figure_value
from prism_jax.analysis._jackknife import stacked
from prism_jax.engine import simulated_steps
from validation.tables import Row, Rows, by, options, table, table_of, use_all_cores


NUM_SAMPLES = 2**16
# The relative change of a central difference, unless it would move steps by a part of their spread:
# then the third derivative of a probability would count.
STEP, MOVED = 0.02, 0.05


class Parameters:
    """The parameters of a program, one by one."""

    def __init__(self, program: Any):
        floats, self._static = eqx.partition(program, eqx.is_inexact_array)
        self.leaves, self._tree = jax.tree.flatten(floats)
        with_paths = jax.tree_util.tree_leaves_with_path(floats)
        self.paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
        self.varied = [i for i, leaf in enumerate(self.leaves) if np.any(np.asarray(leaf) != 0)]

    def changed(self, i: int, by: float) -> Any:
        """The program with a parameter multiplied by `1 + by`."""
        moved = [leaf * (1 + by) if i == j else leaf for j, leaf in enumerate(self.leaves)]
        return eqx.combine(jax.tree.unflatten(self._tree, moved), self._static)

    def relative(self, gradient: Any) -> list[float]:
        """The derivative with respect to the logarithm of each that is not zero."""
        slopes = jax.tree.leaves(gradient)
        return [float(np.sum(np.asarray(slopes[i]) * self.leaves[i])) for i in self.varied]


def pairs_of(name: str, program: Any) -> Rows:
    """All parameters and objectives of a program."""
    parameters = Parameters(program)
    found = figure(program, Mean(), num_samples=8192, key=jax.random.key(10))
    steps = found.simulated.steps
    moved = MOVED * float(np.std(steps))
    slopes = parameters.relative(figure_gradient(found))
    changes = [min(STEP, moved / max(abs(slope), 1e-30)) for slope in slopes]
    objectives = [Mean(), Std(), Quantile(0.9), CVaR(0.9)]
    objectives.append(Exceedance(float(np.quantile(steps, 0.9))))
    for objective in objectives:  # Compiles.
        _derivatives(program, parameters, objective)
    each = [_derivatives(program, parameters, objective) for objective in objectives]
    theirs = _central_differences(program, parameters, changes, objectives)
    value, both = np.sum([seconds for *_, seconds in each], axis=0)
    for o, (objective, (ours, estimator, _)) in enumerate(zip(objectives, each, strict=True)):
        about = {"program": name, "cost": both / value, "estimator": estimator}
        about["objective"] = type(objective).__name__
        yield from (about | row for row in _compared(parameters, ours, theirs[:, o]))


def _sampled() -> Any:
    return {"num_samples": NUM_SAMPLES, "key": jax.random.key(3)}


def _derivatives(program, parameters: Parameters, objective) -> tuple[np.ndarray, str, Any]:
    """Derivatives by parameter, in rows: of all samples, then without each group; the estimator;
    and the seconds of CPU time of the value, and of value and derivatives.
    """
    start = time.process_time()
    found = figure(program, objective, **_sampled())
    middle = time.process_time()
    jax.block_until_ready(figure_gradient(found))
    seconds = middle - start, time.process_time() - start
    gradients, _ = figure_gradients(found)
    number = len(gradients.latencies.mean)
    each = (jax.tree.map(lambda x, i=i: x[i], gradients) for i in range(number))
    rows = np.array([*map(parameters.relative, each)])
    return rows, _coverage.name_of(objective, found), seconds


def _central_differences(program, parameters: Parameters, by, objectives) -> np.ndarray:
    """Central differences by row, as in `_derivatives`, objective and parameter, with common random
    numbers.
    """

    def figures(i, by):
        simulated = simulated_steps(parameters.changed(i, by), **_sampled())
        each = (figure_of(simulated, objective) for objective in objectives)
        found = stacked(*map(figure_value, each))
        return np.concatenate([found.values[None], found.without])

    each = zip(parameters.varied, by, strict=True)
    found = [(figures(i, step) - figures(i, -step)) / (2 * step) for i, step in each]
    return np.stack(found, axis=2)


def _compared(parameters: Parameters, ours: np.ndarray, theirs: np.ndarray) -> Rows:
    """A row for each parameter: its derivative beside its central difference."""
    largest = np.abs(ours[0]).max()
    for p, i in enumerate(parameters.varied):
        gap = ours[:, p] - theirs[:, p]
        scatter, error = (float(np.sqrt(len(x) - 1) * x[1:].std(ddof=1)) for x in (gap, ours[:, p]))
        # The error of single precision and of the third derivative.
        scatter = np.hypot(scatter, 2e-4 * max(abs(theirs[0, p]), 1e-3 * largest))
        t = float(gap[0] / scatter) if scatter > 0 else 0.0
        row: Row = {"parameter": parameters.paths[i]}
        row["derivative"] = f"{ours[0, p]:.5g} +- {error:.1g}"
        row |= {"difference": f"{theirs[0, p]:.5g}", "z": float(ndtri(stdtr(len(gap) - 2, t)))}
        yield row | {"relative_error": float(error / largest) if largest else 0.0}


def _tables(rows: list[Row]) -> str:
    """In Markdown: by estimator, and of the pairs that differ most."""
    cells, of_estimator = [], by("estimator", rows)
    for name in _coverage.NAMES.values():
        if mine := of_estimator.get(name):
            z = np.array([row["z"] for row in mine])
            error = np.quantile([row["relative_error"] for row in mine], 0.9)
            figures = f"{np.abs(z).max():.1f}", f"{np.mean(np.abs(z) > 2):.0%}", f"{z.mean():+.2f}"
            cost = f"{np.median([row['cost'] for row in mine]):.1f}"
            cells.append((name, len(mine), *figures, f"{100 * error:.2f} %", cost))
    header = ("estimator", "pairs", "largest z", "share of z above 2", "mean z", "relative error")
    columns = {"program": "{program}", "parameter": "`{parameter}`", "objective": "{objective}"}
    columns |= {"derivative": "{derivative}", "central difference": "{difference}"}
    worst = sorted(rows, key=lambda row: -abs(row["z"]))[:5]
    of_worst = table_of(worst, columns | {"z": "{z:+.1f}"})
    return f"{table((*header, 'cost'), cells)}\n\nThe largest differences are:\n\n{of_worst}"


def main() -> None:
    known: Any = {"of": {"choices": _coverage.KINDS, "help": "with --coverage: only these"}}
    known["coverage"] = (int, "only that of 95 %% intervals, in so many repetitions")
    given = options(__doc__, **known)
    jax.config.update("jax_enable_x64", True)
    if given.coverage:  # On one device, which is faster for runs so short.
        print(_coverage.coverage_table(given.coverage, given.of))
        return
    use_all_cores()
    rows = []
    for name, program in programs().items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += pairs_of(name, program)
    print(_tables(rows))


if __name__ == "__main__":
    main()
