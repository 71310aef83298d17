"""How accurate derivatives are, compared with central differences, and what they cost.

    python benchmarks/gradients.py                  # tables in Markdown; --json for one JSON object
    python benchmarks/gradients.py --coverage 200   # how often 95 % intervals hold (slow)

A pair is a program, one of its parameters (or an array of them, changed in proportion) and an
objective. Its derivative is compared with the central difference, with the same random numbers. The
standard error of the difference of the two is that of 16 bootstrap resamples, so over it the
difference is Student's t with 15 degrees of freedom; `z` is the normal deviate that is as
improbable. `relative error` is a standard error of a derivative relative to the largest derivative
of the program: nine in ten do not exceed it. `cost` is the CPU time of value and derivatives of all
parameters over that of the value.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

NUM_SAMPLES = 2**16
# The relative change of a central difference, unless it would move steps by a part of their spread:
# then the third derivative of a probability would count.
STEP = 0.02
MOVED = 0.05


NAMES = {
    "Mean": "mean: pathwise",
    "Std": "standard deviation: pathwise",
    "Quantilestep": "quantile: given all but the step",
    "Quantiletail": "quantile: given all but the tail",
    "Quantile": "quantile: local linear regression",
    "CVaR": "CVaR: pathwise beyond the quantile",
    "Exceedancestep": "exceedance: given all but the step",
    "Exceedancetail": "exceedance: given all but the tail",
    "Exceedance": "exceedance: density and regression",
}


class Parameters:
    """The parameters of a program, one by one."""

    def __init__(self, program: Any):
        import equinox as eqx
        import jax

        floats, self._static = eqx.partition(program, eqx.is_inexact_array)
        self.leaves, self._tree = jax.tree.flatten(floats)
        with_paths = jax.tree_util.tree_leaves_with_path(floats)
        self.paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
        self.varied = [i for i, leaf in enumerate(self.leaves) if np.any(np.asarray(leaf) != 0)]

    def changed(self, i: int, by: float) -> Any:
        """The program with a parameter multiplied by `1 + by`."""
        import equinox as eqx
        import jax

        moved = [leaf * (1 + by) if i == j else leaf for j, leaf in enumerate(self.leaves)]
        return eqx.combine(jax.tree.unflatten(self._tree, moved), self._static)

    def relative(self, gradient: Any) -> list[float]:
        """The derivative with respect to the logarithm of each that is not zero."""
        import jax

        slopes = jax.tree.leaves(gradient)
        return [float(np.sum(np.asarray(slopes[i]) * self.leaves[i])) for i in self.varied]


def pairs_of(name: str, program: Any, seed: int) -> list[dict[str, Any]]:
    """All parameters and objectives of a program."""
    import jax

    from prism_jax.analysis import MARGIN, CVaR, Exceedance, Mean, Quantile, Std
    from prism_jax.analysis._estimate import figure, figure_gradient

    parameters = Parameters(program)
    found = figure(program, Mean(), num_samples=8192, key=jax.random.key(10))
    simulated = found.simulated
    moved = MOVED * float(np.std(simulated.steps))
    slopes = parameters.relative(figure_gradient(found))
    by = [min(STEP, moved / max(abs(slope), 1e-30)) for slope in slopes]
    objectives = [Mean(), Std(), Quantile(0.9), CVaR(0.9)]
    objectives.append(Exceedance(float(np.quantile(simulated.steps, 0.9))))
    options: dict[str, Any] = {"num_samples": NUM_SAMPLES, "margin": MARGIN}
    options["key"] = jax.random.key(seed)
    for objective in objectives:  # Compiles.
        derivatives(program, parameters, objective, options)
    each = [derivatives(program, parameters, objective, options) for objective in objectives]
    ours = np.stack([found for found, *_ in each], axis=1)
    theirs = central_differences(program, parameters, by, objectives, options)
    value, both = np.sum([seconds for *_, seconds in each], axis=0)
    return [
        {
            "program": name,
            "cost": both / value,
            "conditional_on": each[o][1],
            "objective": type(objective).__name__,
            **row,
        }
        for o, objective in enumerate(objectives)
        for row in compared(parameters, ours[:, o], theirs[:, o])
    ]


def derivatives(
    program, parameters: Parameters, objective, options: dict[str, Any]
) -> tuple[np.ndarray, str, tuple[float, float]]:
    """Derivatives by parameter, in rows: of all samples, then of each resample; what the figure is
    conditional on; and the seconds of CPU time of the value, and of value and derivatives.
    """
    import jax

    from prism_jax.analysis._estimate import figure, figure_gradient, gradients

    start = time.process_time()
    found = figure(program, objective, **options)
    middle = time.process_time()
    jax.block_until_ready(figure_gradient(found))
    seconds = middle - start, time.process_time() - start
    rows = np.array([parameters.relative(gradient) for gradient in gradients(found)[0]])
    return rows, conditional_on(found), seconds


def conditional_on(found) -> str:
    """The draw that a figure's derivative leaves open; empty if there is none."""
    from prism_jax.analysis import _estimate

    return _estimate.conditional_on(found) or ""


def central_differences(
    program, parameters: Parameters, by, objectives, options: dict[str, Any]
) -> np.ndarray:
    """Central differences by row, as in `derivatives`, objective and parameter, with common random
    numbers.
    """
    from prism_jax.analysis._bootstrap import stacked
    from prism_jax.analysis._estimate import figure_of, figure_value
    from prism_jax.engine import simulated_steps

    like = simulated_steps(program, **options)

    def figures(i, by):
        simulated = simulated_steps(parameters.changed(i, by), like=like, **options)
        found = stacked(*(figure_value(figure_of(simulated, o)) for o in objectives))
        return np.concatenate([found.values[None], found.resampled])

    found = [
        (figures(i, step) - figures(i, -step)) / (2 * step)
        for i, step in zip(parameters.varied, by, strict=True)
    ]
    return np.stack(found, axis=2)


def compared(
    parameters: Parameters, ours: np.ndarray, theirs: np.ndarray
) -> Iterator[dict[str, Any]]:
    """A row for each parameter: its derivative beside its central difference."""
    from scipy.special import ndtri, stdtr

    largest = np.abs(ours[0]).max()
    for p, i in enumerate(parameters.varied):
        gap = ours[:, p] - theirs[:, p]
        derivative, difference = (float(x[0, p]) for x in (ours, theirs))
        scatter, error = (float(x[1:].std(ddof=1)) for x in (gap, ours[:, p]))
        # The error of single precision and of the third derivative.
        scatter = np.hypot(scatter, 2e-4 * max(abs(difference), 1e-3 * largest))
        t = float(gap[0] / scatter) if scatter > 0 else 0.0
        yield {
            "parameter": parameters.paths[i],
            "derivative": derivative,
            "difference": difference,
            "standard_error": error,
            "z": float(ndtri(stdtr(len(gap) - 2, t))),
            "relative_error": float(error / largest) if largest else 0.0,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Tables in Markdown: by estimator, and of the pairs that differ most."""
    header = ("estimator", "pairs", "largest z", "share of z above 2", "mean z", "relative error")
    header += ("cost",)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for key, label in NAMES.items():
        mine = [row for row in rows if row["objective"] + row["conditional_on"] == key]
        if not mine:
            continue
        z = np.array([row["z"] for row in mine])
        error = np.quantile([row["relative_error"] for row in mine], 0.9)
        cost = np.median([row["cost"] for row in mine])
        lines.append(
            f"| {label} | {len(mine)} | {np.abs(z).max():.1f} | {np.mean(np.abs(z) > 2):.0%} | "
            f"{z.mean():+.2f} | {100 * error:.2f} % | {cost:.1f} |"
        )
    worst = sorted(rows, key=lambda row: -abs(row["z"]))[:5]
    header = ("program", "parameter", "objective", "derivative", "central difference", "z")
    lines += ["", "The largest differences are:", "", "| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * len(header))
    lines += [
        f"| {r['program']} | `{r['parameter']}` | {r['objective']} | {r['derivative']:.5g} +- "
        f"{r['standard_error']:.1g} | {r['difference']:.5g} | {r['z']:+.1f} |"
        for r in worst
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Derivatives against central differences.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--coverage",
        type=int,
        default=0,
        metavar="N",
        help="print only the coverage of 95 %% intervals, in N repetitions",
    )
    parser.add_argument(
        "--of",
        choices=("estimators", "analyses", "sensitivities", "allocations"),
        help="with --coverage: only these",
    )
    parser.add_argument("--only", metavar="PROGRAM", help="one of the programs, by name")
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_enable_x64", True)
    if arguments.coverage:
        from benchmarks import _coverage

        # On one device, which is faster for runs so short.
        rows = _coverage.measure(arguments.coverage, arguments.of)
        text = _coverage.table(rows)
    else:
        from benchmarks._programs import programs

        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
        rows = []
        for name, program in programs().items():
            if arguments.only in (None, name):
                print(f"{name} ...", file=sys.stderr, flush=True)
                rows += pairs_of(name, program, arguments.seed)
        text = table(rows)
    print(json.dumps(rows) if arguments.json else text)


if __name__ == "__main__":
    main()
