import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency, ParameterRule, as_parameters
from ._scores import log_density


# Scores at the two ends of a table.
_REACH = 6.0


def _slopes(table: Array) -> Array:
    """Slopes at the nodes per node spacing, limited so that the cubic is monotone."""
    # F. N. Fritsch and R. E. Carlson, "Monotone piecewise cubic interpolation", 1980.
    secant = table[..., 1:] - table[..., :-1]
    before, right = secant[..., :-1], secant[..., 1:]
    centre = 0.5 * (before + right)
    if table.shape[-1] > 4:
        # Fourth order, where there are two neighbours on each side.
        fine = (7.0 * (before + right)[..., 1:-1] - secant[..., :-3] - secant[..., 3:]) / 12.0
        centre = jnp.concatenate([centre[..., :1], fine, centre[..., -1:]], axis=-1)
    first = 1.5 * secant[..., :1] - 0.5 * secant[..., 1:2]
    last = 1.5 * secant[..., -1:] - 0.5 * secant[..., -2:-1]
    slope = jnp.concatenate([first, centre, last], axis=-1)
    limit = jnp.concatenate(
        [secant[..., :1], jnp.minimum(before, right), secant[..., -1:]], axis=-1
    )
    return jnp.maximum(jnp.minimum(slope, 3.0 * limit), 0.0)


def _take(values: Array, cell: Array) -> Array:
    """Entry `cell` of the trailing axis of `values`, whose other axes broadcast with `cell`."""
    if values.ndim == 1:
        return values[cell]
    if cell.ndim == 0:
        return jnp.take(values, cell, axis=-1)
    return jnp.take_along_axis(values, cell[..., None], axis=-1)[..., 0]


def _cubic(table: Array, cell: Array) -> tuple[Array, Array, Array, Array]:
    """The coefficients, constant first, of the cubic of each cell on [0, 1]."""
    slopes = _slopes(table)
    x0, x1 = _take(table, cell), _take(table, cell + 1)
    d0, d1 = _take(slopes, cell), _take(slopes, cell + 1)
    rise = x1 - x0
    return x0, d0, 3.0 * rise - 2.0 * d0 - d1, d0 + d1 - 2.0 * rise


def _evaluate(table: Array, z: Array) -> Array:
    cells = table.shape[-1] - 1
    position = (jnp.clip(z, -_REACH, _REACH) + _REACH) * (cells / (2.0 * _REACH))
    cell = jnp.clip(jnp.floor(position), 0, cells - 1)
    t = position - cell
    c0, c1, c2, c3 = _cubic(table, cell.astype(jnp.int32))
    return c0 + t * (c1 + t * (c2 + t * c3))


def _count(table: Array, x: Array) -> Array:
    """How many nodes are at most `x`."""
    ranks = jnp.vectorize(
        lambda row, value: jnp.searchsorted(row, value, side="right"), signature="(n),()->()"
    )
    if table.ndim > 1 and x.ndim == 0:
        x = jnp.broadcast_to(x, (1,) * (table.ndim - 1))
    if table.ndim == 1:
        return jnp.searchsorted(table, x, side="right")
    return ranks(table, x)


@jax.custom_jvp
def _invert(table: Array, x: Array) -> Array:
    cells = table.shape[-1] - 1
    cell = jnp.clip(_count(table, x) - 1, 0, cells - 1).astype(jnp.int32)
    c0, c1, c2, c3 = _cubic(table, cell)

    # Newton's method inside a bracket; bisection alone would take as many steps as there are bits.
    def advance(_, state):
        low, high, t = state
        error = c0 + t * (c1 + t * (c2 + t * c3)) - x
        slope = c1 + t * (2.0 * c2 + 3.0 * t * c3)
        low, high = jnp.where(error < 0, t, low), jnp.where(error < 0, high, t)
        newton = t - error / jnp.where(slope > 0, slope, 1.0)
        keep = (slope > 0) & (newton > low) & (newton < high)
        return low, high, jnp.where(keep, newton, 0.5 * (low + high))

    low = jnp.zeros_like(c0 + x)
    steps = 60 if jnp.finfo(x.dtype).bits == 64 else 30
    *_, t = jax.lax.fori_loop(0, steps, advance, (low, low + 1.0, low + 0.5))
    return (cell.astype(x.dtype) + t) * (2.0 * _REACH / cells) - _REACH


@_invert.defjvp
def _(primals, tangents):
    table, x = primals
    z = _invert(table, x)
    moved = jax.jvp(lambda table: _evaluate(table, z), primals[:1], tangents[:1])[1]
    slope = jax.jvp(lambda z: _evaluate(table, z), (z,), (jnp.ones_like(z),))[1]
    rising = slope > 0
    return z, jnp.where(rising, (tangents[1] - moved) / jnp.where(rising, slope, 1.0), 0.0)


class Empirical(AbstractLatency):
    r"""A latency given by a table of its quantiles at equally spaced normal scores.

    The trailing axis of the table holds the quantiles at $q = \Phi(z)$ for equally spaced $z$ from
    -6 to 6, both included. Between the nodes, the latency is a monotone cubic of $z$; beyond them
    (2e-9 of the draws), it stays at the end of the table. The distribution function and all
    derivatives are those of the interpolated law.
    """

    table: Float[Array, "... nodes"]

    def __init__(self, table: ArrayLike | Sequence[float]):
        """**Arguments:**

        - `table`: latencies, in seconds, non-decreasing along the trailing axis, which has at least
            three nodes. The axes before it are the batch axes.
        """
        (self.table,) = as_parameters(table)

    def __check_init__(self) -> None:
        if self.table.ndim < 1 or self.table.shape[-1] < 3:
            raise ValueError(
                f"`Empirical` got a `table` of shape {self.table.shape}; its trailing axis must "
                "have at least 3 nodes."
            )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.table.shape[:-1]

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return _evaluate(self.table, jnp.asarray(z, self.dtype))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        first, last = self.table[..., 0], self.table[..., -1]
        z = _invert(self.table, jnp.clip(x, first, last))
        return jnp.where(x < first, -jnp.inf, jnp.where(x >= last, jnp.inf, z))

    def _expectation(self, function: Callable[[Array], Array]) -> Array:
        """The expectation of a function of the latency: Gauss-Legendre in each cell."""
        cells = self.table.shape[-1] - 1
        width = 2.0 * _REACH / cells
        points, weights = np.polynomial.legendre.leggauss(6 if cells >= 32 else 16)
        z = (np.arange(cells)[:, None] + 0.5 * (points + 1.0)) * width - _REACH
        z = jnp.asarray(z.reshape(-1), self.dtype)
        weights = jnp.asarray(np.tile(0.5 * width * weights, cells), self.dtype)
        weights = weights * jnp.exp(log_density(z))
        ends = ndtr(jnp.full((), -_REACH, self.dtype))
        values = function(jax.vmap(self.from_normal)(z))
        body = jnp.tensordot(weights / jnp.sum(weights), values, axes=1)
        outside = 0.5 * (function(self.table[..., 0]) + function(self.table[..., -1]))
        return body + 2.0 * ends * (outside - body)

    def mean(self) -> Float[Array, "..."]:
        return self._expectation(lambda x: x)

    def _central_moment(self, order: int) -> Float[Array, "..."]:
        mean = self.mean()
        return self._expectation(
            lambda x: (x - (mean if x.ndim == mean.ndim else mean[None])) ** order
        )

    def variance(self) -> Float[Array, "..."]:
        return self._central_moment(2)

    def third_moment(self) -> Float[Array, "..."]:
        return self._central_moment(3)

    def rules(self) -> tuple[ParameterRule, ...]:
        def rises(table: np.ndarray) -> np.ndarray:
            steps = np.diff(table, axis=-1, prepend=table[..., :1])
            return np.isfinite(table) & (steps >= 0)

        return (
            ParameterRule(
                "table", self.table, rises, "finite and non-decreasing along its last axis"
            ),
        )


def empirical_from_samples(samples: ArrayLike | Sequence[float], num_nodes: int = 129) -> Empirical:
    """The `Empirical` law of measured latencies.

    Runs on the host. Beyond the quantiles that so many samples resolve, the table stays at the
    smallest and the largest sample.

    **Arguments:**

    - `samples`: latencies, in seconds; the trailing axis holds the samples of one law.
    - `num_nodes`: the number of nodes in the table.

    **Returns:**

    An `Empirical` whose batch axes are the leading axes of `samples`.

    **Raises:**

    `ValueError` if there are no samples, a sample is not finite, or `num_nodes` is below three.
    """
    samples = np.asarray(samples)
    if samples.ndim < 1 or samples.shape[-1] < 1:
        raise ValueError(
            f"`empirical_from_samples` got samples of shape {samples.shape}; the trailing axis "
            "must have at least one."
        )
    if not np.all(np.isfinite(samples)):
        raise ValueError(
            "`empirical_from_samples` got samples that are not finite; drop them first."
        )
    if num_nodes < 3:
        raise ValueError(f"`empirical_from_samples` got `num_nodes={num_nodes}`; use at least 3.")
    scores = np.linspace(-_REACH, _REACH, num_nodes)
    levels = np.array([0.5 * math.erfc(-z / math.sqrt(2.0)) for z in scores])
    table = np.quantile(samples, levels, axis=-1, method="hazen")
    dtype = samples.dtype if np.issubdtype(samples.dtype, np.floating) else table.dtype
    return Empirical(np.moveaxis(table, 0, -1).astype(dtype))
