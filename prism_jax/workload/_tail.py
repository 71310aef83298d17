"""What runs after the pipeline: the optimizer, and the exposed part of gathering parameters."""

from collections.abc import Sequence

import msgspec

from ..cluster import Group, group_of
from ._block import Block, Kernel
from ._costs import Costs
from ._parts import block, block_means, segment
from ._reductions import reduced_groups
from ._sharded import instance, shards
from ._split import Held, Stages, parameters_of_rank, sum_held


def tail(costs: Costs, stages: Stages, forward: tuple[Block, ...]) -> Block:
    """The norm of the gradients, the optimizer, and the exposed part of parameter gathering."""
    layout, training = costs.layout, costs.training
    held = [sum_held(parameters_of_rank(layout, stages, r)) for r in range(layout.pp)]
    shards_of = [_shard(costs, one) for one in held]
    shard = max(shards_of)
    segments = []
    if training.optimizer == "adam":
        norm = costs.collective("all_reduce", 4, group_of("all", layout))
        read = costs.move("optimizer", 4 * shard)
        segments.append(segment([read], norm if layout.world_size > 1 else None))
    # Reads gradient, moments and the master copy; writes all but the gradient and a copy.
    num_bytes = {"adam": 30, "adagrad": 22}[training.optimizer]
    segments.append(segment([costs.move("optimizer", num_bytes * shard)]))
    if costs.kernels.constant_s:
        segments.append(segment([costs.host()]))
    if training.zero and not shards(training)[1]:
        rank = shards_of.index(shard)
        for part, group in reduced_groups(costs):
            parameters = getattr(held[rank], part)
            if parameters == 0:
                continue
            kernel = _gathered(costs, 2 * parameters, instance(group, training)[0])
            if training.overlap_param_gather:
                kernel = _hide(costs, kernel, stages, rank, block_means(forward), part)
            segments.append(segment([], kernel))
    return block([(segments, 1)])


def _gathered(costs: Costs, num_bytes: float, group: Group) -> Kernel:
    """How updated parameters are gathered. Broadcasts in turn send as much, but each of them has to
    pass along the whole ring (NCCL, all broadcasts are rings).
    """
    kernel = costs.collective("all_gather", num_bytes, group)
    if not costs.training.gather_in_turn:
        return kernel
    hops = costs.collective("all_gather", 0, group).mean
    size = f"{kernel.size} in turn"
    return msgspec.structs.replace(kernel, size=size, mean=kernel.mean + (group.size - 1) * hops)


def _shard(costs: Costs, held: Held) -> float:
    """The number of parameters that a GPU updates."""
    if not costs.training.zero:
        return sum(held)
    groups = zip(held, (costs.dp, costs.edp), strict=True)
    return sum(number / instance(group, costs.training)[0].size for number, group in groups)


def _hide(
    costs: Costs, kernel: Kernel, stages: Stages, rank: int, beside: Sequence[float], field: str
) -> Kernel:
    """The exposed part of an all_gather that overlaps with the forward, stage by stage.

    The first microbatch of each stage needs the parameters of that stage. On a rank with several
    stages, they can be gathered during one round of microbatches in the other stages. At the very
    start, the parameters of one layer are always exposed.
    """
    held = parameters_of_rank(costs.layout, stages, rank)
    parameters = [getattr(one, field) for one in held]
    total = sum(parameters)
    end = 0.0
    now = 0.0
    # From the start of the step outwards, against time: ready at `now`, one after the other.
    for i, stage in reversed(list(enumerate(stages.of_rank(rank)))):
        mean = beside[stage]
        now += mean * (stages.group if i > 0 else 1)
        part = kernel.mean * parameters[i] / total
        if i == 0:
            # Layer by layer beside the first microbatch.
            count = max(stages.layers[stage], 1)
            end = max(end + part, now - mean + part, now + part / count)
        else:
            end = max(end, now) + part
    hidden = (kernel.mean - max(end - now, 0.0)) * costs.kernels.overlap.data_parallel
    left = kernel.mean - max(hidden, 0.0)
    return msgspec.structs.replace(kernel, size=f"{kernel.size} exposed", mean=left)
