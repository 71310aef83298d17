"""The pilot: a few steps with a key of their own, by which the options of a run are chosen. Its
results depend on the program only, so that the laws of a program's runs can be merged.
"""

import dataclasses
import math

import numpy as np

from .._misc import dot
from ..law import FEWEST
from ..random import key_data
from ..replica import redirected
from ..step import sample_weights
from ._pools import pilot_steps
from ._run import Chunk, Draws, Run, decided_chunks, step_times
from ._sampling import AbstractSampling, Importance, Plain, named, pilot_key


_SAMPLES = 4096
# It is said if the vector rule is lower by more than this.
_TOLERANCE = 5e-4
# With less support in the pilot, nothing is decided.
_LEAST_SUPPORT = 3


@dataclasses.dataclass(frozen=True)
class Pilot:
    """A few steps; `run` has the pilot's key and its way of sampling."""

    run: Run
    chunk: Chunk

    def steps(self) -> np.ndarray:
        """Their times, in seconds."""
        return np.concatenate(list(step_times(self.run, [self.chunk])))


def draw_pilot(run: Run, sampling: str | None = None) -> Pilot:
    """Draws a pilot, sampled as the run is or by name. By default it is plain if its samples reach
    the tail that decides steps.
    """
    if sampling is None and run.sampling is None:
        plain = run.program.num_replicas * FEWEST <= _SAMPLES
        sampling = "plain" if plain else "importance"
    mine = run.sampling if sampling is None else named(sampling, run)
    assert mine is not None
    run = dataclasses.replace(run, key=key_data(pilot_key()), sampling=mine)
    (chunk,) = decided_chunks(run, [Draws(mine, 0, _SAMPLES)])
    return Pilot(run, chunk)


def vector_rule_notes(run: Run) -> tuple[str, ...]:
    """A warning for figures that follow the vector rule, by which one replica decides a step;
    empty where the rule is accurate. It compares the mean or the 95 % quantile, whichever differs
    more, with that of steps of which each sink has a slowest replica of its own.
    """
    number, sinks = run.program.num_replicas, run.program.sinks.number
    if number == 1 or sinks == 1:
        return ()
    exact, slowest = pilot_steps(run)
    high, low = (np.array([np.mean(x), np.quantile(x, 0.95)]) for x in (exact, slowest))
    share = float(np.max(1 - low / high)) if np.all(high > 0) else 0.0
    if share <= _TOLERANCE:
        return ()
    return (
        f"Figures and derivatives follow the vector rule of replicas, which is {100 * share:.2g} % "
        "low for this program; `simulate` looks at more than the slowest replica.",
    )


def importance_gain(pilot: Pilot) -> float:
    """The support of importance sampling relative to plain sampling with four times as many
    samples, in the upper quarter of the law of the slowest replica, from a pilot with importance
    sampling. Support is the effective number of samples.
    """
    chances, kept = pilot.run.chances, pilot.chunk.decision.kept
    regime, share = chances.regime, -np.log(0.75) / pilot.run.program.num_replicas
    slowest = np.argsort(-kept.score, kind="stable")
    weights, stratum = sample_weights(chances, kept)[slowest], kept.stratum[slowest]
    beyond = np.zeros(len(weights), bool)
    for g in range(len(chances.network)):  # All replicas of a step are in one.
        mine = regime[stratum] == g
        beyond[mine] = np.cumsum(weights[mine]) - weights[mine] < share
    stratum = stratum[beyond]
    weights = weights[beyond] * chances.network[regime[stratum]]
    squares = dot(weights, weights)
    if weights.sum() ** 2 < _LEAST_SUPPORT * squares:
        return 0.0
    # Plain samples, which are four times as many, have equal weights within a stratum.
    plain = chances.network[regime] * chances.weight / np.bincount(regime, chances.share)[regime]
    return dot(weights, plain[stratum]) / (4 * len(kept.ids) * squares)


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
