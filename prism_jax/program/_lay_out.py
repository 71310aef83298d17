from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._misc import FrozenArray
from ..workload import Block, Branches, Kernel, Row, Segment, rows_of
from ._collapse import Blocks


# What a place of a sequence does: see `_steps`.
ALONE, CLOSES, STARTS, BESIDE, ROW_ENDS, MEETS = range(6)


def lay_out(
    classes: Sequence[tuple[Block, int]], kernels: Mapping[Kernel, int]
) -> tuple[Blocks, tuple[FrozenArray, ...]]:
    """The static matrices of the collapse, and each class as a sequence for `"kernel"`."""
    rows = _Rows({}, {})
    class_segments: list[dict[int, int]] = []
    class_branches: list[dict[int, int]] = []
    collectives = np.zeros((len(classes), len(kernels)), np.int64)
    direct = np.full(len(classes), -1, np.int64)
    compute = np.zeros(len(classes), bool)
    sequences = []
    for c, (block, members) in enumerate(classes):
        class_segments.append({})
        class_branches.append({})
        sequence: list[tuple[int, int]] = []
        for segment, repeats in block:
            alone, beside = rows.add(segment, segment.members or members)
            for contains, numbers in ((class_segments[c], alone), (class_branches[c], beside)):
                for number in numbers:
                    contains[number] = contains.get(number, 0) + repeats
            compute[c] |= any(row for row, by_member in rows_of(segment) if by_member)
            if segment.collective is not None:
                collectives[c, kernels[segment.collective]] += repeats
            sequence.extend(list(_steps(segment, beside, kernels)) * repeats)
        sequences.append(FrozenArray(np.array(sequence, np.int64).reshape(-1, 2)))
        calls = count_calls(block, 1)
        if sum(calls.values()) == 1 and (members == 1 or not compute[c]):
            direct[c] = kernels[next(iter(calls))]
    segments, branches = list(rows.segments), list(rows.branches)
    counts = np.zeros((len(segments), len(kernels)), np.int64)
    for (run, _), s in rows.segments.items():
        for kernel, count in run:
            counts[s, kernels[kernel]] += count
    blocks = Blocks(
        segments=FrozenArray(counts),
        members=FrozenArray(np.array([members for _, members in segments], np.int64)),
        class_segments=_counts(class_segments, len(segments)),
        class_collectives=FrozenArray(collectives),
        direct=FrozenArray(direct),
        compute=FrozenArray(compute),
        class_branches=_counts(class_branches, len(branches)),
        **_branch_arrays(branches, len(segments), kernels),
    )
    return blocks, tuple(sequences)


class _Rows(NamedTuple):
    """The different rows that members run, and branches, numbered as they are added.

    Branches are known by the row of what precedes them, that of all up to their end (-1 for
    nothing), and what runs in them.
    """

    segments: dict[tuple[Row, int], int]
    branches: dict[tuple[int, int, Branches], int]

    def add(self, segment: Segment, members: int) -> tuple[list[int], list[int]]:
        """The number of the row of what members run alone, if any, and of the branches."""
        row, branches = segment.kernels, []
        before = alone = self._row(row, members)
        for one in segment.branches:
            # Members do not wait for one another between branches.
            row += one.compute
            key = (before, before := self._row(row, members), one)
            branches.append(self.branches.setdefault(key, len(self.branches)))
        return [alone] if alone >= 0 else [], branches

    def _row(self, row: Row, members: int) -> int:
        return self.segments.setdefault((row, members), len(self.segments)) if row else -1


def _branch_arrays(
    branches: Sequence[tuple[int, int, Branches]], num_segments: int, kernels: Mapping[Kernel, int]
) -> dict[str, FrozenArray]:
    compute = np.zeros((len(branches), num_segments), np.int64)
    most = max((len(one.communication) for _, _, one in branches), default=0)
    communication = np.zeros((len(branches), most, len(kernels)), np.int64)
    for b, (alone, whole, one) in enumerate(branches):
        if whole != alone:
            compute[b, whole] += 1
            if alone >= 0:
                compute[b, alone] -= 1
        for row, run in enumerate(one.communication):
            for kernel, count in run:
                communication[b, row, kernels[kernel]] += count
    slowdowns = np.array([one.slowdowns for _, _, one in branches], float).reshape(-1, 2)
    return {
        "branch_compute": FrozenArray(compute),
        "branch_communication": FrozenArray(communication),
        "slowdowns": FrozenArray(slowdowns),
    }


def _counts(contained: Sequence[dict[int, int]], number: int) -> FrozenArray:
    """How often each class contains each of so many things."""
    counts = np.zeros((len(contained), number), np.int64)
    for c, contains in enumerate(contained):
        for which, count in contains.items():
            counts[c, which] = count
    return FrozenArray(counts)


def _steps(
    segment: Segment, numbers: Sequence[int], kernels: Mapping[Kernel, int]
) -> Iterator[tuple[int, int]]:
    """A segment kernel by kernel: which, or -1, and what it does.

    `ALONE`: each member runs it by itself. `STARTS`: branches start. `BESIDE`: a collective beside
    compute, `ROW_ENDS` after the last of a row. `MEETS`: the branches, whose number it is, end.
    `CLOSES`: the members wait for one another, and run the collective.
    """
    compute = [(kernels[k], ALONE) for k, count in segment.kernels for _ in range(count)]
    yield from compute
    for number, branches in zip(numbers, segment.branches, strict=True):
        yield -1, STARTS
        for kernel, count in branches.compute:
            yield from [(kernels[kernel], ALONE)] * count
        for row in branches.communication:
            for kernel, count in row:
                yield from [(kernels[kernel], BESIDE)] * count
            yield -1, ROW_ENDS
        yield number, MEETS
    if segment.collective is not None:
        yield kernels[segment.collective], CLOSES
    elif compute or segment.branches:
        yield -1, CLOSES


def count_calls(block: Block, members: int) -> dict[Kernel, int]:
    """How often a block calls each kernel: compute by every member, a collective once."""
    calls: dict[Kernel, int] = {}
    for segment, repeats in block:
        for row, by_member in rows_of(segment):
            for kernel, count in row:
                each = count * (members if by_member else 1)
                calls[kernel] = calls.get(kernel, 0) + repeats * each
    return calls
