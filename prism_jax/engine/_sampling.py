"""Which way of sampling a run takes by itself."""

import dataclasses
import math

from ..law import FEWEST
from ..replica import turned
from ._draw import pilot_key
from ._pilot import Pilot, draw_pilot, importance_gain
from ._prepare import Run


def sampled(
    run: Run, num_samples: int, *, explicit: bool = False, pilot: Pilot | None = None
) -> Run:
    """The run with its way of sampling, and the leading axes that it takes: importance sampling
    where the rule of replicas reaches beyond so many plain samples, and it has more support there.

    **Arguments:**

    - `explicit`: whether all replicas of each step are simulated.
    - `pilot`: of the run, if there is one.
    """
    beyond = -math.log(0.95) / run.program.num_replicas * num_samples
    if explicit or run.program.num_replicas == 1 or beyond >= FEWEST:
        return dataclasses.replace(run, sampling="plain")
    if pilot is None or pilot.stretch.draws.sampling != "importance":
        pilot = draw_pilot(run, "importance")
    if importance_gain(pilot) <= 1:
        return dataclasses.replace(run, sampling="plain")
    return dataclasses.replace(run, sampling="importance", lead=pilot.run.lead)


def led(run: Run, num_samples: int, like: Run | None = None) -> Run:
    """The run with its way of sampling, unless it has one.

    It is that of `like`, of a program of the same graph and with the same axes, so that the same
    random numbers mean the same; but the shift along them is for a number of replicas, and another
    number needs its own.
    """
    if run.sampling:
        return run
    if like is None or like.program.num_replicas != run.program.num_replicas:
        return sampled(run, num_samples)
    lead = like.lead and turned(like.lead, run.program, run.plan, pilot_key())
    return dataclasses.replace(run, sampling=like.sampling, lead=lead)
