"""Positions in a step: factors of a microbatch's place, such as the first of its stage."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ..program import StepGraph
from ._profile import PositionFactor


def position_factors(
    step: StepGraph, positions: Sequence[PositionFactor], pp: int
) -> Float[np.ndarray, " ops"]:
    """The factor of each op on the mean of its kind on its worker: one unless `positions` has
    another. `pp` is the number of stages.
    """
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in positions}
    nodes = zip(step.kind, step.members, step.call, strict=True)
    return np.array(
        [factors.get((kind, members[0] % pp, call), 1.0) for kind, members, call in nodes]
    )
