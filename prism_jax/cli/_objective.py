"""The figure of the step time that a command is about."""

import argparse
import re
from typing import Any

from .._estimate import Estimate
from .._misc import quoted


def add_objective_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        default="p95",
        metavar="FIGURE",
        help="mean, std, p95, cvar95, or over1.7: the probability of more than 1.7 s (p95)",
    )


def objective(text: str) -> Any:
    """`mean`, `std`, `p95`, `cvar95`, or `over1.7` for the probability of more than 1.7 s."""
    from ..analysis import CVaR, Exceedance, Mean, Quantile, Std

    found = re.fullmatch(r"(mean|std)|(p|cvar|over)(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    if not found:
        raise ValueError(
            f"--objective `{quoted(text)}` must be mean, std, p95, p99.9, cvar95, or over1.7 (the "
            "probability of more than 1.7 s)."
        )
    if found[1]:
        return Mean() if found[1] == "mean" else Std()
    number = float(found[3])
    if found[2] == "over":
        try:
            return Exceedance(number)
        except ValueError as error:
            raise ValueError(f"--objective `{quoted(text)}`: {error}") from None
    if not 0 < number / 100 < 1:
        raise ValueError(
            f"--objective `{quoted(text)}` must have a percentage between 0 and 100, as p95 or "
            "cvar99.9."
        )
    return (Quantile if found[2] == "p" else CVaR)(number / 100)


def with_unit(figure: Estimate, unit: str) -> str:
    """A figure with its standard error and, unless it is a probability, its unit."""
    return f"{figure}" if unit == "1" else f"{figure} {unit}"
