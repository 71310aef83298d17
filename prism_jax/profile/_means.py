"""Means over present values; missing values are `nan`."""

import numpy as np


def mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of the present values; zero if there are none. The axes are kept."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The number of present values. The axes are kept."""
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)
