"""The tail at another scale, from few steps of a run: the calibrated law beside the run's own."""

import dataclasses
import pathlib

import numpy as np

from prism_jax.data import load_priors
from prism_jax.fitting import core_spread, observe
from prism_jax.fitting._scale import steps_of_kernels
from prism_jax.fitting._step_law import law_of_outliers, spread_of

from prism_jax.program._compile import parts_of

from ._families import families


_NUMBERS = (20, 40, 60, 120, 100_000)
_STRETCHES = 12
_SAMPLES = 8192


def short_table(folder: pathlib.Path) -> str:
    """Mean absolute errors of p95/p50, in Markdown: each pair of the smallest system of a family
    and another counts alike, at each number of consecutive steps of one run.
    """
    import jax

    errors: dict[int, list[tuple[float, float]]] = {number: [] for number in _NUMBERS}
    for systems in families(folder).values():
        noise = [
            steps_of_kernels(one.job, parts_of(one.job)[-1], jax.random.key(0), _SAMPLES)
            for one in systems
        ]
        for system, there in zip(systems[1:], noise[1:], strict=True):
            measured = float(np.median([_tail(run) for run in system.runs]))
            for number, mine in errors.items():
                mine.append(_pair(systems[0].runs, noise[0], there, number, measured))
    lines = ["| steps | p95/p50 off by | carried over |", "|---|---|---|"]
    for number, mine in errors.items():
        ours, carried = np.mean(mine, axis=0)
        name = "all of a run" if number == _NUMBERS[-1] else f"{number}"
        lines.append(f"| {name} | {ours:.5f} | {carried:.5f} |")
    return "\n".join(lines)


def _pair(runs, here, there, number: int, measured: float) -> tuple[float, float]:
    """The mean errors of the calibrated law and of the run's own."""
    rng, found = np.random.default_rng(0), []
    for i in range(_STRETCHES):
        run = runs[i % len(runs)]
        first = rng.integers(0, max(len(run) - number, 0) + 1)
        steps = run[first : first + number]
        ours = _tail(_predicted(observe([steps]), here, there))
        found.append((abs(ours - measured), abs(_tail(steps) - measured)))
    return tuple(np.mean(found, axis=0))


def _predicted(observed, here, there) -> np.ndarray:
    """As `calibrate` does: what the noise of kernels leaves is the step's, or it is made less."""
    priors = load_priors()
    spread, own = spread_of(observed, priors), core_spread(here)
    law = law_of_outliers([observed], spread, priors)
    law = dataclasses.replace(law, sigma=float(np.sqrt(max(spread**2 - own**2, 0))))
    middle = np.median(there)
    return (middle + min(spread / own, 1) * (there - middle)) * law.factors(len(there))


def _tail(steps: np.ndarray) -> float:
    return float(np.quantile(steps, 0.95) / np.median(steps))
