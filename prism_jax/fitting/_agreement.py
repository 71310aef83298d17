"""How well a calibrated job agrees with the runs it was calibrated to."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from ..data import Job
from ..engine import simulate
from ..program import Program, compile_job
from ._observe import core_spread


LEVELS = (np.arange(2000) + 0.5) / 2000


def agreement(
    job: Job, runs: Sequence[Float[np.ndarray, " steps"]], *, num_samples: int = 32768
) -> dict[str, tuple[float, float]]:
    """Figures of the steps of one run, by a calibrated job and as measured (the median of the
    runs' figures). The GPUs of a run stay the same, so they make its level, not its spread.

    **Returns:**

    `p50_s`, `p95 / p50` and `core_spread`, a pair each.
    """
    program, key = compile_job(job), jax.random.key(1)
    level, spread = (
        simulate(p, num_samples=num_samples, key=key) for p in (program, of_one_run(program))
    )
    steps = np.asarray(spread.quantile(LEVELS))
    measured = [(np.median(run), np.quantile(run, 0.95), core_spread(run)) for run in runs]
    p50, core = (float(np.median(x)) for x in np.transpose(measured)[[0, 2]])
    ratio = float(spread.quantile(0.95) / spread.quantile(0.5))
    return {
        "p50_s": (float(level.quantile(0.5)), p50),
        "p95 / p50": (ratio, float(np.median([b / a for a, b, _ in measured]))),
        "core_spread": (core_spread(steps), core),
    }


def of_one_run(program: Program) -> Program:
    """The program without what GPUs differ by for good: it makes a run's level, not its spread."""
    variability = dataclasses.replace(program.variability, rank=None)
    return dataclasses.replace(program, variability=variability)
