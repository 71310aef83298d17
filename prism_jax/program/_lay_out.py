from collections.abc import Mapping, Sequence

import numpy as np

from .._misc import FrozenArray
from ..workload import Block, Kernel
from ._collapse import Blocks


def lay_out(
    classes: Sequence[tuple[Block, int]], kernels: Mapping[Kernel, int]
) -> tuple[Blocks, tuple[FrozenArray, ...]]:
    """The static matrices of the collapse, and each class as a sequence for `"kernel"`."""
    segments: dict[tuple, int] = {}
    class_segments: list[dict[int, int]] = []
    collectives = np.zeros((len(classes), len(kernels)), np.int64)
    direct = np.full(len(classes), -1, np.int64)
    compute = np.zeros(len(classes), bool)
    sequences = []
    for c, (block, members) in enumerate(classes):
        contains: dict[int, int] = {}
        sequence = []
        for segment, repeats in block:
            if segment.kernels:
                compute[c] = True
                s = segments.setdefault((segment.kernels, members), len(segments))
                contains[s] = contains.get(s, 0) + repeats
            run = [(kernels[k], 0) for k, count in segment.kernels for _ in range(count)]
            if segment.collective is not None:
                k = kernels[segment.collective]
                collectives[c, k] += repeats
                run.append((k, 1))
            elif run:
                run.append((-1, 1))
            sequence.extend(run * repeats)
        class_segments.append(contains)
        sequences.append(FrozenArray(np.array(sequence, np.int64).reshape(-1, 2)))
        calls = count_calls(block, 1)
        if sum(calls.values()) == 1 and (members == 1 or not compute[c]):
            direct[c] = kernels[next(iter(calls))]
    counts = np.zeros((len(segments), len(kernels)), np.int64)
    for (run, _), s in segments.items():
        for kernel, count in run:
            counts[s, kernels[kernel]] += count
    contained = np.zeros((len(classes), len(segments)), np.int64)
    for c, contains in enumerate(class_segments):
        for s, count in contains.items():
            contained[c, s] = count
    blocks = Blocks(
        segments=FrozenArray(counts),
        members=FrozenArray(np.array([members for _, members in segments], np.int64)),
        class_segments=FrozenArray(contained),
        class_collectives=FrozenArray(collectives),
        direct=FrozenArray(direct),
        compute=FrozenArray(compute),
    )
    return blocks, tuple(sequences)


def count_calls(block: Block, members: int) -> dict[Kernel, int]:
    """How often a block calls each kernel: compute by every member, a collective once."""
    calls: dict[Kernel, int] = {}
    for segment, repeats in block:
        for kernel, count in segment.kernels:
            calls[kernel] = calls.get(kernel, 0) + repeats * count * members
        if segment.collective is not None:
            calls[segment.collective] = calls.get(segment.collective, 0) + repeats
    return calls
