"""The tail at another scale from few steps of a run: the calibrated law and the run's own."""

import dataclasses
import pathlib

import numpy as np

from prism_jax.calibration._most_likely import Split, alone, most_likely_noise
from prism_jax.calibration._observe import law_of_outliers, observe, spread_of

from ._families import families
from ._priors import linearised, priors_without, splits_of
from ._tables import table


_NUMBERS = (20, 40, 60, 120, 100_000)
_STRETCHES = 12
_SAMPLES = 8192


def short_table(folder: pathlib.Path) -> str:
    """Mean absolute errors of p95/p50 by number of consecutive steps of one run, in Markdown. Each
    pair of the smallest system of a family with another system has equal weight. Variances of steps
    and of kernels are added, which is nearly right. Stretches that `calibrate` refuses are left
    out. The prior of the noise of collectives is from families of other machines.
    """
    every = families(folder)
    splits, near = splits_of(every), linearised(every)
    errors: dict[int, list[tuple[float, float]]] = {number: [] for number in _NUMBERS}
    for family, systems in every.items():
        priors = priors_without(near, splits, family)
        for system, other in zip(systems[1:], splits[family][1:], strict=True):
            measured = float(np.median([_tail(run) for run in system.runs]))
            for number, mine in errors.items():
                scales = (splits[family][0], other)
                mine.append(_pair(systems[0].runs, scales, priors, number, measured))
    cells = [(number, *(f"{x:.5f}" for x in np.mean(e, axis=0))) for number, e in errors.items()]
    cells[-1] = ("all of a run", *cells[-1][1:])
    return table(("steps", "calibrated p95/p50 off by", "carried over p95/p50 off by"), cells)


def _pair(runs, scales, priors, number: int, measured: float) -> tuple[float, float]:
    """The mean errors of the calibrated law and of the run's own."""
    rng, found = np.random.default_rng(0), []
    for i in range(_STRETCHES):
        run = runs[i % len(runs)]
        first = rng.integers(0, max(len(run) - number, 0) + 1)
        steps = run[first : first + number]
        try:
            observed = observe([steps])
        except ValueError:  # Refused, because slow steps come together and fill such a stretch.
            continue
        spread = spread_of(observed, priors)
        law = law_of_outliers([observed], spread, priors)
        law = dataclasses.replace(law, sigma=_elsewhere(observed, spread, scales, priors))
        ours = _tail(law.factors(_SAMPLES))
        found.append((abs(ours - measured), abs(_tail(steps) - measured)))
    ours, carried = np.mean(found, axis=0)
    return float(ours), float(carried)


def _elsewhere(observed, spread: float, scales: tuple[Split, Split], priors) -> float:
    """The spread of the core at the other scale."""
    here = dataclasses.replace(
        scales[0], alone=alone(observed, spread, priors), num_steps=observed.num_steps
    )
    noise = most_likely_noise([here], priors)
    assert noise is not None
    now, then = (one.kernels + one.collectives * noise**2 for one in scales)
    less = min(1.0, spread**2 / now)  # As in `calibrate`, which makes kernels less noisy.
    return float(np.sqrt(spread**2 - less * now + less * then))


def _tail(steps: np.ndarray) -> float:
    return float(np.quantile(steps, 0.95) / np.median(steps))
