"""Checks the arguments of a training run, with errors of one sentence."""

import dataclasses
import math

import numpy as np

from .._misc import whole_number
from ..data import Failures
from ._cycles import RunCosts
from ._rates import WEEK, Hazards
from ._run_law import expected_seconds, waiting_share


# More interruptions than any run survives in practice; each takes a pass over all runs.
_MOST_INTERRUPTIONS = 1e5
# Each takes some hundred bytes of each run.
_MOST_SLOW = 20_000
# When each comes back is held for every run.
_MOST_SPARES = 4096
# Of longer tails, no sample has the mean.
_MOST_POWER = 5
# The chance of what no simulated run will meet.
_RARE = 1e-9


def check_numbers(num_steps, num_runs, num_spares, level, drift, autocorrelation_time) -> None:
    whole_number(num_steps, "num_steps")
    whole_number(num_runs, "num_runs", 2)
    if num_spares is not None:
        whole_number(num_spares, "num_spares", 0, _MOST_SPARES)
    for name, value, least in (("level", level, 0), ("drift", drift, -1)):
        if not least <= value <= 1:
            raise ValueError(
                f"`{name}={value}` must be a share from {least} to 1; give 0 for runs that do not "
                "differ in it."
            )
    if not 1 <= autocorrelation_time < math.inf:
        raise ValueError(
            f"`autocorrelation_time={autocorrelation_time}` must be finite and at least 1; give 1 "
            "for independent steps."
        )


def check_failures(failures: Failures, costs: RunCosts | None, find_slow_s: float | None) -> None:
    if not failures.causes:
        raise ValueError("`failures` has no cause; give at least one, whose count may be 0.")
    weeks = failures.weeks
    if weeks is not None and weeks.shape * weeks.counted <= 1:
        raise ValueError(
            f"`failures.weeks` has `shape` = {weeks.shape:g} and `counted` = {weeks.counted:g}, so "
            "that nothing is known of an average week; give a product above 1, or leave `weeks` "
            "out."
        )
    if costs is None and failures.blocking_s == 0:
        raise ValueError(
            "No interval between checkpoints is the best where one costs nothing "
            "(`failures.blocking_s` = 0); give an interval."
        )
    if find_slow_s is not None and not (failures.slow and 0 <= find_slow_s < math.inf):
        raise ValueError(
            f"`find_slow_s={find_slow_s}` must be finite, not negative, and `failures` must have "
            "`slow` events to find; give both, or leave `find_slow_s` out."
        )


def check_costs(costs: RunCosts) -> None:
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`costs.{field.name}={value}` must be finite and not negative.")
    if costs.repair_power > _MOST_POWER:
        raise ValueError(
            f"`costs.repair_power={costs.repair_power}` must be at most {_MOST_POWER}; give 0 for "
            "repairs of one length."
        )
    if not costs.interval_s > costs.blocking_s:
        raise ValueError(
            f"A checkpoint holds up the job for {costs.blocking_s:g} s, but there are only "
            f"{costs.interval_s:g} s of work between two; give a longer interval."
        )


def check_slow(work: float, failures: Failures, rates: np.ndarray) -> None:
    """Refuses slow events that are as many as no run has; each is held of each run."""
    most = work * max(kind.slowdown for kind in failures.slow) * rates.sum(axis=1).max()
    if most > _MOST_SLOW:
        raise ValueError(
            f"`failures.slow` has up to {most:.3g} events in a run, more than {_MOST_SLOW:,}; give "
            "fewer events or steps, or leave out those that are part of the law of a step."
        )


def never_waits(hazards: Hazards, repair_s: float) -> bool:
    """Whether no more nodes than the spares will be in repair, in the worst week of any run."""
    worst = 1.0 if hazards.weeks is None else np.diff(hazards.weeks, axis=1).max() / WEEK
    taken = float((hazards.rates @ hazards.takes_node).max())
    spares = hazards.num_spares
    return spares is None or waiting_share(worst * taken, repair_s, spares) <= _RARE


def check_ends(work: float, costs: RunCosts, hazards: Hazards, slowness: float = 1.0) -> None:
    """Refuses interruptions that some run would not survive, by the rates that runs have drawn.
    Slow events make the work of a run longer by at most the factor `slowness`.
    """
    rates = hazards.rates[hazards.rates.sum(axis=1).argmax()]
    downs = (costs.restart_s + hazards.detection_s).tolist()
    pairs = list(zip(rates.tolist(), downs, strict=True))
    work, interval = work * slowness, costs.interval_s * slowness
    interval = min(interval + costs.background_s, work)
    announced = float(rates @ hazards.announced)
    seconds = expected_seconds(work, interval, costs.blocking_s, pairs, announced)
    if seconds * rates.sum() > _MOST_INTERRUPTIONS:
        raise ValueError(
            f"An interruption comes every {1 / rates.sum():.4g} s, more than "
            f"{_MOST_INTERRUPTIONS:,.0f} times in the run; save checkpoints more often than every "
            f"{costs.interval_s:.4g} s, restart faster than in {max(downs):.4g} s, or train for "
            "fewer steps."
        )
    if never_waits(hazards, min(costs.repair_s, seconds)):
        return
    # A wait lengthens a run, so more nodes fail while it lasts.
    taken = float((hazards.rates @ hazards.takes_node).max())
    spares = hazards.num_spares or 0
    works = 1 - waiting_share(taken, costs.repair_s, spares)
    if seconds * rates.sum() > _MOST_INTERRUPTIONS * works:
        raise ValueError(
            f"With `num_spares={spares}` and repairs of {costs.repair_s:.4g} s, a run that "
            f"waits for a spare is interrupted more than {_MOST_INTERRUPTIONS:,.0f} times; give "
            "more spares or shorter repairs."
        )
