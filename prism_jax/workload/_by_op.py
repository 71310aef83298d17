"""Recomputation by ops: what a layer keeps of its forward, and what its backward runs again.

As torchtitan's selective activation checkpointing (torchtitan/distributed/activation_checkpoint.py,
with the option `op`): kept are the input of a layer, the results of every other matrix product in
their order, of fused attention, and of reduce_scatters and all_to_alls; the rest runs again. The
router, and grouped products of experts, are not counted and run again. With
`recompute_early_stop`, what only the next layer reads is neither kept nor made again.
"""

import itertools as it
from collections import Counter

from ._architecture import LayerPart
from ._block import Kernel, Result, Segment, Segments
from ._costs import Costs
from ._parts import segment


def kept_results(costs: Costs, part: LayerPart) -> dict[str, float]:
    """The bytes that a layer keeps besides its input; none if it does not recompute by ops."""
    kept, _ = _dealt(costs, part)
    return {"results": sum(result.num_bytes for result in kept)} if kept else {}


def without_kept(costs: Costs, part: LayerPart, segments: Segments) -> Segments:
    """Of the segments of a layer's forward, what runs again. What tensor- and context-parallel
    ranks gather for a product, they gather in the backward anyway.
    """
    kept, remade = _dealt(costs, part)
    if not kept:
        return segments
    # The last product is gone already, if it may be.
    products = {result.of for result in (*kept, *remade)}

    def without_products(whole: Segment) -> Segment:
        counts: Counter[Kernel] = Counter()
        rows = (whole.kernels, *(branches.compute for branches in whole.branches))
        for kernel, count in it.chain.from_iterable(rows):
            if kernel not in products and kernel.kind != "attention":
                counts[kernel] += count
        last = whole.collective
        again = last and (last.kind, last.group) in (("all_reduce", "tp"), ("all_gather", "etp"))
        return Segment(tuple(counts.items()), last if again else None, members=whole.members)

    products_again = (result.again for result in remade if result.again)
    return [*map(without_products, segments), segment(products_again)]


def _dealt(costs: Costs, part: LayerPart) -> tuple[list[Result], list[Result]]:
    """The results that a layer keeps, and those that it makes again."""
    if costs.training.recompute != "by-op" or not part.is_layer:
        return [], []
    costs = part.costs(costs)
    results = [result for module in part.modules for result in module.results(costs)]
    last = part.modules[-1].last_product(costs)
    if costs.training.recompute_early_stop and last is not None:
        results = results[:-1]
    dealt: tuple[list[Result], list[Result]] = [], []
    turns = it.accumulate(result.of is not None for result in results)
    for result, turn in zip(results, turns, strict=True):
        dealt[result.again is not None and turn % 2 == 0].append(result)
    return dealt
