"""The contents of a program's classes of ops, as arrays padded to buckets of shapes."""

import jax
import numpy as np
from jaxtyping import Array, Shaped

from ..collapse import Collapse, Overlaps, Sides
from ..maxplus import bucket
from ._program import Program


def collapse_of(program: Program) -> Collapse:
    """The contents of the classes of a program."""
    blocks, dtype = program.blocks, program.latencies.mean.dtype
    members = blocks.members.value
    num_segments = bucket(len(members), 32)
    num_kernels, num_classes = kernels_of(program), classes_of(program)
    return Collapse(
        segments=_matrix(blocks.segments.value, (num_segments, num_kernels), dtype),
        class_segments=_matrix(blocks.class_segments.value, (num_classes, num_segments), dtype),
        class_collectives=_matrix(
            blocks.class_collectives.value, (num_classes, num_kernels), dtype
        ),
        members=_matrix(members, (num_segments,), dtype),
        # A group as large as the world is the world.
        group=_matrix(members > program.group_size, (num_segments,), np.int32),
        overlaps=_overlaps(program, blocks.branches, num_segments),
        outer_overlaps=_overlaps(program, blocks.outer_branches, num_classes),
        loads=program.loads and program.loads.of_kernels(num_kernels, dtype),
    )


def _overlaps(program: Program, sides: Sides, num_inner: int) -> Overlaps | None:
    dtype = program.latencies.mean.dtype
    number, rows, _ = sides.communication.value.shape
    if not number:
        return None
    room, num_classes = bucket(number, 8), classes_of(program)
    kernels = (room, rows, kernels_of(program))
    return Overlaps(
        compute=_matrix(sides.compute.value, (room, num_inner), dtype),
        communication=_matrix(sides.communication.value, kernels, dtype),
        slowdowns=_matrix(sides.slowdowns.value, (room, 2), dtype),
        classes=_matrix(sides.classes.value, (num_classes, room), dtype),
    )


def classes_of(program: Program) -> int:
    """How many classes there is room for."""
    return bucket(len(program.blocks.direct.value), 64)


def kernels_of(program: Program) -> int:
    """How many kernels there is room for."""
    return bucket(len(program.latencies.kind.value), 64)


def _matrix(array: np.ndarray, shape: tuple[int, ...], dtype) -> Shaped[Array, "..."]:
    whole = np.zeros(shape, dtype)
    whole[tuple(map(slice, array.shape))] = array
    return jax.device_put(whole)
