"""Closed forms of runs that are interrupted at a constant rate."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import lambertw, pdtrc


def expected_seconds(
    work_s: float,
    interval_s: float,
    blocking_s: float,
    downs: Sequence[tuple[float, float]],
    announced: float = 0.0,
) -> float:
    """The expected time of a run that saves a checkpoint after each interval of work, in seconds.

    Each interval is done again until nothing interrupts it; restarts can be interrupted too.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", equation 13, here for several causes. With announced interruptions, which save the work
    and begin a new interval, it holds for many intervals.

    **Arguments:**

    - `work_s`, `interval_s`: the work of the run and between checkpoints.
    - `blocking_s`: of one checkpoint.
    - `downs`: for each cause, its rate per second of the whole job and the seconds that the job is
        down after it.
    - `announced`: the sum of the rates of the causes that are announced.
    """
    rate = sum(each for each, _ in downs)
    if rate == 0:
        return work_s * (1 + blocking_s / interval_s)
    again = sum(each * -math.expm1(-rate * down) for each, down in downs) / rate
    # What is saved while the job is up, over the rate: in whole intervals, and when announced.
    whole = interval_s * math.exp(-rate * (interval_s + blocking_s))
    part = -math.expm1(-rate * interval_s) / rate
    saved = float((rate - announced) * whole + announced * part)
    try:
        return work_s * -math.expm1(-rate * (interval_s + blocking_s)) / saved / (1 - again)
    except ZeroDivisionError:
        return math.inf


def waiting_share(rate: float, repair_s: float, num_spares: int) -> float:
    """The share of a long run's time in which it waits for a spare.

    A run waits while more nodes are in repair than it has spares. Nodes are taken at a constant
    rate, so their number in repair is Poisson. Source: Palm 1943, the queue M/D/infinity.

    **Arguments:**

    - `rate`: of the interruptions that take a node, per second of the whole job.
    - `repair_s`: until such a node can be used as a spare, in seconds.
    - `num_spares`: the number of spare nodes.
    """
    return float(pdtrc(num_spares, rate * repair_s))


def best_interval(rate: float, blocking_s: float) -> float:
    """The interval of work between checkpoints that makes a run shortest, in seconds.

    It does not depend on how long a restart takes. For short checkpoints it is Young's
    `sqrt(2 blocking_s / rate)`. Source: the minimum of Daly's equation 13, by Lambert's function.

    **Arguments:**

    - `rate`: of interruptions that lose work, per second of the whole job; positive.
    - `blocking_s`: of one checkpoint; positive.
    """
    # Near -1/e the function is as its root: what rounding leaves of it, perhaps no number, is no
    # shorter than Young's.
    found = np.nan_to_num(1 + lambertw(-math.exp(-1 - rate * blocking_s)).real)
    return float(max(found / rate, math.sqrt(2 * blocking_s / rate) - blocking_s))


def effective_share(rate: float, interval_s: float, blocking_s: float, down_s: float) -> float:
    """The share of a run's time in which it makes progress, to first order in the rate.

    Source: Kokolis et al. 2025 (arXiv:2410.21680), the expected effective training time ratio.
    """
    return (1 - rate * (down_s + interval_s / 2)) / (1 + blocking_s / interval_s)
