"""The classes of a program's ops, as index arrays: all that their laws depend on but parameters."""

import dataclasses

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int, Real

from .._padding import AnyArray, bucket, pad
from ..latency import log_sigma
from ..loads import Loads, with_draws
from ..program import KINDS, Blocks, Overlaps, Program, sizes_of


class Mixed(eqx.Module):
    """The kinds of law among some classes. Kinds that do not occur cost nothing. Static.

    **Attributes:**

    - `collapsed`: whether some class has several kernels.
    - `single`: whether some class is one kernel with a law of its own.
    """

    collapsed: bool = eqx.field(static=True)
    single: bool = eqx.field(static=True)


class Classes(eqx.Module):
    """The arrays that the tables of a plan depend on: those of the classes of ops, without the
    graph.

    **Attributes:**

    - `blocks`: the contents of the classes, with the groups of GPUs of members.
    - `kind`, `on_network`: for each kernel, its kind, numbered as in `all_kinds`; and whether the
        network's regime acts on it.
    - `members`: groups of GPUs: of a rank, of all ranks, and of a rank again for each size of those
        that wait for one another in it: how many GPUs each has, the size, and how many GPUs are
        averaged.
    - `worker`: how many GPUs a worker has, where workers have factors of their own and wait for one
        another; else `None`.
    - `loads`: the loads of members of expert-parallel groups; `None` if they are equal.
    - `stalling`: whether a kernel has stalls of a kind; `None` if nothing stalls.
    - `stall_kind`, `stall_class`, `stall_calls`: the kind, the class of ops and the calls of each
        entry of `Replica.stall_op`.
    - `most_stalls`: the largest number of stalls of any stratum.
    - `tables`: whether some op needs the table of a law.
    - `stall_counts`: how many stalls of a sample there is room for.
    """

    blocks: Blocks
    kind: Int[AnyArray, " kernels"]
    on_network: Bool[AnyArray, " kernels"]
    members: Real[AnyArray, "3 gpu_groups"]
    worker: Float[AnyArray, ""] | None
    loads: Loads | None
    stalling: Bool[AnyArray, "kinds kernels"] | None
    stall_kind: Int[AnyArray, " stalls"] | None
    stall_class: Int[AnyArray, " stalls"] | None
    stall_calls: Real[AnyArray, " stalls"] | None
    most_stalls: int | Int[AnyArray, ""]
    tables: bool = eqx.field(static=True)
    stall_counts: int = eqx.field(static=True)


def classes_of(program: Program) -> Classes:
    """The classes of a program's ops, of which only branches are padded."""
    table, direct, laws = program.latencies, program.blocks.direct, program.variability
    kind = np.array(table.kind, int)
    names = np.array(table.kinds or [""])
    stalls = bool(len(program.stall_ops))
    blocks, members, worker = _on_gpus(program)
    most = max(stratum.stalls for stratum in program.strata)
    single = [laws.residual[name] for name in names[np.unique(kind[direct[direct >= 0]])].tolist()]
    return Classes(
        blocks=blocks,
        kind=np.searchsorted(all_kinds(program), names)[kind],
        on_network=table.on_network,
        members=members,
        worker=worker,
        loads=program.loads and with_draws(program.loads),
        stalling=names[kind] == np.array(sorted(laws.stalls))[:, None] if stalls else None,
        stall_kind=program.stall_kinds if stalls else None,
        stall_class=program.rows.class_[program.ops.row][program.stall_ops] if stalls else None,
        stall_calls=program.stall_counts if stalls else None,
        most_stalls=most,
        tables=None in map(log_sigma, single),
        stall_counts=bucket(most, 4) if stalls else 0,
    )


def all_kinds(program: Program) -> tuple[str, ...]:
    """Kinds of kernels in a fixed order, also those that the program has none of: so that jobs with
    and without a kind share compiled code.
    """
    return tuple(sorted({*KINDS, *program.variability.residual}))


def mixed_of(direct: np.ndarray) -> Mixed:
    """The kinds of law among classes, from their `direct` of `Blocks`."""
    return Mixed(collapsed=bool((direct < 0).any()), single=bool((direct >= 0).any()))


def _on_gpus(program: Program) -> tuple[Blocks, np.ndarray, np.ndarray | None]:
    """The contents of classes, each segment and wait with its group of GPUs; and `members` and
    `worker` of `Classes`.
    """
    blocks, size, laws = program.blocks, program.group_size, program.variability
    dtype, waits, worker, alone = program.latencies.mean.dtype, blocks.waits, None, size
    if program.worker_size < size and (laws.worker_step, laws.microbatch) != (None, None):
        alone, worker = program.worker_size, np.asarray(program.worker_size, dtype)
    contained, members = np.zeros((len(blocks.direct), 0)), np.zeros(0, int)
    if blocks.segments is not None:
        contained, members = np.asarray(blocks.class_segments), np.asarray(blocks.members)
    in_tail = (contained[program.tail] > 0) & (program.tail >= 0)
    wait = ~in_tail & (members > alone)
    # Of groups that wait for one another in a rank, or of single GPUs, the size, and how many GPUs
    # wait, which are more than the rank has where they are lines of GPUs of several ranks.
    sizes = np.ones(wait.sum() + (worker is not None), int)
    gpus = np.append(members[wait], [size] if worker is not None else [])
    if waits is not None:
        sizes, gpus = np.append(sizes, waits.size), np.append(gpus, waits.count * waits.size)
    pairs = np.stack([sizes, np.maximum(gpus, size)], axis=1).astype(int)
    pairs, place = np.unique(pairs, axis=0, return_inverse=True)
    of_rank = np.stack([np.full(len(pairs), size), pairs[:, 0], pairs[:, 1] / size])
    groups = np.array([[size, program.world_size], [1, 1], [1, 1]])
    groups = np.concatenate([groups, of_rank], axis=1).astype(dtype)
    if blocks.segments is None:
        return blocks, groups, worker
    group, place = in_tail.astype(int), 2 + place.reshape(-1)
    group[wait] = place[: wait.sum()]
    if waits is not None:
        count = np.minimum(waits.count, size // waits.size)
        waits = dataclasses.replace(waits, count=count, group=place[-len(count) :])
    blocks = dataclasses.replace(
        blocks,
        members=np.where(in_tail, members, np.minimum(members, size)),
        branches=_padded(blocks.branches, program, "segments"),
        outer_branches=_padded(blocks.outer_branches, program, "classes"),
        waits=waits,
        group=group,
    )
    return blocks, groups, worker


def _padded(branches: Overlaps | None, program: Program, inner: str) -> Overlaps | None:
    """Branches with room for more; their inner axis is that of segments or of classes."""
    if branches is None:
        return None
    sizes = sizes_of(program)
    room = {"inner": sizes[inner], "branches": bucket(len(branches.slowdowns), 8)}
    return pad(branches, sizes | room, program.latencies.mean.dtype)
