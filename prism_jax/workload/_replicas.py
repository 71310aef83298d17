"""What follows the pipeline: gradients are reduced, parameters updated and gathered."""

from collections.abc import Iterable, Sequence

import msgspec

from ..cluster import Group, all_group
from ._architecture import reads_words_last
from ._block import Block, Kernel
from ._costs import Costs
from ._parts import block, block_means, segment
from ._sharded import GRADIENT_BYTES, instance, shards
from ._split import Held, Stages, parameters_of_rank


def reduce_scatters(costs: Costs, stages: Stages, backward: tuple[Block, ...]) -> tuple[Block, ...]:
    """For each pipeline rank, what nothing hides of the reduction of its gradients."""
    beside = block_means(backward)
    ranks = range(costs.layout.pp)
    kernels = (_gradient_kernels(costs, stages, rank, beside) for rank in ranks)
    return tuple(block([([segment([], one)], 1) for one in found]) for found in kernels)


def tail(costs: Costs, stages: Stages, forward: tuple[Block, ...]) -> Block:
    """Norm of the gradients, optimizer, and what nothing hides of the gathering of parameters."""
    layout, training = costs.layout, costs.training
    held = [_sum(parameters_of_rank(layout, stages, r)) for r in range(layout.pp)]
    shards_of = [_shard(costs, one) for one in held]
    shard = max(shards_of)
    segments = [
        segment(
            [costs.move("optimizer", 4 * shard)],
            costs.collective("all_reduce", 4, all_group(layout)) if layout.world_size > 1 else None,
        ),
        # Reads gradient, both moments and the master copy; writes all but the gradient and a copy.
        segment([costs.move("optimizer", 30 * shard)]),
    ]
    if costs.kernels.constant_s:
        segments.append(segment([costs.host()]))
    if training.zero and not shards(training)[1]:
        rank = shards_of.index(shard)
        for part, group in _reduced(costs):
            parameters = getattr(held[rank], part)
            if parameters == 0:
                continue
            kernel = costs.collective("all_gather", 2 * parameters, instance(group, training)[0])
            if training.overlap_param_gather:
                kernel = _hide(costs, kernel, stages, rank, block_means(forward), part)
            segments.append(segment([], kernel))
    return block([(segments, 1)])


def _gradient_kernels(
    costs: Costs, stages: Stages, rank: int, beside: Sequence[float]
) -> list[Kernel]:
    layout, model, training = costs.layout, costs.model, costs.training
    size = GRADIENT_BYTES[training.gradient_dtype]
    kernels = []
    held = _sum(parameters_of_rank(layout, stages, rank))
    # Where replicas share gradients, each backward has reduced its own.
    if shards(training)[0]:
        held = Held(0.0, 0.0)
    for part, group in _reduced(costs):
        parameters = getattr(held, part)
        if parameters == 0:
            continue
        if training.zero:
            inner, outer = instance(group, training)
            found = [costs.collective("reduce_scatter", size * parameters, inner)]
            if outer.size > 1:
                share = size * parameters / inner.size
                found.append(costs.collective("all_reduce", share, outer))
        else:
            found = [costs.collective("all_reduce", size * parameters, group)]
        if training.overlap_grad_reduce:
            found = [_hide(costs, kernel, stages, rank, beside, part) for kernel in found]
        kernels += found
    if reads_words_last(model) and len(stages.ends) > 1 and rank in stages.ends:
        # The first and the last stage each have a copy of the embedding, or their shards of it.
        apart = max(stages.ends) - min(stages.ends)
        ends = Group("embedding", 2, apart * layout.tp * layout.cp * layout.dp)
        num_bytes = size * model.vocab_size * model.hidden_size / layout.tp
        if shards(training)[0]:
            num_bytes /= instance(costs.dp, training)[0].size
        kernels.append(costs.collective("all_reduce", num_bytes, ends))
    return kernels


def _reduced(costs: Costs) -> list[tuple[str, Group]]:
    """The fields of `Held` with the group of each over which gradients are reduced, if any."""
    groups = (("dense", costs.dp), ("experts", costs.edp))
    return [(part, group) for part, group in groups if group.size > 1]


def _shard(costs: Costs, held: Held) -> float:
    """How many of its parameters a GPU updates."""
    if not costs.training.zero:
        return sum(held)
    groups = zip(held, (costs.dp, costs.edp), strict=True)
    return sum(number / instance(group, costs.training)[0].size for number, group in groups)


def _sum(held: Iterable[Held]) -> Held:
    return Held(*(sum(column) for column in zip(*held, strict=True)))


def _hide(
    costs: Costs, kernel: Kernel, stages: Stages, rank: int, beside: Sequence[float], field: str
) -> Kernel:
    """What is left of a data-parallel collective that runs stage by stage beside the pipeline,
    whose block of each stage takes so long.

    The part of each stage becomes ready with its last (or is needed by its first) microbatch, and
    has, on a rank with several stages, as long as the microbatches of one round take in the others.
    Of the part at the very end (or start), one layer's worth cannot be hidden.
    """
    held = parameters_of_rank(costs.layout, stages, rank)
    parameters = [getattr(one, field) for one in held]
    total = sum(parameters)
    if total == 0:
        return kernel
    end = 0.0
    now = 0.0
    # From the stage that is at the edge of the step outwards is the order of neither phase; by
    # symmetry both are this queue: ready at `now`, one after the other.
    for i, stage in reversed(list(enumerate(stages.of_rank(rank)))):
        mean = beside[stage]
        now += mean * (stages.group if i > 0 else 1)
        part = kernel.mean * parameters[i] / total
        if i == 0:
            # Layer by layer beside the last microbatch.
            count = max(stages.layers[stage], 1)
            end = max(end + part, now - mean + part, now + part / count)
        else:
            end = max(end, now) + part
    hidden = (kernel.mean - max(end - now, 0.0)) * costs.kernels.overlap.data_parallel
    left = kernel.mean - max(hidden, 0.0)
    return msgspec.structs.replace(kernel, size=f"{kernel.size} exposed", mean=left)
