"""Lowers a job to the kernels of its step."""

import functools as ft
import math
from collections.abc import Callable, Sequence

import msgspec

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._architecture import Part, Parts, Recomputed, recomputed
from ._block import Block, Workload
from ._costs import Costs
from ._layer import backward_part, backward_weight_part, forward_part
from ._passes import passes_of
from ._received import with_received
from ._reductions import reductions_of_ranks
from ._replicas import tail
from ._sharded import beside_layers, gathers, gathers_again, reductions
from ._split import Stages, check_split, deal, pairs_of_ranks
from ._units import Unit, row_of_units


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

    - `model`, `layout`, `schedule`, `training`: the model, and how it is trained.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.
    - `stage_to_rank`: the pipeline rank of each global virtual stage.

    **Returns:**

    The blocks of each stage and phase, and those that run after the pipeline.

    **Raises:**

    A `ValueError` if the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    waited = (layout.dp / kernels.num_replicas) ** kernels.growth
    kernels = msgspec.structs.replace(
        kernels, compute=waited * kernels.compute, floor_s=training.launch_floor_s
    )
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    forward = _blocks(costs, stages, lambda one: _forward(costs, one.part))
    forward = with_received(costs, stages, forward, -1)
    backward, backward_input = (
        _blocks(costs, stages, lambda one, w=weights: _backward(costs, one, weights=w), back=True)
        for weights in (True, False)
    )
    return Workload(
        forward=forward,
        backward=with_received(costs, stages, backward, 1),
        backward_input=with_received(costs, stages, backward_input, 1),
        backward_weight=_blocks(costs, stages, lambda one: _weights(costs, one.part), back=True),
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reductions=reductions_of_ranks(costs, stages),
        contention=kernels.overlap.contention,
        tail=tail(costs, stages, forward),
        members=layout.tp * layout.cp,
        group_size=_group_size(costs),
        passes=passes_of(costs, stages),
    )


def _group_size(costs: Costs) -> int:
    """The number of ranks of a stage that meet in every microbatch."""
    layout = costs.layout
    if beside_layers(costs.training):
        return layout.tp * layout.cp * layout.dp
    return math.lcm(layout.tp * layout.cp, costs.expert_ranks or 1)


def _forward(costs: Costs, part: Part) -> Unit:
    return Unit(forward_part(costs, part), gathers(costs, part))


def _backward(costs: Costs, one: Recomputed, *, weights: bool) -> Unit:
    segments = backward_part(costs, one.part, again=one.again, weights=weights)
    dealt = reductions(costs, one.part) if weights else ()
    return Unit(segments, gathers_again(costs, one.part), dealt)


def _weights(costs: Costs, part: Part) -> Unit:
    return Unit(backward_weight_part(costs, part), (), reductions(costs, part))


def _blocks(
    costs: Costs, stages: Stages, unit_of: Callable[[Recomputed], Unit], *, back: bool = False
) -> tuple[Block, ...]:
    """The block of each stage in one phase, whose units run in order or `back` through it."""

    @ft.cache
    def unit(part: Part, again: bool) -> Unit:
        return unit_of(Recomputed(part, 1, again))

    @ft.cache
    def block_of(parts: Parts) -> Block:
        found = recomputed(parts, costs.training)
        runs = [(unit(one.part, one.again), one.count) for one in found]
        return row_of_units(costs, runs[::-1] if back else runs)

    return tuple(map(block_of, stages.parts))
