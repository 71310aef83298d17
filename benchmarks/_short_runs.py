"""The tail at another scale, from few steps of a run: the calibrated law beside the run's own."""

import dataclasses
import pathlib

import numpy as np

from prism_jax.data import load_priors
from prism_jax.fitting import observe
from prism_jax.fitting._step_law import law_of_outliers, spread_of

from ._families import families


_NUMBERS = (20, 40, 60, 120, 100_000)
_STRETCHES = 12
_SAMPLES = 8192


def short_table(folder: pathlib.Path) -> str:
    """Mean absolute errors of p95/p50, in Markdown: each pair of the smallest system of a family
    and another counts alike, at each number of consecutive steps of one run. The noise of kernels
    is left out: all of the spread is the step's. So are stretches that `calibrate` refuses.
    """
    errors: dict[int, list[tuple[float, float]]] = {number: [] for number in _NUMBERS}
    for systems in families(folder).values():
        for system in systems[1:]:
            measured = float(np.median([_tail(run) for run in system.runs]))
            for number, mine in errors.items():
                mine.append(_pair(systems[0].runs, number, measured))
    lines = ["| steps | p95/p50 off by | carried over |", "|---|---|---|"]
    for number, mine in errors.items():
        ours, carried = np.mean(mine, axis=0)
        name = "all of a run" if number == _NUMBERS[-1] else f"{number}"
        lines.append(f"| {name} | {ours:.5f} | {carried:.5f} |")
    return "\n".join(lines)


def _pair(runs, number: int, measured: float) -> tuple[float, float]:
    """The mean errors of the calibrated law and of the run's own."""
    rng, found, priors = np.random.default_rng(0), [], load_priors()
    for i in range(_STRETCHES):
        run = runs[i % len(runs)]
        first = rng.integers(0, max(len(run) - number, 0) + 1)
        steps = run[first : first + number]
        try:
            observed = observe([steps])
        except (
            ValueError
        ):  # Most of a run's slow steps come together, and such stretches are refused.
            continue
        spread = spread_of(observed, priors)
        law = dataclasses.replace(law_of_outliers([observed], spread, priors), sigma=spread)
        ours = _tail(law.factors(_SAMPLES))
        found.append((abs(ours - measured), abs(_tail(steps) - measured)))
    ours, carried = np.mean(found, axis=0)
    return float(ours), float(carried)


def _tail(steps: np.ndarray) -> float:
    return float(np.quantile(steps, 0.95) / np.median(steps))
