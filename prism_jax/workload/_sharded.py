"""Parameters and gradients that are sharded over the replicas: ZeRO-2, ZeRO-3 and FSDP.

Each layer, and each end of the model, is a unit (Zhao et al. 2023, arXiv:2304.11277): before a
microbatch runs through it, all_gathers gather its parameters; after its backward, reduce_scatters
reduce its gradients. If there are copies of the shards (`optimizer_instances`, known as hybrid
sharding), the copies reduce the gradients of their shards among themselves.
"""

import msgspec

from ..cluster import Group
from ..data import Training
from ._architecture import Part
from ._block import Kernel, Segment
from ._costs import Costs
from ._parts import segment
from ._split import held_of
from .modules import Head, PatchHead


GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def shards(training: Training) -> tuple[bool, bool]:
    """Whether gradients are sharded over the replicas, and whether parameters are."""
    return training.zero >= 2, training.zero == 3


def deals_each_microbatch(training: Training) -> bool:
    """Whether each microbatch reduce-scatters its gradients, layer by layer."""
    return shards(training)[0] and not training.accumulate_gradients


def beside_layers(training: Training) -> bool:
    """Whether each microbatch gathers parameters or reduce-scatters gradients layer by layer."""
    return shards(training)[1] or deals_each_microbatch(training)


def instance(group: Group, training: Training) -> tuple[Group, Group]:
    """Of a group that reduces gradients: the ranks of one optimizer, and the peers of a shard."""
    instances = training.optimizer_instances
    size = group.size // instances
    peers = Group(f"{group.name}-peers", instances, size * group.stride)
    return Group(group.name, size, group.stride), peers


def unit_parameters(costs: Costs, part: Part) -> tuple[tuple[float, Group], ...]:
    """The parameters of an unsharded unit on one GPU, and the groups that can shard them."""
    held = held_of(part.parameters(costs.model), costs.layout)
    groups = zip(held, (costs.dp, costs.edp), strict=True)
    return tuple((number, group) for number, group in groups if number and group.size > 1)


def gathers(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """The all_gathers of the parameters of a unit; none if each replica has all of them."""
    if not shards(costs.training)[1]:
        return ()
    found = []
    for parameters, group in unit_parameters(costs, part):
        inner, _ = instance(group, costs.training)
        if inner.size > 1:
            found.append(_collective(costs, "all_gather", 2 * parameters, inner))
    return tuple(found)


def gathers_again(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """The all_gathers in a backward. The last part of a model, whose backward directly follows its
    forward, still has its parameters: PyTorch's FSDP keeps those of the root, and torchtitan those
    of the head.
    """
    kept = not costs.training.reshard_after_forward or isinstance(
        part.modules[-1], Head | PatchHead
    )
    return () if kept else gathers(costs, part)


def reductions(costs: Costs, part: Part) -> tuple[Kernel, ...]:
    """The reduce_scatters of the gradients of a unit; none if they are accumulated first."""
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


def copies(costs: Costs, part: Part, *, gathered: bool, reduced: bool) -> list[Segment]:
    """What a unit moves on its own GPU: parameters after they were `gathered`, and gradients before
    they are `reduced`.
    """
    training = costs.training
    each = gathered * training.gather_copy_bytes + reduced * training.gradient_copy_bytes
    if not each:
        return []
    num_bytes = each * sum(number for number, _ in unit_parameters(costs, part))
    return [segment([costs.move("copies", num_bytes)])] if num_bytes else []


def _collective(costs: Costs, kind: str, num_bytes: float, group: Group) -> Kernel:
    return msgspec.structs.replace(costs.collective(kind, num_bytes, group), group="fsdp")
