"""Which way of sampling a run takes by itself."""

import dataclasses
import math

from ..law import FEWEST
from ..replica import redirected
from ._pilot import Pilot, draw_pilot, importance_gain
from ._prepare import Run
from ._sampling import AbstractSampling, Importance, Plain, pilot_key


def chosen(run: Run, num_samples: int, pilot: Pilot | None = None) -> AbstractSampling:
    """Importance sampling where the rule of replicas reaches beyond so many plain samples, and it
    has more support there; else plain sampling.

    **Arguments:**

    - `pilot`: of the run, if there is one.
    """
    beyond = -math.log(0.95) / run.program.num_replicas * num_samples
    if run.program.num_replicas == 1 or beyond >= FEWEST:
        return Plain()
    if pilot is None or not isinstance(pilot.run.sampling, Importance):
        pilot = draw_pilot(run, "importance")
    assert pilot.run.sampling is not None
    return pilot.run.sampling if importance_gain(pilot) > 1 else Plain()


def sampled(run: Run, num_samples: int, like: Run | None = None) -> Run:
    """The run with its way of sampling, unless it has one.

    It is that of `like`, of a program of the same graph and with the same axes, so that the same
    random numbers mean the same; but the shift along them is for a number of replicas, and another
    number needs its own.
    """
    if run.sampling is not None:
        return run
    if like is None or like.program.num_replicas != run.program.num_replicas:
        return dataclasses.replace(run, sampling=chosen(run, num_samples))
    sampling = like.sampling
    if isinstance(sampling, Importance):
        sampling = Importance(redirected(sampling.lead, run.program, run.plan, pilot_key()))
    return dataclasses.replace(run, sampling=sampling)
