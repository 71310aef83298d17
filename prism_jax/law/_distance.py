"""Distances between laws of the step time, and between a law and measured steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .._misc import as_step_times
from ._law import Law


# The number of quantiles that stand for a law.
_NUM_QUANTILES = 4000


def wasserstein(law: Any, other: Any) -> float | Float[Array, ""]:
    """The Wasserstein-1 distance of two laws, in seconds: the mean distance by which steps of one
    must be moved to become those of the other, `integral |F(t) - G(t)| dt`.

    **Arguments:**

    - `law`, `other`: each a law from `simulate`, or samples in seconds, `(n,)`, or a data frame
        with a column `step_time_s` of them. A law counts as 4,000 of its quantiles; samples are
        exact.

    **Returns:**

    The distance; of JAX arrays an array, differentiable with respect to their entries. The
    derivative with respect to the parameters of a program is that of the objective
    [`Wasserstein`][] under `estimate`.

    **Raises:**

    `ValueError` for samples that are not a list of finite numbers.

    **Source:** the form by quantile functions, such as Villani, *Topics in Optimal Transportation*
    (2003), eq. 2.52; as a figure for simulators of training, arXiv:2405.02803.
    """
    times, other_times = _sorted(law), _sorted(other)
    first, second, weights = matched(len(times), len(other_times))
    if isinstance(times, jax.Array) or isinstance(other_times, jax.Array):
        floats = [x.dtype for x in (times, other_times) if isinstance(x, jax.Array)]
        floats = [x for x in floats if jnp.issubdtype(x, jnp.floating)]
        dtype = floats[0] if floats else jnp.zeros(()).dtype
        times, other_times, weights = (jnp.asarray(x, dtype) for x in (times, other_times, weights))
    return (weights * abs(times[first] - other_times[second])).sum()[()]


def matched(n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of `n` and of `m` ordered samples meet where one law is moved onto the other, and the
    share that moves so: two arrays of indices and one of weights.
    """
    edges = np.union1d(np.arange(n + 1) * m, np.arange(m + 1) * n)
    return edges[:-1] // m, edges[:-1] // n, np.diff(edges) / (n * m)


def _sorted(samples: Any) -> Any:
    if isinstance(samples, Law):
        return quantiles(samples)
    samples = as_step_times(samples)
    try:
        array = samples if isinstance(samples, jax.Array) else np.asarray(samples)
    except ValueError:  # Lists of different lengths.
        array = np.zeros(0)
    kinds = (np.floating, np.integer)
    numbers = any(np.issubdtype(array.dtype, kind) for kind in kinds)
    # The values of traced arrays are not known.
    finite = isinstance(array, Tracer) or (numbers and bool(np.all(np.isfinite(array))))
    if not numbers or array.ndim != 1 or not array.size or not finite:
        raise ValueError("Samples of a law must be a list of finite step times, in seconds.")
    return jnp.sort(array) if isinstance(array, jax.Array) else np.sort(array.astype(float))


def quantiles(law: Law) -> Float[np.ndarray, " quantiles"]:
    """Evenly spaced quantiles of a law, in ascending order."""
    return np.asarray(law.quantile((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES))


def crps(ordered: np.ndarray, measured: np.ndarray) -> float:
    """The mean continuous ranked probability score of a law, given as evenly spaced quantiles, at
    measured values; see `crps_of_each`.
    """
    return float(np.mean(crps_of_each(ordered, measured)))


def crps_of_each(ordered: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The continuous ranked probability score of a law, given as evenly spaced quantiles, at each
    measured value: `E|X - y| - E|X - X'| / 2`, in its unit. Smaller is better.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """
    m = len(ordered)
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, measured)
    distance = measured * (2 * below - m) + total[-1] - 2 * total[below]
    weights = 2 * np.arange(1, m + 1) - m - 1
    return distance / m - np.sum(weights * ordered) / m**2
