"""Composing steps of what decides them, on the devices."""

from ._accumulate import Accumulator
from ._decide import STEP_TILES, Decision
from ._plan import Plan
from ._random import KeyData
from ._step import Over, steps_of
from ._tiles import map_tiles, untile


def compose(
    plan: Plan,
    decision: Decision,
    key: KeyData,
    num_steps: int,
    grid: tuple[float, float],
    advance=lambda count: None,
) -> tuple[Accumulator, bool]:
    """Composes steps of what decides them, and says whether all: Ctrl-C ends it early."""
    accumulator = Accumulator(grid)

    def keep(steps):
        accumulator.add(steps)
        advance(len(steps))

    return accumulator, run_steps(plan, decision, key, num_steps, keep)


def run_steps(
    plan: Plan, decision: Decision, key: KeyData, num_steps: int, keep, over: Over | None = None
) -> bool:
    """Composes steps and gives them to `keep`, a batch at a time, in order: their times, or the
    probabilities that they are over a threshold. See `map_tiles`.
    """
    return map_tiles(
        _step_tile,
        (plan, key, over),
        num_steps,
        lambda start, count, result: keep(untile(result)),
        decision.inputs,
        first=decision.kept.first,
        tiles=STEP_TILES,
    )


def _step_tile(shared, ids, ends, regimes):
    plan, key, over = shared
    return steps_of(plan, ends.T, ids, key, regimes, over)
