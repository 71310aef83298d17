"""Recomputation by ops: what a layer keeps of its forward, and what its backward runs again.

As torchtitan's selective activation checkpointing (torchtitan/distributed/activation_checkpoint.py,
with the option `op`): kept are the input of a layer, the results of every other matrix product in
their order, of fused attention, and of reduce_scatters and all_to_alls; the rest runs again. The
router, and grouped products of experts, are not counted and run again. With
`recompute_early_stop`, what only the next layer reads is neither kept nor made again.
"""

import itertools as it
from collections import Counter

from ._architecture import Part
from ._block import Kernel, Result, Segment, Segments
from ._costs import Costs
from ._parts import segment


def kept_results(costs: Costs, part: Part) -> dict[str, float]:
    """The bytes that a layer keeps besides its input; none if it does not recompute by ops."""
    kept, _ = _dealt(costs, part)
    return {"results": sum(one.num_bytes for one in kept)} if kept else {}


def without_kept(costs: Costs, part: Part, segments: Segments) -> Segments:
    """Of the segments of a layer's forward, what runs again. What tensor- and context-parallel
    ranks gather for a product, they gather in the backward anyway.
    """
    kept, made = _dealt(costs, part)
    if not kept:
        return segments
    joined = {one.of for one in (*kept, *made)}  # The last product is gone already, if it may be.

    def left(one: Segment) -> Segment:
        counts: Counter[Kernel] = Counter()
        rows = (one.kernels, *(branches.compute for branches in one.branches))
        for kernel, count in it.chain.from_iterable(rows):
            if kernel not in joined and kernel.kind != "attention":
                counts[kernel] += count
        ends = one.collective
        again = ends and (ends.kind, ends.group) in (("all_reduce", "tp"), ("all_gather", "etp"))
        return Segment(tuple(counts.items()), ends if again else None, members=one.members)

    return [*map(left, segments), segment(one.again for one in made if one.again)]


def _dealt(costs: Costs, part: Part) -> tuple[list[Result], list[Result]]:
    """The results that a layer keeps, and those that it makes again."""
    if costs.training.recompute != "by-op" or not part.is_layer:
        return [], []
    costs = part.costs(costs)
    results = [one for module in part.modules for one in module.results(costs)]
    last = part.modules[-1].last_product(costs)
    if costs.training.recompute_early_stop and last is not None:
        results = results[:-1]
    dealt: tuple[list[Result], list[Result]] = [], []
    turns = it.accumulate(one.of is not None for one in results)
    for one, turn in zip(results, turns, strict=True):
        dealt[one.again is not None and turn % 2 == 0].append(one)
    return dealt
