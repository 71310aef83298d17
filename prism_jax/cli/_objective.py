"""The figure of the step time that a command is about."""

import argparse
import re
from typing import Any


def objective(text: str) -> Any:
    """`mean`, `std`, `p95`, `cvar95`, or `over1.7` for the probability of more than 1.7 s."""
    found = re.fullmatch(r"(mean|std|p|cvar|over)([\d.]*(?:e-?\d+)?)", text.strip().lower())
    try:
        number = float(found[2]) if found and found[2] else None
        name = found[1] if found else ""
        if (name in ("mean", "std")) != (number is None):
            raise ValueError
    except ValueError:
        name, number = "", None
    from ..analysis import CVaR, Exceedance, Mean, Quantile, Std

    try:
        if name == "mean":
            return Mean()
        if name == "std":
            return Std()
        if name and number is not None:
            return Exceedance(number) if name == "over" else _tail(name, number, Quantile, CVaR)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(
        f"`{text}` must be mean, std, p95, p99.9, cvar95, or over1.7 (the probability of more than "
        "1.7 s)"
    )


def _tail(name: str, percent: float, quantile: Any, cvar: Any) -> Any:
    return (quantile if name == "p" else cvar)(percent / 100)


def add_objective_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        default="p95",
        metavar="FIGURE",
        help="mean, std, p95, cvar95, or over1.7 for the probability of more than 1.7 s (p95)",
    )
