"""Gradient reductions over the replicas: when they can start, and how long they take.

If reductions overlap with the backward, each virtual stage reduces its gradients after the backward
of its last microbatch. If gradients are sharded but accumulated first, it reduces them after each
row of its microbatches, so that at most two stages of a rank have unsharded gradients. Pipelines
and FSDP are combined in this way in Llama 3, whose authors shard gradients and optimizer and keep
parameters after the forward (Llama team 2024, arXiv:2407.21783, section 3.3.2). Megatron-LM splits
only the first stage of the first pipeline rank further, into buckets, because no compute comes
after it that could overlap with its reduction
(`megatron/core/distributed/distributed_data_parallel.py` and `megatron/training/training.py`).
"""

import functools as ft
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ..cluster import Group
from ._architecture import Part, reads_words_last, recomputed
from ._block import Block, Kernel, Reduction
from ._costs import Costs
from ._layer import backward_part
from ._parts import block, segment
from ._received import received
from ._sharded import GRADIENT_BYTES, deals_each_microbatch, instance, shards
from ._split import Held, Stages, held_of, parameters_of_rank, sum_held


# The fewest parameters of a bucket, and the fewest for each replica.
_BUCKET = 40_000_000
_BUCKET_PER_REPLICA = 1_000_000


def reductions_of_ranks(costs: Costs, stages: Stages) -> tuple[tuple[Reduction, ...], ...]:
    """The gradient reductions of each pipeline rank, each with the backward that it waits for."""
    row_of = ft.cache(lambda held: _row(_kernels(costs, held)))  # Most stages are equal.
    return tuple(tuple(_of_rank(costs, stages, rank, row_of)) for rank in range(costs.layout.pp))


def reduced_groups(costs: Costs) -> list[tuple[str, Group]]:
    """The fields of `Held` whose gradients are reduced, each with the group that reduces them."""
    groups = (("dense", costs.dp), ("experts", costs.edp))
    return [(part, group) for part, group in groups if group.size > 1]


def _of_rank(
    costs: Costs, stages: Stages, rank: int, row_of: Callable[[Held], Block]
) -> Iterator[Reduction]:
    last = _of_embedding(costs, stages, rank)
    share_gradients, share_parameters = shards(costs.training)
    # Each backward may have reduced its own gradients.
    if not deals_each_microbatch(costs.training) and reduced_groups(costs):
        if not costs.training.overlap_grad_reduce:
            held = sum_held(parameters_of_rank(costs.layout, stages, rank))
            last = [*_kernels(costs, held), *last]
        else:
            first = stages.of_rank(0)[0]
            for stage in stages.of_rank(rank):
                # Where parameters are gathered a backward is more than its pieces.
                cut = stage == first and not share_parameters
                for held, piece in _buckets(costs, stages, stage, cut=cut):
                    yield Reduction(row_of(held), (stage,), piece, each_turn=share_gradients)
    if last:
        yield Reduction(_row(last))


def _row(kernels: Iterable[Kernel]) -> Block:
    return block(([segment([], kernel)], 1) for kernel in kernels)


def _kernels(costs: Costs, held: Held) -> list[Kernel]:
    """The collectives that reduce the gradients of some parameters."""
    training = costs.training
    size = GRADIENT_BYTES[training.gradient_dtype]
    kernels = []
    for part, group in reduced_groups(costs):
        parameters = getattr(held, part)
        if parameters == 0:
            continue
        if training.zero:
            inner, outer = instance(group, training)
            kernels.append(costs.collective("reduce_scatter", size * parameters, inner))
            if outer.size > 1:
                share = size * parameters / inner.size
                kernels.append(costs.collective("all_reduce", share, outer))
        else:
            kernels.append(costs.collective("all_reduce", size * parameters, group))
    return kernels


def _of_embedding(costs: Costs, stages: Stages, rank: int) -> list[Kernel]:
    """The reduction over the first and the last stage, which both have a copy of the embedding."""
    layout, model, training = costs.layout, costs.model, costs.training
    if not (reads_words_last(model) and len(stages.ends) > 1 and rank in stages.ends):
        return []
    apart = max(stages.ends) - min(stages.ends)
    ends = Group("embedding", 2, apart * layout.tp * layout.cp * layout.dp)
    size = GRADIENT_BYTES[training.gradient_dtype]
    num_bytes = size * model.vocab_size * model.hidden_size / layout.tp
    if shards(training)[0]:
        num_bytes /= instance(costs.dp, training)[0].size
    return [costs.collective("all_reduce", num_bytes, ends)]


def _buckets(
    costs: Costs, stages: Stages, stage: int, *, cut: bool
) -> list[tuple[Held, Block | None]]:
    """The parameters of each bucket of a stage in the order of its backward, and the piece of the
    backward that ends with them; `None` if there is one bucket. Buckets end with layers.
    """
    whole = held_of(stages.parameters[stage], costs.layout)
    if not cut:
        return [(whole, None)]
    training = costs.training
    most = training.gradient_bucket_size
    most = most or max(_BUCKET, _BUCKET_PER_REPLICA * costs.layout.dp)
    pieces: list[list[tuple[Part, bool]]] = [[]]
    held = [Held(0.0, 0.0)]
    for part, count, again in reversed(recomputed(stages.parts[stage], training)):
        of_part = held_of(part.parameters(costs.model), costs.layout)
        for _ in range(count):
            if sum(held[-1]) >= most:
                pieces.append([])
                held.append(Held(0.0, 0.0))
            pieces[-1].append((part, again))
            held[-1] = sum_held([held[-1], of_part])
    if len(pieces) == 1:
        return [(whole, None)]

    @ft.cache
    def segments_of(part: Part, again: bool):
        return backward_part(costs, part, again=again)

    blocks = [
        block((segments_of(*one), count) for one, count in Counter(piece).items())
        for piece in pieces
    ]
    blocks[0] = received(costs, stages, stage, 1) + blocks[0]
    return list(zip(held, blocks, strict=True))
