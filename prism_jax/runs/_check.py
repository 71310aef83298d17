"""Checks the arguments of a training run, with errors of one sentence."""

import dataclasses
import math

import numpy as np

from ..data import Failures
from ._cycles import RunCosts
from ._expected import expected_seconds


# More interruptions than any run survives in practice; each takes a pass over all runs.
_MOST_INTERRUPTIONS = 1e5


def check_numbers(num_steps, num_runs, num_spares) -> None:
    for name, value, least in (
        ("num_steps", num_steps, 1),
        ("num_runs", num_runs, 2),
        ("num_spares", 0 if num_spares is None else num_spares, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}.")


def check_failures(failures: Failures, costs: RunCosts | None) -> None:
    if not failures.causes:
        raise ValueError("`failures` has no cause; give at least one, whose count may be 0.")
    if costs is None and failures.blocking_s == 0:
        raise ValueError(
            "No interval between checkpoints is the best where one costs nothing "
            "(`failures.blocking_s` = 0); give an interval."
        )


def check_costs(costs: RunCosts) -> None:
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`costs.{field.name}={value}` must be finite and not negative.")
    if not costs.interval_s > costs.blocking_s:
        raise ValueError(
            f"A checkpoint holds up the job for {costs.blocking_s:g} s, but there are only "
            f"{costs.interval_s:g} s of work between two; give a longer interval."
        )


def check_ends(work: float, costs: RunCosts, failures: Failures, rates: np.ndarray) -> None:
    downs = [costs.restart_s + cause.detection_s for cause in failures.causes]
    pairs = list(zip(rates.tolist(), downs, strict=True))
    interval = min(costs.interval_s + costs.background_s, work)
    seconds = expected_seconds(work, interval, costs.blocking_s, pairs)
    if seconds * rates.sum() > _MOST_INTERRUPTIONS:
        raise ValueError(
            f"An interruption comes every {1 / rates.sum():.4g} s, more than "
            f"{_MOST_INTERRUPTIONS:,.0f} times in the run; save checkpoints more often than every "
            f"{costs.interval_s:.4g} s, restart faster than in {max(downs):.4g} s, or train for "
            "fewer steps."
        )
