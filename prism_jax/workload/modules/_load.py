"""How unevenly tokens go to experts: what a module may say of it."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from .._block import Load


def check_load(
    num_experts: int,
    *,
    concentration: float | None,
    seed: int | None,
    popularity: Sequence[float] | None,
    capacity_factor: float | None,
) -> None:
    """Raises a `ValueError` of one sentence where the keys of a `MoE` do not fit one another."""
    if popularity is not None and concentration is not None:
        raise ValueError(
            "`load_popularity` gives what `load_concentration` draws; leave one of them out."
        )
    if popularity is not None and len(popularity) != num_experts:
        raise ValueError(
            f"`load_popularity` has {len(popularity)} entries for `num_experts` = {num_experts}; "
            "give one for each expert."
        )
    if popularity is not None and not sum(popularity) > 0:
        raise ValueError("`load_popularity` is zero for all experts; give some of them more.")
    if seed is not None and concentration is None:
        raise ValueError(
            f"`load_seed` = {seed} draws popularities of experts, but not by which law; give "
            "`load_concentration`, too."
        )
    if capacity_factor is not None and concentration is None and popularity is None:
        raise ValueError(
            f"`capacity_factor` = {capacity_factor} cuts loads that vary, but all experts get "
            "equally many tokens; give `load_concentration`, too."
        )


def draw_popularity(
    num_experts: int, concentration: float, seed: Sequence[int]
) -> tuple[float, ...]:
    """The popularities of a layer's experts, in sum one: Dirichlet with this sum of parameters, all
    equal.
    """
    even = np.full(num_experts, 1 / num_experts)
    if not math.isfinite(concentration):
        return tuple(even.tolist())
    return tuple(np.random.default_rng(seed).dirichlet(concentration * even).tolist())


def with_load(kernels: list, load: Load | None) -> list:
    """The kernels, if there are any, that take as long as a rank has tokens."""
    if load is None:
        return kernels
    return [
        kernel and msgspec.structs.replace(kernel, size=f"{kernel.size} by load", load=load)
        for kernel in kernels
    ]
