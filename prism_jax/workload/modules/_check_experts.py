"""What a mixture of experts refuses."""

from typing import TYPE_CHECKING

from ...data import Layout, Training


if TYPE_CHECKING:
    from ._moe import MoE


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
