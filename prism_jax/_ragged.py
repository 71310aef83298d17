"""Rows of different lengths in two flat arrays, which is fast for graphs of many ops."""

import itertools as it
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """All values, row after row; row `i` is `values[starts[i] : starts[i + 1]]`."""

    values: np.ndarray
    starts: np.ndarray


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """The rows of a list of lists."""
    starts = _starts(np.fromiter(map(len, rows), np.int64, len(rows)))
    return Ragged(np.fromiter(it.chain.from_iterable(rows), np.int64, starts[-1]), starts)


def group(keys: np.ndarray, values: np.ndarray, num_rows: int) -> Ragged:
    """Row `i` has, in ascending order, the values whose key is `i`; all are below `num_rows`."""
    # One sort of single numbers is much faster than a sort of pairs.
    pairs = np.sort(keys * num_rows + values)
    return Ragged(pairs % max(num_rows, 1), _starts(np.bincount(keys, minlength=num_rows)))


def row_numbers(rows: Ragged) -> np.ndarray:
    """The row of each value."""
    return np.repeat(np.arange(len(rows.starts) - 1), np.diff(rows.starts))


def take(rows: Ragged, numbers: np.ndarray) -> Ragged:
    """The rows with these numbers, which may repeat."""
    starts = _starts(np.diff(rows.starts)[numbers])
    shift = np.repeat(rows.starts[numbers] - starts[:-1], np.diff(starts))
    return Ragged(rows.values[np.arange(starts[-1]) + shift], starts)


def as_matrix(rows: Ragged, fill: int) -> np.ndarray:
    """A matrix with a line for each row, padded at its end. It has at least one column."""
    lengths = np.diff(rows.starts)
    matrix = np.full((len(lengths), max(lengths.max(initial=0), 1)), fill, np.int32)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = rows.values
    return matrix


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
