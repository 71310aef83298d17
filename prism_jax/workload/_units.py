"""Units of parameters one after the other, each beside the collectives of its neighbours.

As PyTorch's FSDP runs them: while a unit computes, the parameters of the next are gathered, and the
gradients of the one before are dealt, on a stream of their own. Nothing hides what the first unit
gathers and what the last one deals.
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

    - `segments`: what it runs.
    - `gathers`: the collectives that make its parameters whole, before it runs.
    - `reductions`: those that reduce its gradients, after it.
    """

    segments: list[Segment]
    gathers: tuple[Kernel, ...] = ()
    reductions: tuple[Kernel, ...] = ()


def row_of_units(costs: Costs, units: Sequence[tuple[Unit, int]]) -> Block:
    """The block of units in the order in which they run, each with how often in a row.

    Units with equal neighbours are one segment, with how often it occurs.
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
    """Where ranks wait for nobody within a unit, all who share its parameters do at its end."""
    if costs.layout.tp * costs.layout.cp > 1:
        return within
    ranks = costs.dp.size // costs.training.optimizer_instances

    def wait(one: Segment) -> Segment:
        known = one.members or one.collective or one.branches
        return one if known else msgspec.structs.replace(one, members=ranks)

    return tuple((wait(one), times) for one, times in within)
