"""How unevenly experts are loaded."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from .._block import Load


# Of 8 ranks; the fullest then has 1.46 times the mean. Four pairs of steps of Qwen3-235B with a
# forced balance and without (MoE-ModelZoo, best_practice/qwen3) take 1.09 to 1.24 times as long for
# sequences of 128K to 16K, which is 1.45 of what experts take; the state of training is not given.
# Of 32 ranks it has 1.8 times the mean, as loads by a power law of exponent 1.01 have, with which
# the fullest of 8 has 1.47 (ai-dynamo/aiconfigurator of 2026). Beyond 32 this is an extrapolation.
_DROPLESS, _OF_RANKS, _GROWTH = 90.0, 8, 0.86


def dropless_concentration(ranks: int) -> float:
    """The concentration of popularities over so many ranks if nothing forces a balance."""
    return _DROPLESS * (ranks / _OF_RANKS) ** _GROWTH


def draw_popularity(
    num_experts: int, concentration: float, seed: Sequence[int]
) -> tuple[float, ...]:
    """The popularities of a layer's experts, which add up to one. They follow a symmetric Dirichlet
    law whose parameters add up to `concentration`.
    """
    even = np.full(num_experts, 1 / num_experts)
    if not math.isfinite(concentration):
        return tuple(even.tolist())
    return tuple(np.random.default_rng(seed).dirichlet(concentration * even).tolist())


def with_load(kernels: list, load: Load | None) -> list:
    """Kernels whose latency grows with the tokens of a rank, if there are any."""
    if load is None:
        return kernels
    return [
        kernel and msgspec.structs.replace(kernel, size=f"{kernel.size} by load", load=load)
        for kernel in kernels
    ]
