"""What is looked at in measured step times: level, spread, slow steps, and the trend."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln

from .._robust import in_core, typical


FEWEST = 12  # Steps whose spread and trend are looked at.


@dataclasses.dataclass(frozen=True)
class Series:
    """**Attributes:**

    - `number`, `level`: the number of all steps, and their median in seconds.
    - `steps`: the steps of runs of `FEWEST` or more, without the trend, in seconds. Of shorter runs
        only the median is used.
    - `trend`, `trend_error`: the logarithm of the last of these steps over the first, and its
        standard error, in which steps that resemble the next count less.
    """

    number: int
    level: float
    steps: Float[np.ndarray, " steps"]
    trend: float = 0.0
    trend_error: float = 0.0


def series_of(runs: Sequence[Float[np.ndarray, "_"]]) -> Series:
    """The figures of the steps of some runs, each in the order of its steps."""
    level = float(np.median([np.median(run) for run in runs]))
    number, long = sum(map(len, runs)), [run for run in runs if len(run) >= FEWEST]
    if not long:
        return Series(number, level, np.zeros(0))
    slopes, errors, flat = [], [], []
    for run in long:
        logs = np.log(run / np.median(run))
        place = np.linspace(-0.5, 0.5, len(run))
        first, last = logs[place < -1 / 6], logs[place > 1 / 6]
        slope = 1.5 * float(np.median(last) - np.median(first))
        rest = logs - slope * place
        core = np.where(in_core(rest), rest - np.median(rest), 0)
        alike = np.clip(np.sum(core[1:] * core[:-1]) / max(np.sum(core**2), 1e-300), 0, 0.95)
        spread = 1.25 * np.sqrt(6 / len(run) * (1 + alike) / (1 - alike))
        slopes.append(slope)
        errors.append(1.5 * spread * float(typical(rest, (0,))[1][0]))
        flat.append(level * np.exp(rest))
    error = float(np.hypot.reduce(errors)) / len(long)
    return Series(number, level, np.concatenate(flat), float(np.mean(slopes)), error)


def shape_of(steps: Float[np.ndarray, "draws steps"]) -> Float[np.ndarray, "draws 2"]:
    """Of each row, the logarithms of the spread of the core, and of what slow outliers add to the
    mean over this spread.
    """
    relative = steps / np.median(steps, axis=1, keepdims=True) - 1
    limit = 5 * np.maximum(typical(relative, (1,))[1], 1e-6)
    core = np.abs(relative) <= limit
    spread = np.sqrt(np.sum(relative**2 * core, axis=1) / core.sum(axis=1)) + 1e-6
    slow = np.mean(relative * (relative > limit), axis=1)
    return np.log(np.stack([spread, slow / spread + 0.0025], axis=1))


def student(z, degrees: float):
    """The density of Student's law, or of the normal law for infinite degrees."""
    if np.isinf(degrees):
        return np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    scale = np.exp(gammaln((degrees + 1) / 2) - gammaln(degrees / 2)) / np.sqrt(np.pi * degrees)
    return scale * (1 + z**2 / degrees) ** (-(degrees + 1) / 2)
