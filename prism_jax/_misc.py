"""Small helpers without a better home."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np


T = TypeVar("T")


def subclasses(cls: type[T]) -> Iterator[type[T]]:
    """All classes below one, in the order in which they were defined; of other packages too."""
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """One sentence for a name that is not known: the near ones first, then all."""
    known = sorted({*known})
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else "."
    return f"No {what} `{name}`{hint} Known: {', '.join(known) or 'none'}."


def counted(number: int, what: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def bisect(
    is_low: Callable[[float], bool], low: float, high: float, num_halvings: int
) -> tuple[float, float]:
    """The two ends of where `is_low` turns from true to false, after so many halvings."""
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


class FrozenArray:
    """A read-only NumPy array that hashes and compares by its content, for static fields.

    Raw arrays as static fields make the comparison of two pytrees fail, and integer leaves make
    `jax.grad` fail; this is neither.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: np.ndarray):
        value = np.array(value, copy=True)
        value.setflags(write=False)
        self.value = value
        self._hash = hash((value.shape, value.dtype.str, value.tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, FrozenArray)
            and self._hash == other._hash
            and self.value.dtype == other.value.dtype
            and np.array_equal(self.value, other.value)
        )

    def __repr__(self) -> str:
        return f"FrozenArray(shape={self.value.shape}, dtype={self.value.dtype})"
