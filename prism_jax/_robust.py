"""Robust statistics: typical values and outliers, by medians."""

import numpy as np
from jaxtyping import Bool, Float


# A latency this many robust standard deviations above the median of its worker has stalled.
_STALL_DEVIATIONS = 8.0
# A step this many robust standard deviations from the median is outside of the core.
_CORE_DEVIATIONS = 5.0


def typical(
    values: Float[np.ndarray, "..."], axes: tuple[int, ...]
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """The median along some axes, which are kept, and the robust standard deviation; zeros if all
    values are `nan`.
    """
    some = ~np.isnan(values).all(axis=axes, keepdims=True)  # A median of nothing is a warning.
    centre = np.nanmedian(np.where(some, values, 0), axis=axes, keepdims=True)
    distance = np.where(some, np.abs(values - centre), 0)
    return centre, 1.4826 * np.nanmedian(distance, axis=axes, keepdims=True)


def stalled(
    values: Float[np.ndarray, "..."], axes: tuple[int, ...], least: float
) -> Bool[np.ndarray, "..."]:
    """Which values are far above the median along some axes, and above it by more than `least`."""
    centre, deviation = typical(values, axes)
    return values - centre > np.maximum(_STALL_DEVIATIONS * deviation, least)


def in_core(steps: Float[np.ndarray, " steps"]) -> Bool[np.ndarray, " steps"]:
    """Which steps are in the core: within five robust standard deviations of the median."""
    centre, deviation = typical(steps, (0,))
    return np.abs(steps - centre) <= _CORE_DEVIATIONS * deviation
