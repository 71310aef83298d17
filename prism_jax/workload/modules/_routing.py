"""How tokens are routed to experts: what a mixture of experts refuses, and how unevenly its experts
are loaded.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...data import Layout, Training
from .._block import Load


if TYPE_CHECKING:
    from ._moe import MoE


# Of 8 ranks; the fullest then has 1.46 times the mean. Four pairs of steps of Qwen3-235B with a
# forced balance and without (MoE-ModelZoo, best_practice/qwen3) take 1.09 to 1.24 times as long for
# sequences of 128K to 16K, which is 1.45 of what experts take; the state of training is not given.
# Of 32 ranks it has 1.8 times the mean, as loads by a power law of exponent 1.01 have, with which
# the fullest of 8 has 1.47 (ai-dynamo/aiconfigurator of 2026). Beyond 32 this is an extrapolation.
_DROPLESS, _OF_RANKS, _GROWTH = 90.0, 8, 0.86


def check_routing(experts: "MoE") -> None:
    """Raises a `ValueError` if tokens cannot go to so many experts of so many groups."""
    if experts.top_k > experts.num_experts:
        raise ValueError(
            f"`top_k` = {experts.top_k} is more than `num_experts` = {experts.num_experts}; use at "
            "most as many."
        )
    per_group, odd = divmod(experts.num_experts, experts.num_groups)
    if odd:
        raise ValueError(
            f"`num_experts` = {experts.num_experts} do not divide evenly into `num_groups` = "
            f"{experts.num_groups}; use a number of groups that divides it."
        )
    if experts.used_groups > experts.num_groups:
        raise ValueError(
            f"`top_k_groups` = {experts.top_k_groups} is more than `num_groups` = "
            f"{experts.num_groups}; use at most as many."
        )
    if experts.top_k > experts.used_groups * per_group:
        raise ValueError(
            f"`top_k_groups` = {experts.used_groups} groups have {experts.used_groups * per_group} "
            f"experts, fewer than `top_k` = {experts.top_k}; use more groups."
        )


def check_degrees(experts: "MoE", layout: Layout, training: Training) -> None:
    """Raises a `ValueError` if a layout cannot distribute the experts."""
    if layout.tp > 1 and not training.sequence_parallel:
        raise ValueError(
            f"`layout.tp` = {layout.tp} without sequence parallelism gives each rank all "
            "tokens to route to its experts; use `training.sequence_parallel` = true."
        )
    if experts.shared and training.overlap_shared_experts and layout.tp > 1:
        raise ValueError(
            f"`layout.tp` = {layout.tp} gives shared experts collectives of their own, which "
            "are not known beside those of the others; use "
            "`training.overlap_shared_experts` = false."
        )
    if experts.num_experts % layout.ep != 0:
        raise ValueError(
            f"`layout.ep` = {layout.ep} does not divide `num_experts` = {experts.num_experts}; "
            "use a divisor."
        )
    if experts.expert_ffn_size % layout.expert_tp != 0:
        raise ValueError(
            f"`layout.etp` = {layout.expert_tp} does not divide `expert_ffn_size` = "
            f"{experts.expert_ffn_size}; use a divisor."
        )


def check_load(experts: "MoE") -> None:
    """Raises a `ValueError` of one sentence if the keys of the load do not fit one another."""
    num_experts, popularity = experts.num_experts, experts.load_popularity
    concentration, seed = experts.load_concentration, experts.load_seed
    for name, value in (("load_concentration", concentration), ("load_seed", seed)):
        if popularity is not None and value is not None:
            raise ValueError(f"`load_popularity` gives what `{name}` draws; leave one of them out.")
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
    varies = experts.balance == "dropless" or concentration is not None or popularity is not None
    if experts.capacity_factor is not None and not varies:
        raise ValueError(
            f"`capacity_factor` = {experts.capacity_factor} cuts loads that vary, but all experts "
            'get equally many tokens; give `load_concentration`, or `balance = "dropless"`, too.'
        )


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
