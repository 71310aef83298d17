"""From a job to the kernels of its step."""

import functools as ft
import math
from collections.abc import Callable, Sequence

import msgspec

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._architecture import Part, Parts, recomputed
from ._block import Block, Segment, Workload
from ._costs import Costs
from ._layer import backward_part, backward_weight_part, forward_part
from ._parts import block
from ._replicas import reduce_scatters, tail
from ._split import Stages, check_split, deal, pairs_of_ranks


def lower(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    training: Training,
    cluster: Cluster,
    kernels: Kernels,
    stage_to_rank: Sequence[int],
) -> Workload:
    """The kernels of one training step, with their mean latencies.

    **Arguments:**

    - `model`, `layout`, `schedule`, `training`: what is trained and how it is laid out.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.
    - `stage_to_rank`: the pipeline rank of each global virtual stage.

    **Returns:**

    The blocks of each stage and phase, and what follows the pipeline.

    **Raises:**

    A `ValueError` where the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    waited = (layout.dp / kernels.num_replicas) ** kernels.growth
    kernels = msgspec.structs.replace(
        kernels, compute=waited * kernels.compute, floor_s=training.launch_floor_s
    )
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    forward = _blocks(stages.parts, lambda part: forward_part(costs, part))
    backward = _backward_blocks(costs, stages, weights=True)
    return Workload(
        forward=forward,
        backward=backward,
        backward_input=_backward_blocks(costs, stages, weights=False),
        backward_weight=_blocks(stages.parts, lambda part: backward_weight_part(costs, part)),
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reduce_scatter=reduce_scatters(costs, stages, backward),
        tail=tail(costs, stages, forward),
        members=layout.tp * layout.cp,
        group_size=math.lcm(layout.tp * layout.cp, costs.expert_ranks or 1),
    )


def _backward_blocks(costs: Costs, stages: Stages, *, weights: bool) -> tuple[Block, ...]:
    """The backward of each stage, some of whose layers may be computed again."""

    @ft.cache
    def segments_of(part: Part, again: bool) -> list[Segment]:
        return backward_part(costs, part, again=again, weights=weights)

    @ft.cache
    def block_of(parts: Parts) -> Block:
        return block(
            (segments_of(one.part, one.again), one.count)
            for one in recomputed(parts, costs.training)
        )

    return tuple(map(block_of, stages.parts))


def _blocks(
    stages: Sequence[Parts], segments_of: Callable[[Part], list[Segment]]
) -> tuple[Block, ...]:
    """The block of each stage, given the segments of each part."""
    segments_of = ft.cache(segments_of)

    @ft.cache
    def block_of(parts: Parts) -> Block:
        return block((segments_of(part), count) for part, count in parts)

    return tuple(map(block_of, stages))
