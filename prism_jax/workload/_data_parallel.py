"""What the replicas do together: they reduce gradients, run the optimizer and gather parameters.

If reductions overlap with the backward, each virtual stage reduces its gradients after the backward
of its last microbatch. If gradients are sharded but accumulated first, it reduces them after each
row of its microbatches, so that at most two stages of a rank have unsharded gradients. Pipelines
and FSDP are combined in this way in Llama 3, whose authors shard gradients and optimizer and keep
parameters after the forward (Llama team 2024, arXiv:2407.21783, section 3.3.2). Megatron-LM splits
only the first stage of the first pipeline rank further, into buckets, because no compute comes
after it that could overlap with its reduction
(`megatron/core/distributed/distributed_data_parallel.py` and `megatron/training/training.py`).
PyTorch's FSDP within `no_sync` reduces each layer beside the last backward in the same way.
"""

import functools as ft
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ..cluster import Group, group_of
from ._architecture import LayerPart, reads_words_last, recomputed
from ._block import Block, Kernel, Reduction
from ._costs import Costs
from ._listed import optimizer_of, tensors_of
from ._parts import block, block_means, segment
from ._split import Held, Stages, held_of, sum_held
from ._units import (
    gathered_bytes,
    host_waits,
    instance,
    launched_units,
    reduces_each_microbatch,
    row_of_units,
    scattered,
    sharded_parameters,
    shared,
    unit_of,
)


# The fewest parameters of a bucket, and the fewest for each replica.
_BUCKET = 40_000_000
_BUCKET_PER_REPLICA = 1_000_000
# The most buckets of a stage: each is an op. With more, larger ones change a step by less than the
# time of one in so many.
_MOST_BUCKETS = 512


def reductions_of_ranks(costs: Costs, stages: Stages) -> tuple[tuple[Reduction, ...], ...]:
    """The gradient reductions of each pipeline rank, each with the backward that it waits for."""
    ranks = range(costs.layout.pp)
    if costs.training.forward_only:
        return tuple(() for _ in ranks)
    row_of = ft.cache(lambda held: _row(_kernels(costs, held)))  # Most stages are equal.
    return tuple(tuple(_of_rank(costs, stages, rank, row_of)) for rank in ranks)


def _of_rank(
    costs: Costs, stages: Stages, rank: int, row_of: Callable[[Held], Block]
) -> Iterator[Reduction]:
    last, training = _of_embedding(costs, stages, rank), costs.training
    # Each backward may have reduced its own gradients.
    reduces = not reduces_each_microbatch(training)
    if reduces and any(group.size > 1 for group in costs.replicas):
        if not training.overlap_grad_reduce:
            held = sum_held(stages.held_by_rank(rank))
            last = [*_kernels(costs, held), *last]
        else:
            for stage in stages.of_rank(rank):
                for held, piece in _buckets(costs, stages, stage):
                    yield Reduction(row_of(held), (stage,), piece, each_turn=training.zero >= 2)
    if last:
        yield Reduction(_row(last))


def _row(kernels: Iterable[Kernel]) -> Block:
    return block(([segment([], kernel)], 1) for kernel in kernels)


def _kernels(costs: Costs, held: Held) -> list[Kernel]:
    """The collectives that reduce the gradients of some parameters."""
    reduced = shared(costs, held)
    return [kernel for number, group in reduced for kernel in scattered(costs, number, group)]


def _of_embedding(costs: Costs, stages: Stages, rank: int) -> list[Kernel]:
    """The reduction over the first and the last stage, which both have a copy of the embedding."""
    layout, model, training = costs.layout, costs.model, costs.training
    copied = reads_words_last(model) and training.adapters is None
    if not (copied and len(stages.ends) > 1 and rank in stages.ends):
        return []
    apart = max(stages.ends) - min(stages.ends)
    ends = Group("embedding", 2, apart * layout.tp * layout.cp * layout.dp)
    num_bytes = costs.sent_gradient_bytes * model.vocab_size * model.hidden_size / layout.tp
    if training.zero >= 2:
        num_bytes /= instance(costs, costs.group("dp")).size
    return [costs.collective("all_reduce", num_bytes, ends)]


def _buckets(costs: Costs, stages: Stages, stage: int) -> list[tuple[Held, Block | None]]:
    """The parameters of each bucket of a stage in the order of its backward, and the piece of the
    backward that ends with them; `None` if there is one bucket. Buckets end with layers.
    """
    whole = stages.held[stage]
    training = costs.training
    # Where parameters or activations come from elsewhere, a backward is more than its pieces.
    sharded = training.zero == 3
    elsewhere = (sharded and not training.plain) or "activations" in training.offload
    if stage != stages.of_rank(0)[0] or elsewhere:
        return [(whole, None)]
    most = 1 if sharded else training.gradient_bucket_size  # FSDP has one for each layer.
    most = most or max(_BUCKET, _BUCKET_PER_REPLICA * costs.layout.dp)
    runs = recomputed(stages.parts[stage], training)
    if sum(count for _, count, _ in runs) > _MOST_BUCKETS:
        most = max(most, sum(whole) / _MOST_BUCKETS)
    pieces: list[list[tuple[LayerPart, bool]]] = [[]]
    held = [Held(0.0, 0.0)]
    for part, count, again in reversed(runs):
        of_part = held_of(part.parameters(costs.model), costs.layout)
        for _ in range(count):
            if sum(held[-1]) >= most:
                pieces.append([])
                held.append(Held(0.0, 0.0))
            pieces[-1].append((part, again))
            held[-1] = sum_held([held[-1], of_part])
    if len(pieces) == 1:
        return [(whole, None)]
    unit = ft.cache(ft.partial(unit_of, costs, "B"))
    units = [[(unit(*part), n) for part, n in Counter(piece).items()] for piece in pieces]
    launched = [[(run.segments, n) for run, n in piece] for piece in units]
    forward = launched_units(costs, stages.parts[stage], back=False)
    waits = host_waits(costs, ((forward, False), *((piece, True) for piece in launched)))[1:]
    if sharded or costs.expert_ranks:
        before = [None, *(piece[-1][0] for piece in units[:-1])]
        after = [*(piece[0][0] for piece in units[1:]), None]
        edges = zip(units, before, after, strict=True)
        blocks = [row_of_units(costs, *edge) for edge in edges]
    else:
        blocks = [*map(block, launched)]
    blocks = [*map(operator.add, blocks, waits)]
    blocks[0] = received(costs, stages, stage, 1) + blocks[0]
    return list(zip(held, blocks, strict=True))


def received(costs: Costs, stages: Stages, stage: int, step: int) -> Block:
    """Gathers the tensor from the stage `step` ahead: if each of its ranks sent a part, the ranks
    of this stage gather the parts, as Megatron-LM does after receiving and before the layers run
    (Narayanan et al. 2021, arXiv:2104.04473, section 4.1).
    """
    sender = stage + step
    sent = 0 <= sender < len(stages.rank) and stages.rank[sender] != stages.rank[stage]
    needs_none = step > 0 and stage < stages.num_frozen
    if needs_none or not (sent and costs.scatters_send_recv):
        return ()
    return _row(
        [
            costs.collective(
                "all_gather", costs.activation_bytes * costs.stream_states, costs.group("tp")
            )
        ]
    )


def tail(costs: Costs, stages: Stages, forward: tuple[Block, ...]) -> Block:
    """The norm of the gradients, the optimizer, the time of the host, and the exposed part of
    parameter gathering. Without a backward, there is only the host.
    """
    training = costs.training
    constant = costs.kernels.constant_s  # What a step takes besides its kernels.
    host = [segment([Kernel("host", "", constant)])] if constant else []
    if training.forward_only:
        return block([(host, 1)])
    of_ranks = [stages.held_by_rank(rank) for rank in range(costs.layout.pp)]
    shards_of = [sharded_parameters(costs, sum_held(of_rank)) for of_rank in of_ranks]
    shard = max(shards_of)
    segments = []
    if training.optimizer == "adam":
        norm = costs.collective("all_reduce", 4, group_of("all", costs.layout))
        read = [costs.move("optimizer", 4 * shard)] if not training.plain else []
        segments.append(segment(read, norm if costs.layout.world_size > 1 else None))
    # Reads gradient, moments and the master copy; writes all but the gradient and a copy.
    num_bytes = 12 + 2 * costs.moment_bytes + costs.copy_bytes * costs.activation_bytes / 4
    # What the host updates (HybridDeviceOptimizer of Megatron-Core) runs after its gradients have
    # arrived, and before its weights are sent back.
    away = costs.optimizer_on_host * shard
    if not training.plain:
        on_device = [costs.move("optimizer", num_bytes * (shard - away))]
    else:
        rank = shards_of.index(shard)
        held = tuple(part for stage in stages.of_rank(rank) for part in stages.parts[stage])
        on_device = optimizer_of(costs, shard - away, tensors_of(costs, held))
    segments += [segment([*on_device, *costs.on_host(away, num_bytes * away)]), *host]
    if 0 < training.zero < 3:
        rank = shards_of.index(shard)
        of_stages = zip(*of_ranks[rank], strict=True)
        parts = [part for stage in stages.of_rank(rank) for part in stages.parts[stage]]
        sizes = gathered_bytes(costs, tuple(parts))
        for parameters, size, group in zip(of_stages, sizes, costs.replicas, strict=True):
            if group.size == 1 or not sum(parameters):
                continue
            kernel = _gathered(costs, size, instance(costs, group))
            if training.overlap_param_gather:
                kernel = _hide(costs, kernel, stages, rank, parameters, block_means(forward))
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


def _hide(
    costs: Costs,
    kernel: Kernel,
    stages: Stages,
    rank: int,
    parameters: Sequence[float],
    beside: Sequence[float],
) -> Kernel:
    """The exposed part of an all_gather of the `parameters` of a rank's stages that overlaps with
    the forward, which takes `beside` seconds in each stage.

    The first microbatch of each stage needs the parameters of that stage. On a rank with several
    stages, they can be gathered during one round of microbatches in the other stages. At the very
    start, the parameters of one layer are always exposed.
    """
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
    exposed = kernel.mean - max(hidden, 0.0)
    return msgspec.structs.replace(kernel, size=f"{kernel.size} exposed", mean=exposed)
