"""How the samples behind figures are drawn: a pilot with a key of its own says whether importance
sampling helps, so that this depends on the program only.
"""

import dataclasses
import math

import numpy as np

from .._misc import dot
from ..law import FEWEST
from ..random import key_data
from ..replica import redirected
from ..step import pool_weights
from ._pools import drawn_pools, pool_draws
from ._run import Run
from ._sampling import AbstractSampling, Draws, Importance, Plain, pilot_key, sampling_named


_SAMPLES = 4096
# Plain samples are drawn only if so many times fewer would reach the tail: derivatives, changes and
# standard errors need more of them there than a quantile alone.
_MARGIN = 16
# With less support in the pilot, nothing is decided.
_LEAST_SUPPORT = 3


def sampled(run: Run, num_samples: int, like: Run | None = None) -> Run:
    """The run with its way of sampling: importance sampling where the slowest of the replicas lie
    beyond so many plain samples, and its samples have more support there; else plain sampling.

    It is that of `like`, of a program of the same graph and with the same axes, so that the same
    random numbers mean the same; but the shift along them is for a number of replicas, and another
    number needs its own.
    """
    if like is None or like.program.num_replicas != run.program.num_replicas:
        return dataclasses.replace(run, sampling=_chosen(run, num_samples))
    sampling = like.sampling
    if isinstance(sampling, Importance):
        sampling = Importance(redirected(sampling.lead, run.program, run.plan, pilot_key()))
    return dataclasses.replace(run, sampling=sampling)


def _chosen(run: Run, num_samples: int) -> AbstractSampling:
    beyond = -math.log(0.95) / run.program.num_replicas * num_samples / _MARGIN
    if run.program.num_replicas == 1 or beyond >= FEWEST:
        return Plain()
    importance = sampling_named("importance", run.program, run.plan)
    pilot = dataclasses.replace(run, key=key_data(pilot_key()), sampling=importance)
    # A run of few steps draws more plain samples than steps, but no more weighted ones.
    few, many = (_samples(run, sampling, num_samples) for sampling in (importance, Plain()))
    return importance if importance_gain(pilot) * few > many else Plain()


def _samples(run: Run, sampling: AbstractSampling, num_steps: int) -> int:
    """How many samples a run of so many steps draws."""
    return sum(
        pool.replicas for pool in pool_draws(dataclasses.replace(run, sampling=sampling), num_steps)
    )


def importance_gain(run: Run) -> float:
    """The support of importance sampling relative to that of as many plain samples, in the upper
    quarter of the law of the slowest replica, from a few samples of a run with importance sampling.
    Support is the effective number of samples.
    """
    (drawn,) = drawn_pools(run, [Draws(0, _SAMPLES, run.sampling.replicas(_SAMPLES))])
    _, score, stratum, likelihood = (np.asarray(x) for x in drawn.samples)
    chances, share = run.chances, -np.log(0.75) / run.program.num_replicas
    slowest = np.argsort(-score, kind="stable")
    weights, stratum = pool_weights(chances, stratum, likelihood)[slowest], stratum[slowest]
    regime, beyond = chances.regime[stratum], np.zeros(len(weights), bool)
    for g in range(len(chances.network)):  # All replicas of a step are in one.
        members = regime == g
        beyond[members] = np.cumsum(weights[members]) - weights[members] < share
    weights = weights[beyond] * chances.network[regime[beyond]]
    squares = dot(weights, weights)
    if weights.sum() ** 2 < _LEAST_SUPPORT * squares:
        return 0.0
    # Plain samples have equal weights within a stratum.
    likely = np.bincount(chances.regime, chances.share)[chances.regime]
    plain = chances.network[chances.regime] * chances.weight / likely
    return dot(weights, plain[stratum[beyond]]) / (len(score) * squares)
