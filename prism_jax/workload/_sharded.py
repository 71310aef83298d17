"""Parameters and gradients that are distributed over the replicas: ZeRO-2, ZeRO-3 and FSDP.

Each layer, and each end of the model, is a unit (Zhao et al. 2023, arXiv:2304.11277): before a
microbatch runs through it, all_gathers make its parameters whole; after its backward,
reduce_scatters reduce its gradients. Where there are copies of the shards (`optimizer_instances`,
known as hybrid sharding), the copies reduce the shares among themselves.
"""

import msgspec

from ..cluster import Group
from ..data import Training
from ._architecture import Part
from ._block import Kernel
from ._costs import Costs
from ._split import held_of
from .modules import Head, PatchHead


GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def shards(training: Training) -> tuple[bool, bool]:
    """Whether the replicas share gradients, and parameters too."""
    return training.zero >= 2, training.zero == 3


def deals_each_microbatch(training: Training) -> bool:
    """Whether each microbatch reduce-scatters its gradients, layer by layer."""
    return shards(training)[0] and not training.accumulate_gradients


def beside_layers(training: Training) -> bool:
    """Whether each microbatch gathers parameters or reduce-scatters gradients layer by layer."""
    return shards(training)[1] or deals_each_microbatch(training)


def instance(group: Group, training: Training) -> tuple[Group, Group]:
    """Of those who reduce gradients: who share one optimizer, and the peers of a shard."""
    instances = training.optimizer_instances
    size = group.size // instances
    peers = Group(f"{group.name}-peers", instances, size * group.stride)
    return Group(group.name, size, group.stride), peers


def unit_parameters(costs: Costs, part: Part) -> tuple[tuple[float, Group], ...]:
    """How many parameters one GPU has of a unit that is whole, and over whom they are shared."""
    held = held_of(part.parameters(costs.model), costs.layout)
    groups = zip(held, (costs.dp, costs.edp), strict=True)
    return tuple((number, group) for number, group in groups if number and group.size > 1)


def gathers(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """What makes the parameters of a unit whole; nothing where each replica has them all."""
    if not shards(costs.training)[1]:
        return ()
    found = []
    for parameters, group in unit_parameters(costs, part):
        inner, _ = instance(group, costs.training)
        if inner.size > 1:
            found.append(_collective(costs, "all_gather", 2 * parameters, inner))
    return tuple(found)


def gathers_again(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """The same in a backward. The end of a model, whose backward follows its forward, still has its
    parameters: PyTorch's FSDP keeps those of the root, and torchtitan those of the head.
    """
    kept = not costs.training.reshard_after_forward or isinstance(
        part.modules[-1], Head | PatchHead
    )
    return () if kept else gathers(costs, part)


def reductions(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """What deals the gradients of a unit; nothing where they are summed up first."""
    if not deals_each_microbatch(costs.training):
        return ()
    found = []
    for parameters, group in unit_parameters(costs, part):
        size = GRADIENT_BYTES[costs.training.gradient_dtype] * parameters
        inner, peers = instance(group, costs.training)
        if inner.size > 1:
            found.append(_collective(costs, "reduce_scatter", size, inner))
        if peers.size > 1:
            found.append(_collective(costs, "all_reduce", size / inner.size, peers))
    return tuple(found)


def _collective(costs: Costs, kind: str, num_bytes: float, group: Group) -> Kernel:
    return msgspec.structs.replace(costs.collective(kind, num_bytes, group), group="fsdp")
