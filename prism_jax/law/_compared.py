"""Equality of records that hold arrays and figures that may not be known."""

import dataclasses

import numpy as np


class AbstractCompared:
    """A dataclass whose instances are equal if their fields are; to compare them never raises."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if field.compare
        )


def _same(one, other) -> bool:
    """Whether two values are equal; two errors that are not known are."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        numbers = one.dtype.kind in "iuf" and other.dtype.kind in "iuf"
        return np.array_equal(one, other, equal_nan=numbers)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(one == other or (one != one and other != other))
