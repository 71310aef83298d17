"""Solving for one number."""

from collections.abc import Callable


def bisect(too_high: Callable[[float], bool], low: float, high: float, rounds: int) -> float:
    """The number from `low` to `high` beyond which `too_high` holds, after so many halvings."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (low, middle) if too_high(middle) else (middle, high)
    return (low + high) / 2
