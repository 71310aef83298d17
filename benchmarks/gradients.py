"""Whether derivatives are right, and what they cost: against central differences.

    python benchmarks/gradients.py                  # tables in Markdown; --json for one JSON object
    python benchmarks/gradients.py --coverage 200   # how often 95 % intervals hold (slow)

A pair is a program, one of its parameters (or an array of them, changed in proportion) and an
objective. Its derivative is taken in 16 batches, and so is the central difference, with the same
random numbers; `z` is their difference over the standard error of it. `relative error` is the
standard error of a derivative, relative to the largest of the program, that nine in ten do not
exceed. `cost` is the time of value and derivatives of all parameters over that of the value.
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
NUM_BATCHES = 16
# The relative change of a central difference, unless it would move steps by a part of their spread:
# then the third derivative of a probability would count.
STEP = 0.02
MOVED = 0.05


NAMES = {
    "Mean": "mean: pathwise",
    "Std": "standard deviation: pathwise",
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


def pairs_of(name: str, program: Any) -> list[dict[str, Any]]:
    """All parameters and objectives of a program."""
    import jax

    from prism_jax.analysis import CVaR, Exceedance, Mean, Quantile, Std
    from prism_jax.analysis._batches import in_batches
    from prism_jax.analysis._estimate import figure, figure_gradient

    parameters = Parameters(program)
    _, composed, how = figure(program, Mean(), num_samples=8192, key=jax.random.key(10))
    moved = MOVED * float(np.std(composed.steps))
    slopes = parameters.relative(figure_gradient(composed, how))
    by = [min(STEP, moved / max(abs(slope), 1e-30)) for slope in slopes]
    objectives = [Mean(), Std(), Quantile(0.9), CVaR(0.9)]
    objectives.append(Exceedance(float(np.quantile(composed.steps, 0.9))))
    seconds = {"value": 0.0, "both": 0.0}
    ways: dict[str, str] = {}

    def gradients(count, key):
        found = []
        for objective in objectives:
            start = time.perf_counter()
            _, composed, how = figure(program, objective, num_samples=count, key=key)
            middle = time.perf_counter()
            gradient = jax.block_until_ready(figure_gradient(composed, how))
            end = time.perf_counter()
            seconds["value"] += middle - start
            seconds["both"] += end - start
            ways[type(objective).__name__] = composed.over.last if composed.over else ""
            found.append(parameters.relative(gradient))
        return np.array(found)

    def differences(count, key):
        return central_differences(program, parameters, by, objectives, count, key)

    options: dict[str, Any] = {"num_samples": NUM_SAMPLES, "num_batches": NUM_BATCHES}
    gradients(NUM_SAMPLES // NUM_BATCHES, jax.random.key(2))  # Compiles.
    seconds = dict.fromkeys(seconds, 0.0)
    ours = in_batches(gradients, key=jax.random.key(3), **options)
    theirs = in_batches(differences, key=jax.random.key(3), **options)
    shared = {"program": name, "cost": seconds["both"] / seconds["value"]}
    return [
        {**shared, "conditional_on": ways[row["objective"]], **row}
        for row in compared(parameters, objectives, ours, theirs)
    ]


def central_differences(program, parameters: Parameters, by, objectives, count, key) -> np.ndarray:
    """Of each objective and parameter, with the same random numbers."""
    from prism_jax.analysis._estimate import figure
    from prism_jax.engine import composed_steps

    options: dict[str, Any] = {"num_samples": count, "key": key}
    options["like"] = composed_steps(program, **options)
    found = []
    for i, step in zip(parameters.varied, by, strict=True):
        up, down = (
            [figure(parameters.changed(i, b), o, **options)[0] for o in objectives]
            for b in (step, -step)
        )
        found.append(np.subtract(up, down) / (2 * step))
    return np.array(found).T


def compared(parameters: Parameters, objectives, ours, theirs) -> Iterator[dict[str, Any]]:
    """What was found of each objective and parameter, derivatives beside differences."""
    gap = ours.of_batches - theirs.of_batches
    for o, objective in enumerate(objectives):
        largest = np.abs(ours.value[o]).max()
        for p, i in enumerate(parameters.varied):
            mean, scatter = gap[:, o, p].mean(), gap[:, o, p].std(ddof=1) / np.sqrt(NUM_BATCHES)
            # What single precision and the third derivative leave.
            scatter = np.hypot(scatter, 2e-4 * max(abs(theirs.value[o, p]), 1e-3 * largest))
            error = float(ours.standard_error[o, p])
            yield {
                "parameter": parameters.paths[i],
                "objective": type(objective).__name__,
                "derivative": float(ours.value[o, p]),
                "difference": float(theirs.value[o, p]),
                "standard_error": error,
                "z": float(mean / scatter) if scatter > 0 else 0.0,
                "relative_error": float(error / largest) if largest else 0.0,
            }


def table(rows: list[dict[str, Any]]) -> str:
    """By estimator, in Markdown; then the pairs that differ most."""
    lines = ["| estimator | pairs | largest z | z above 2 | mean z | relative error | cost |"]
    lines.append("|" + "---|" * 7)
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
    lines += ["", "| largest differences | parameter | objective | derivative | difference | z |"]
    lines.append("|" + "---|" * 6)
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
        "--coverage", type=int, default=0, metavar="N", help="only how often intervals hold, of N"
    )
    arguments = parser.parse_args()

    import jax

    jax.config.update("jax_enable_x64", True)
    if arguments.coverage:
        from benchmarks import _coverage

        rows = _coverage.measure(arguments.coverage)  # So short that one device is quicker.
        text = _coverage.table(rows, arguments.coverage)
    else:
        from benchmarks._programs import programs

        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
        rows = [row for name, program in programs().items() for row in pairs_of(name, program)]
        text = table(rows)
    print(json.dumps(rows) if arguments.json else text)


if __name__ == "__main__":
    main()
