"""Types of command-line arguments: each error says what was given and what is allowed."""

import argparse


def count(text: str) -> int:
    """A whole number of at least one; `1e6` and `1_000_000` are fine too."""
    try:
        value = int(text)
    except ValueError:
        try:
            number = float(text)
            value = int(number) if number == int(number) else 0
        except (ValueError, OverflowError):
            value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` must be a whole number of at least 1")
    return value


def seed(text: str) -> int:
    """A whole number that JAX takes as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"`{text}` must be a whole number from 0 to 2^32 - 1")
    return value
