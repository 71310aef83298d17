"""Builds segments and blocks from kernels."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ._block import Block, Branches, Kernel, Load, Row, Segment, Segments


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


def without(kernels: Row, kernel: Kernel) -> Row:
    """A row in which one kernel runs one time fewer."""
    counts = Counter(dict(kernels))
    counts[kernel] -= 1
    return tuple((+counts).items())


def without_end(segments: Segments, product: Kernel) -> Segments:
    """The segments of a module before its last product, with which its output is scattered."""
    *before, last = segments
    if product in dict(last.kernels):
        return [*before, Segment(without(last.kernels, product), None, last.branches)]
    return [*before, Segment(last.kernels, None, last.branches[:-1])]


def block(parts: Iterable[tuple[Segments, int]]) -> Block:
    """A block of lists of segments, each with how often it occurs.

    Segments without a collective, at which members do not wait, are merged.
    """
    counts: Counter[Segment] = Counter()
    loose: Counter[Kernel] = Counter()
    for segments, times in parts:
        for segment in segments:
            if times == 0 or not (
                segment.kernels or segment.collective or segment.branches or segment.before
            ):
                continue
            if not closes(segment):
                for kernel, count in segment.kernels:
                    loose[kernel] += count * times
            else:
                counts[segment] += times
    if loose:
        counts[Segment(tuple(loose.items()))] += 1
    return tuple(counts.items())


def closes(segment: Segment) -> bool:
    """Whether members of a segment wait for one another."""
    return bool(segment.collective or segment.branches or segment.members)


def until_all(parts: Iterable[tuple[Segments, int]], last: Segment) -> Segments:
    """Lists of segments, each with how often it occurs, and a segment for whose end all of its
    members wait: those of smaller groups do not wait for one another before.
    """
    inner = block([*parts, ([Segment(last.kernels)], 1)])
    if not any(closes(segment) for segment, _ in inner):
        kernels = inner[0][0].kernels if inner else ()
        return [msgspec.structs.replace(last, kernels=kernels)]
    wait = Segment((), last.collective, (), last.members, inner)
    if not last.branches:
        return [wait]
    without_kernels = msgspec.structs.replace(last, kernels=())
    return [msgspec.structs.replace(wait, collective=None), without_kernels]


def rows_of(segment: Segment) -> Iterator[tuple[Row, bool]]:
    """The rows of kernels of a segment, and whether each is run by every member by itself."""
    yield segment.kernels, True
    yield from _rows_of_block(segment.before)
    for branches in segment.branches:
        yield branches.compute, True
        yield from _rows_of_block(branches.within)
        for communication in branches.communication:
            yield communication, False
    if segment.collective is not None:
        yield ((segment.collective, 1),), False


def _rows_of_block(parts: Block) -> Iterator[tuple[Row, bool]]:
    for segment, times in parts:
        for kernels, by_member in rows_of(segment):
            yield tuple((kernel, count * times) for kernel, count in kernels), by_member


def block_mean(parts: Block) -> float:
    """The latency of a block of constant kernels, in seconds."""
    return sum((times * _segment_mean(segment) for segment, times in parts), start=0.0)


def block_means(blocks: Sequence[Block]) -> tuple[float, ...]:
    """`block_mean` of each, computed once for a block that stages share, as most do."""
    means = {
        key: block_mean(block) for key, block in {id(block): block for block in blocks}.items()
    }
    return tuple(means[id(block)] for block in blocks)


def split_mean(parts: Block) -> tuple[dict[str, float], dict[str, float]]:
    """The latency of a block of constant kernels, split into compute by kind and exposed
    collectives by group, in seconds. The two add up to `block_mean`.
    """
    compute: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[str, float] = defaultdict(float)
    for segment, times in parts:
        for kernels in (segment.kernels, *(branches.compute for branches in segment.branches)):
            for kernel, count in kernels:
                compute[kernel.kind] += times * count * _mean(kernel)
        for inner in (segment.before, *(branches.within for branches in segment.branches)):
            for total, of_inner in zip((compute, exposed), split_mean(inner), strict=True):
                for name, seconds in of_inner.items():
                    total[name] += times * seconds
        for branches in segment.branches:
            longest = max(branches.communication, key=_row_mean)
            waiting = _branches_mean(branches) - _compute_mean(branches)
            exposed[longest[0][0].group] += times * waiting
        if segment.collective:
            exposed[segment.collective.group] += times * _mean(segment.collective)
    return compute, exposed


def _segment_mean(segment: Segment) -> float:
    mean = (
        _row_mean(segment.kernels)
        + block_mean(segment.before)
        + (_mean(segment.collective) if segment.collective else 0.0)
    )
    return mean + sum(map(_branches_mean, segment.branches))


def _branches_mean(branches: Branches) -> float:
    alpha, beta = branches.slowdowns
    compute = _compute_mean(branches)
    longest = max(map(_row_mean, branches.communication))
    return max(longest + beta * compute, compute + alpha * longest)


def _compute_mean(branches: Branches) -> float:
    return _row_mean(branches.compute) + block_mean(branches.within)


def _row_mean(kernels: Row) -> float:
    return sum(_mean(kernel) * count for kernel, count in kernels)


def _mean(kernel: Kernel) -> float:
    """The mean latency of a kernel on the rank for which all others wait."""
    return kernel.mean if kernel.load is None else kernel.mean * fullest_mean(kernel.load)


def fullest_mean(load: Load) -> float:
    """The mean load of the fullest member over that of all, of the law that programs have."""
    from ..loads import mean_of_fullest  # Slow to import, and rarely needed.

    sizes = load.members, load.counts, load.experts
    return mean_of_fullest(load.concentration, *sizes, load.capacity, load.popularity)
