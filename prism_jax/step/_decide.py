"""Sets up how steps are decided."""

import numpy as np

from ..random import KeyData
from ._decision import AbstractDecision, OneEach, Systematic, VectorRule
from ._exact import ExactRule
from ._reservoir import Replicas
from ._selection import Chances, sample_weights, select


def decide(
    chances: Chances,
    kept: Replicas,
    key: KeyData,
    num_steps: int,
    *,
    num_replicas: int,
    exact: bool = False,
) -> AbstractDecision:
    """Sets up how steps are decided.

    **Arguments:**

    - `kept`: replica samples.
    - `num_replicas`: the number of replicas in a step; one if each sample is already the slowest of
        a step's replicas.
    - `exact`: whether each sink has a slowest replica of its own.
    """
    weights = sample_weights(chances, kept)
    regime = chances.regime[kept.stratum]
    probabilities = chances.network
    present = np.bincount(regime, minlength=len(probabilities)) > 0
    if not present.all():  # Only in runs of a handful of samples.
        probabilities = np.where(present, probabilities, 0) / probabilities[present].sum()
    words = [int(word) for word in np.asarray(key)]
    rng = np.random.Generator(np.random.Philox(key=words, counter=[0, 0, 1, kept.first]))
    first, second = rng.random(2)
    offsets = (float(first), float(second))
    systematic = Systematic(probabilities, num_steps, offsets, (words[0], words[1]), kept.first)
    # A single replica whose samples weigh the same needs no picking, and their order none either.
    one_each = not exact and num_replicas == len(probabilities) == len(kept.counts) == 1
    if one_each and len(weights) == num_steps and bool(weights.min() == weights.max()):
        return OneEach(kept, systematic)
    selections = tuple(
        select(kept, weights, regime == g, num_replicas, whole=exact)
        for g in range(len(probabilities))
    )
    return (ExactRule if exact else VectorRule)(kept, systematic, selections)
