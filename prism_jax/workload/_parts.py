"""Building blocks out of kernels."""

from collections import Counter
from collections.abc import Iterable

from ._block import Block, Kernel, Segment


def segment(kernels: Iterable[Kernel], collective: Kernel | None = None) -> Segment:
    """A segment of these kernels, each counted once."""
    return Segment(tuple(Counter(kernels).items()), collective)


def block(parts: Iterable[tuple[list[Segment], int]]) -> Block:
    """A block of lists of segments, each with how often it occurs.

    Segments without a collective have nobody to wait for, so they become one.
    """
    counts: Counter[Segment] = Counter()
    loose: Counter[Kernel] = Counter()
    for segments, times in parts:
        for one in segments:
            if times == 0 or not (one.kernels or one.collective):
                continue
            if one.collective is None:
                for kernel, count in one.kernels:
                    loose[kernel] += count * times
            else:
                counts[one] += times
    if loose:
        counts[Segment(tuple(loose.items()))] += 1
    return tuple(counts.items())


def block_mean(parts: Block) -> float:
    """The latency of a block of constant kernels, in seconds."""
    return sum(
        times
        * (
            sum(kernel.mean * count for kernel, count in one.kernels)
            + (one.collective.mean if one.collective else 0.0)
        )
        for one, times in parts
    )
