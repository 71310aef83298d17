"""The rates at which runs are interrupted: uncertain counts, bad nodes and bad weeks."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ..data import Cause, Failures, Slow
from ._cycles import Hazards
from ._weeks import WEEK


# Weeks that differ; then they come again in the same order.
_WEEKS = 52
# A shape near zero makes most factors so small that they are zero as numbers.
_LEAST_FACTOR = 1e-9


def draw_hazards(
    failures: Failures,
    devices: int,
    number: int,
    rng: np.random.Generator,
    *,
    num_spares: int | None = None,
    known_rates: bool = False,
) -> Hazards:
    """The rates of the interruptions of so many runs, each on nodes and in weeks of its own.

    The mean of `n` factors of a gamma law of the shape `a` has a gamma law of the shape `n * a`: of
    a run's nodes, and of the weeks in which the interruptions were counted, by which the counts are
    too high or too low.

    **Arguments:**

    - `failures`: the counts, and how much nodes and weeks differ.
    - `devices`: the devices of a run.
    - `number`: how many runs to draw for.
    - `num_spares`, `known_rates`: as in `training_run`.
    """
    causes = failures.causes
    drawn = draw_counts(causes, number, rng, known_rates)
    weeks = None
    if failures.nodes is not None:
        nodes = max(devices / failures.nodes.devices, 1)
        drawn = drawn * _factors(failures.nodes.shape * nodes, (number, 1), rng)
    if failures.weeks is not None:
        if not known_rates:
            counted = failures.weeks.shape * failures.weeks.counted
            drawn = drawn / _factors(counted, (number, 1), rng)
        factors = _factors(failures.weeks.shape, (number, _WEEKS), rng)
        weeks = np.pad(np.cumsum(WEEK * factors, axis=1), ((0, 0), (1, 0)))
    return Hazards(
        drawn * devices / (failures.device_hours * 3600),
        np.array([cause.detection_s for cause in causes]),
        np.array([cause.takes_node for cause in causes]),
        np.array([cause.reallocates for cause in causes]),
        np.array([cause.announced for cause in causes]),
        num_spares,
        weeks,
    )


def draw_counts(
    counted: Sequence[Cause | Slow], number: int, rng: np.random.Generator, known_rates: bool
) -> Float[np.ndarray, "runs kinds"]:
    """The expected counts given those counted, by Jeffreys' prior; or those counted themselves."""
    counts = np.array([each.count for each in counted], float)
    size = (number, len(counts))
    return np.broadcast_to(counts, size) if known_rates else rng.gamma(counts + 0.5, size=size)


def _factors(
    shape: float, size: tuple[int, int], rng: np.random.Generator
) -> Float[np.ndarray, "runs weeks"]:
    return np.maximum(rng.gamma(shape, 1 / shape, size), _LEAST_FACTOR)
