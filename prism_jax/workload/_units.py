"""Consecutive units of parameters, each overlapped with the collectives of its neighbours.

They run as in PyTorch's FSDP: while a unit computes, the parameters of the next unit are gathered,
and the gradients of the previous unit are reduce-scattered, on a stream of their own. The gathers
of the first unit and the reductions of the last unit are exposed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ._block import Block, Kernel, Segment
from ._costs import Costs
from ._parts import block, segment


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
