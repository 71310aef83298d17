"""Variances of the latencies of compute from their mean squares, which are equated with their
expectations (Searle, Casella and McCulloch, "Variance Components", 1992, ch. 5), with means over
present values; missing ones are `nan`.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

from ._profile import Component


# Latencies whose logarithms differ by less are equal except for rounding.
ALIKE = 1e-9
_SEEN = 3.0
# Equations of a larger condition number have no solution.
_SINGULAR = 1e8

Logs = Float[np.ndarray, "replicas stages phases microbatches steps"]
OfSteps = Float[np.ndarray, " steps"]


def mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of the present values; zero if there are none. The axes are kept."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The number of present values. The axes are kept."""
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)


def slope_of(y: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """The slope of the line of least squares of `y` over `x`, and its standard error."""
    along, off = x - x.mean(), y - y.mean()
    square = float(along @ along)
    slope = float(along @ off) / square
    residual = float(np.sum((off - slope * along) ** 2)) / (len(y) - 2)
    return slope, float(np.sqrt(residual / square))


@dataclasses.dataclass(frozen=True)
class Variance:
    """A variance with its standard error; `None` if it cannot be estimated, for the reason in
    `note`. `chance` is the standard error if the true variance were zero.
    """

    value: float | None
    error: float = 0.0
    note: str = ""
    chance: float = 0.0

    @property
    def known(self) -> float:
        """The variance; zero if it cannot be estimated or is negative."""
        return max(self.value or 0.0, 0.0)

    @property
    def by_chance(self) -> bool:
        """Whether it is within three standard errors of zero."""
        return bool(self.known <= _SEEN * self.chance)

    def component(self, name: str) -> Component:
        """The component with this name: the standard deviation, with its standard error."""
        if self.value is None:
            return Component(name, None, None, self.note)
        if max(self.known, self.error) <= ALIKE**2:
            return Component(name, None, None, "all values are equal")
        deviation = float(np.sqrt(self.known))
        # Near zero, the error of the deviation is the root of the error of the variance.
        error = self.error / (2 * max(deviation, np.sqrt(self.error)))
        if self.by_chance:  # Then the deviation is within three standard errors of zero, too.
            error = max(error, deviation / _SEEN)
        return Component(name, deviation, float(error), self.note)


def within(logs: Logs, slopes: np.ndarray) -> tuple[Variance, Variance]:
    """The variances of the residual and of a worker in one step, from the rest after steps, the
    means of each worker and phase, and the data of microbatches.

    **Arguments:**

    - `logs`: logarithms without the means of workers and steps.
    - `slopes`: their slopes over the data of their microbatches. The part along the slopes is not
        used.
    """
    steps, number = logs.shape[4], count(logs, (1, 2))
    there = ~np.isnan(logs) & (number > 1)
    if not there.any():
        unknown = Variance(None, note="a microbatch has one op, so they cannot be separated")
        return unknown, unknown
    # The unit vector of the data, and the part at right angles to it.
    unit = np.where(there, slopes, 0)
    unit = unit / np.maximum(np.sqrt(np.sum(unit**2, axis=(1, 2), keepdims=True)), 1e-300)
    filled = np.where(there, logs, 0)
    deviations = filled - unit * np.sum(unit * filled, axis=(1, 2), keepdims=True)
    cells = np.sum(there, axis=(2, 3))
    means = np.sum(deviations, axis=(2, 3)) / np.maximum(cells, 1)
    total, ops = float(np.sum(deviations**2)), max(float(np.sum(there)), 1.0)
    op_df = max(float(np.sum(np.maximum(number - 1, 0))), 1.0)
    # The means over the steps, of workers and of their phases, were subtracted before.
    phases = np.count_nonzero(there.any(axis=(3, 4))) - np.count_nonzero(there.any(axis=(2, 3, 4)))
    total *= op_df / max(op_df - phases, 1.0) / ops
    between = float(np.sum(means**2)) / max(np.sum(cells > 0), 1)
    if steps > 1:
        total, between = total + between / (steps - 1), between * steps / (steps - 1)
    expected = _expected_squares(there, unit, cells)
    if np.linalg.cond(expected) < _SINGULAR:
        worker_own, own = np.linalg.solve(expected, [between, total])
        df = max(float(np.sum(cells > 0)) * expected[0, 0] - logs.shape[0] * logs.shape[1], 1.0)
        scatter = np.sqrt(2 / df) / expected[0, 0]
        chance = max(own, 0.0) * expected[0, 1] * scatter
        worker_step = Variance(worker_own, between * scatter, chance=chance)
        if worker_step.by_chance:
            worker_step = Variance(min(worker_own, 0.0), between * scatter)
    else:
        own = total / expected[1, 1]
        note = "a worker's step cannot be separated from its replica's or from the residual"
        worker_step = Variance(None, note=note)
    return Variance(own, own * np.sqrt(2 / op_df)), worker_step


def between_microbatches(logs: Logs, residual: Variance) -> Variance:
    """The variance of microbatches that have no factor of data: zero, unless it cannot be separated
    from the residual. Its error is that of means over their ops in a replica and a step, which
    share everything else.
    """
    note = "" if residual.value is not None else "with the residual of its op"
    ops, means = count(logs, (1, 2)), np.where(count(logs, (1, 2)) > 0, mean(logs, (1, 2)), np.nan)
    number = count(means, (3,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return Variance(None, note=note or "one microbatch in a step")
    spread = np.where(number > 1, means - mean(means, (3,)), np.nan)
    square = float(np.nansum(spread**2)) / df
    own_variance = residual.known * float(np.mean(1 / ops[ops > 0]))
    value = 0.0 if residual.value is not None else square - own_variance
    return Variance(value, square * np.sqrt(2 / df), note, own_variance * np.sqrt(2 / df))


def _expected_squares(there: np.ndarray, unit: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The weights of the variances of a worker's step and of the residual, in the mean square of
    workers and in that of ops, both at right angles to the data of their microbatches.

    **Arguments:**

    - `there`, `unit`: which ops are present, and the unit vector of the data of each microbatch.
    - `cells`: `(replicas, stages, steps)`, how many ops a worker has in a step.
    """
    stages = unit.sum(axis=2)
    # The share of another stage (third axis) in the means of a worker's stage (second axis).
    parts = np.einsum("dsmt,dkmt->dskt", stages, stages) / np.maximum(cells, 1)[:, :, None]
    kept = np.eye(parts.shape[1])[None, :, :, None] * (cells > 0)[:, :, None] - parts
    workers, ops = np.maximum(np.sum(cells > 0), 1), max(float(np.sum(there)), 1.0)
    own_terms = np.einsum("dsst->dst", kept) / np.maximum(cells, 1)
    of_ops = np.sum(there) - np.sum(stages**2)
    freedom = np.sum(np.maximum(np.sum(there, axis=(1, 2)) - 1, 0))
    return np.array(
        [[np.sum(kept**2) / workers, np.sum(own_terms) / workers], [of_ops / ops, freedom / ops]]
    )


def between_workers(
    number: np.ndarray, effects: np.ndarray, loadings: np.ndarray, noise: float, data: float
) -> Variance:
    """The variance of persistent differences between the workers of a stage.

    Differences between replicas along the loadings may come from their data. So they are estimated
    separately, with less weight if data spread them.

    **Arguments:**

    - `number`, `effects`: `(replicas, stages, phases, 1, 1)`, how many ops a worker has in a phase,
        and the logarithms of their means.
    - `loadings`: `(stages, phases)`, their loadings on the data.
    - `noise`, `data`: the variances of an op, and of the data of a replica.
    """
    cells = np.sum(number, axis=2)[:, :, 0, 0]
    there = cells > 0
    worker = np.sum(effects * number, axis=2)[:, :, 0, 0] / np.maximum(cells, 1)
    by_stage = mean(np.where(number[:1] > 0, loadings[None, :, :, None, None], np.nan), (2,))
    noise *= float(np.mean(1 / cells[there]))
    replicas = np.sum(there, axis=0)
    df = float(np.sum(np.maximum(replicas - 1, 0)))
    if df == 0:
        return Variance(None, note="one replica: workers of a stage cannot be compared")
    used = there & (replicas > 1)
    centre = np.sum(np.where(there, worker, 0), axis=0) / np.maximum(replicas, 1)
    rows = np.where(used, worker - centre, 0)
    unit = np.where(used, by_stage.reshape(-1), 0)
    length = np.maximum(np.sqrt(np.sum(unit**2, axis=1)), 1e-300)
    along = np.sum(rows * unit, axis=1) / length
    along_df = df / max(np.sum(used) / max(np.sum(used.any(axis=1)), 1), 1)
    spread = data * float(np.sum(length**2) / max(np.sum(length > 0), 1))
    squares = np.sum(along**2), np.sum(rows**2) - np.sum(along**2)
    dfs = along_df, df - along_df
    noises = noise + spread, noise
    pairs = [(s / d, d, n) for s, d, n in zip(squares, dfs, noises, strict=True) if d > 0.5]
    # A rough value first, for the weights.
    rough = max(min(square - own for square, _, own in pairs), 0.0)
    weights = np.array([d / (rough + own + ALIKE**2) ** 2 for _, d, own in pairs])
    values = np.array([square - own for square, _, own in pairs])
    value = float(np.sum(weights * values) / np.sum(weights))
    information = [d / (max(value, 0) + own + ALIKE**2) ** 2 for _, d, own in pairs]
    error = float(np.sqrt(2 / np.sum(information)))
    note = f"from {int(np.sum(there))} workers" if df < 30 else ""
    return Variance(value, error, note)
