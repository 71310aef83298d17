"""Means over what is there; `nan` is what is missing."""

import numpy as np


def mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of what is there; zero where nothing is. The axes stay."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """How many are there. The axes stay."""
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)
