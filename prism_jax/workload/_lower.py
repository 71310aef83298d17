"""Lowers a job to the kernels of its step."""

import functools as ft
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._architecture import Part, Parts, Recomputed, recomputed
from ._block import Block, Kernel, Segment, Workload
from ._costs import Costs
from ._layer import (
    backward_part,
    backward_weight_part,
    forward_part,
    launched,
    launches,
)
from ._parts import block, block_means, segment
from ._passes import passes_of
from ._received import with_received
from ._reductions import reductions_of_ranks
from ._sharded import beside_layers, copies, gathers, gathers_again, reductions
from ._split import Stages, check_split, deal, pairs_of_ranks
from ._tail import tail


class Unit(NamedTuple):
    """A layer, or an end of the model, in one phase.

    **Attributes:**

    - `segments`: its segments.
    - `gathers`: the collectives that gather its parameters before it runs.
    - `reductions`: the collectives that reduce its gradients after it has run.
    """

    segments: list[Segment]
    gathers: tuple[Kernel, ...] = ()
    reductions: tuple[Kernel, ...] = ()


def row_of_units(costs: Costs, units: Sequence[tuple[Unit, int]]) -> Block:
    """The block of units in the order in which they run, each with its number of repetitions.

    Units with equal neighbours become one segment with its number of occurrences.
    """
    order = [number for number, (_, count) in enumerate(units) for _ in range(count)]
    neighbours = Counter(zip([None, *order], order, [*order[1:], None], strict=False))

    def unit(number: int | None) -> Unit:
        return Unit([]) if number is None else units[number][0]

    return block(
        (list(_beside(costs, *map(unit, numbers))), times) for numbers, times in neighbours.items()
    )


def _beside(costs: Costs, before: Unit, unit: Unit, after: Unit) -> Iterator[Segment]:
    """A unit between two others, and the exposed part of its collectives."""
    ahead, behind = costs.training.prefetch > 0, costs.training.overlap_grad_reduce
    hidden = (after.gathers if ahead else ()) + (before.reductions if behind else ())
    if not (ahead and before.segments):
        yield from (segment([], one) for one in unit.gathers)
    if hidden:
        yield costs.beside_block(_all_wait(costs, block([(unit.segments, 1)])), hidden)
    else:
        yield from unit.segments
    if not (behind and after.segments):
        yield from (segment([], one) for one in unit.reductions)


def _all_wait(costs: Costs, within: Block) -> Block:
    """If ranks do not wait within a unit, all ranks that share its parameters wait at its end."""
    if costs.layout.tp * costs.layout.cp > 1:
        return within
    ranks = costs.dp.size // costs.training.optimizer_instances

    def wait(one: Segment) -> Segment:
        known = one.members or one.collective or one.branches
        return one if known else msgspec.structs.replace(one, members=ranks)

    return tuple((wait(one), times) for one, times in within)


def lower(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    training: Training,
    cluster: Cluster,
    kernels: Kernels,
    stage_to_rank: Sequence[int],
    phases: Collection[str] = ("F", "B", "I", "W", "FB"),
) -> Workload:
    """The kernels of one training step, with their mean latencies.

    **Arguments:**

    - `model`, `layout`, `schedule`, `training`: the model, and how it is trained.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.
    - `stage_to_rank`: the pipeline rank of each global virtual stage.
    - `phases`: the phases of the schedule's ops. What only others need is left out: the halves of a
        backward (`I`, `W`), and overlapped pairs (`FB`).

    **Returns:**

    The blocks of each stage and phase, and those that run after the pipeline.

    **Raises:**

    A `ValueError` if the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    waited = (layout.dp / kernels.num_replicas) ** kernels.growth
    kernels = msgspec.structs.replace(
        kernels,
        compute=waited * kernels.compute,
        floor_s=0.0 if training.cuda_graphs == "iteration" else training.launch_floor_s,
    )
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    forward = _blocks(costs, stages, lambda one: _forward(costs, one.part))
    forward = with_received(costs, stages, forward, -1)
    if training.forward_only:
        return _forwards(costs, stages, schedule, forward)
    backward = _blocks(costs, stages, lambda one: _backward(costs, one, weights=True), back=True)
    backward_input = backward_weight = ()
    if "I" in phases or "W" in phases:
        backward_input = _blocks(
            costs, stages, lambda one: _backward(costs, one, weights=False), back=True
        )
        backward_weight = _blocks(costs, stages, lambda one: _weights(costs, one.part), back=True)
    return Workload(
        forward=forward,
        backward=with_received(costs, stages, backward, 1),
        backward_input=with_received(costs, stages, backward_input, 1),
        backward_weight=backward_weight,
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reductions=reductions_of_ranks(costs, stages),
        contention=kernels.overlap.contention,
        tail=tail(_limited(costs, stages, schedule, forward, backward), stages, forward),
        members=layout.tp * layout.cp,
        group_size=_group_size(costs),
        passes=passes_of(costs, stages) if "FB" in phases else None,
    )


def _forwards(
    costs: Costs, stages: Stages, schedule: ScheduleConfig, forward: tuple[Block, ...]
) -> Workload:
    """The kernels of a step that has no backward, and so no gradients and no optimizer."""
    layout, none = costs.layout, tuple(() for _ in forward)
    host = _limited(costs, stages, schedule, forward, none).host()
    return Workload(
        forward=forward,
        backward=none,
        backward_input=(),
        backward_weight=(),
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reductions=tuple(() for _ in range(layout.pp)),
        contention=costs.kernels.overlap.contention,
        tail=block([([segment([host])], 1)]) if host.mean else (),
        members=layout.tp * layout.cp,
        group_size=_group_size(costs),
        passes=None,
    )


def _limited(
    costs: Costs,
    stages: Stages,
    schedule: ScheduleConfig,
    forward: Sequence[Block],
    backward: Sequence[Block],
) -> Costs:
    """The costs with the constant of a step limited by `Kernels.constant_share`."""
    kernels = costs.kernels
    if kernels.constant_share is None:
        return costs
    means = [sum(pair) for pair in zip(block_means(forward), block_means(backward), strict=True)]
    ranks = (sum(means[one] for one in stages.of_rank(r)) for r in range(costs.layout.pp))
    most = kernels.constant_share * schedule.num_microbatches * max(ranks)
    kernels = msgspec.structs.replace(kernels, constant_s=min(kernels.constant_s, most))
    return msgspec.structs.replace(costs, kernels=kernels)


def _group_size(costs: Costs) -> int:
    """The number of ranks of a stage that meet in every microbatch."""
    layout = costs.layout
    if beside_layers(costs.training):
        return layout.tp * layout.cp * layout.dp
    return math.lcm(layout.tp * layout.cp, costs.expert_ranks or 1)


def _forward(costs: Costs, part: Part) -> Unit:
    gathered = gathers(costs, part)
    copied = copies(costs, part, gathered=bool(gathered), reduced=False)
    segments = launched([*copied, *forward_part(costs, part)], launches(costs, part))
    return Unit(segments, gathered)


def _backward(costs: Costs, one: Recomputed, *, weights: bool) -> Unit:
    segments = backward_part(costs, one.part, again=one.again, weights=weights)
    segments = launched(segments, (2 if one.again else 1) * launches(costs, one.part))
    dealt = reductions(costs, one.part) if weights else ()
    gathered = gathers_again(costs, one.part)
    copied = copies(costs, one.part, gathered=bool(gathered), reduced=bool(dealt))
    return Unit([*segments, *copied], gathered, dealt)


def _weights(costs: Costs, part: Part) -> Unit:
    dealt = reductions(costs, part)
    copied = copies(costs, part, gathered=False, reduced=bool(dealt))
    return Unit([*backward_weight_part(costs, part), *copied], (), dealt)


def _blocks(
    costs: Costs, stages: Stages, unit_of: Callable[[Recomputed], Unit], *, back: bool = False
) -> tuple[Block, ...]:
    """The block of each stage in one phase, whose units run in order or `back` through it."""

    @ft.cache
    def unit(part: Part, again: bool) -> Unit:
        return unit_of(Recomputed(part, 1, again))

    @ft.cache
    def block_of(parts: Parts) -> Block:
        found = recomputed(parts, costs.training, back=back)
        runs = [(unit(one.part, one.again), one.count) for one in found]
        return row_of_units(costs, runs[::-1] if back else runs)

    return tuple(map(block_of, stages.parts))
