"""Building blocks out of kernels."""

from collections import Counter
from collections.abc import Iterable, Iterator

from ._block import Block, Branches, Kernel, Row, Segment


def segment(
    kernels: Iterable[Kernel],
    collective: Kernel | None = None,
    *branches: Branches,
    members: int | None = None,
) -> Segment:
    """A segment of these kernels, each counted once."""
    return Segment(row(kernels), collective, branches, members)


def row(kernels: Iterable[Kernel]) -> Row:
    """Serial kernels, each counted once."""
    return tuple(Counter(kernels).items())


def without(kernels: Row, one: Kernel) -> Row:
    """A row in which one kernel runs once less."""
    counts = Counter(dict(kernels))
    counts[one] -= 1
    return tuple((+counts).items())


def block(parts: Iterable[tuple[list[Segment], int]]) -> Block:
    """A block of lists of segments, each with how often it occurs.

    Segments without a collective where nobody is said to wait become one.
    """
    counts: Counter[Segment] = Counter()
    loose: Counter[Kernel] = Counter()
    for segments, times in parts:
        for one in segments:
            if times == 0 or not (one.kernels or one.collective or one.branches):
                continue
            if one.collective is None and not one.branches and one.members is None:
                for kernel, count in one.kernels:
                    loose[kernel] += count * times
            else:
                counts[one] += times
    if loose:
        counts[Segment(tuple(loose.items()))] += 1
    return tuple(counts.items())


def rows_of(one: Segment) -> Iterator[tuple[Row, bool]]:
    """The rows of kernels of a segment, and whether each is run by every member by itself."""
    yield one.kernels, True
    for branches in one.branches:
        yield branches.compute, True
        for communication in branches.communication:
            yield communication, False
    if one.collective is not None:
        yield ((one.collective, 1),), False


def block_mean(parts: Block) -> float:
    """The latency of a block of constant kernels, in seconds."""
    return sum(times * _segment_mean(one) for one, times in parts)


def _segment_mean(one: Segment) -> float:
    mean = _row_mean(one.kernels) + (one.collective.mean if one.collective else 0.0)
    for branches in one.branches:
        alpha, beta = branches.slowdowns
        compute = _row_mean(branches.compute)
        longest = max(map(_row_mean, branches.communication))
        mean += max(longest + beta * compute, compute + alpha * longest)
    return mean


def _row_mean(kernels: Row) -> float:
    return sum(kernel.mean * count for kernel, count in kernels)
