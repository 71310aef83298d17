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
from ..step import ExactRule, decide, sample_weights
from ._run import Chunk, Draws, Run, decided_chunks, step_times
from ._sampling import AbstractSampling, Importance, Plain, named, pilot_key


_SAMPLES = 4096
# The exact rule of replicas is used if the vector rule is lower by more than this.
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


def vector_rule_is_low_by(pilot: Pilot) -> float:
    """By which share the mean or the 95 % quantile by the vector rule, whichever differs more, is
    below that by the exact rule. Both rules use the same replicas.
    """
    run, chunk = pilot.run, pilot.chunk
    if _rules_are_one(run):
        return 0.0
    number = run.program.num_replicas
    kept = chunk.decision.kept
    exact = decide(run.chances, kept, run.key, chunk.steps, num_replicas=number, exact=True)
    assert isinstance(exact, ExactRule)

    rules = dataclasses.replace(exact, one_decides=True), exact
    both = [dataclasses.replace(chunk, decision=rule) for rule in rules]
    low, high = (
        np.array([np.mean(steps, dtype=np.float64), np.quantile(steps, 0.95)])
        for steps in np.split(np.concatenate([*step_times(run, both)]), 2)
    )
    return float(np.max(1 - low / high)) if np.all(high > 0) else 0.0


def _rules_are_one(run: Run) -> bool:
    return run.program.num_replicas == 1 or run.program.sinks.number == 1


def rule_of_replicas(pilot: Pilot) -> str:
    """`"vector"`, or `"exact"` if the rules differ."""
    return "exact" if vector_rule_is_low_by(pilot) > _TOLERANCE else "vector"


def vector_rule_notes(run: Run) -> tuple[str, ...]:
    """A warning for figures that follow the vector rule; empty where the rule is accurate."""
    low = 0.0
    if not _rules_are_one(run):
        low = vector_rule_is_low_by(draw_pilot(run))
    if low <= _TOLERANCE:
        return ()
    return (
        f"Figures and derivatives follow the vector rule of replicas, which is {100 * low:.2g} % "
        "low for this program; `simulate` takes the exact rule.",
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
