import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..maxplus import bucket
from ..program import Program


class Sequences(eqx.Module):
    """What the members of a group run in the ops of each row, kernel by kernel.

    **Attributes:**

    - `steps`: the kernel, or -1, and what it does: `ALONE`, `CLOSES` ... of `program`.
    - `alone`: whether the row's ops are one kernel that keeps its own law.
    - `slowdowns`: of each of the branches, as of `workload.Branches`, and of those around blocks
        from the last one back; `None` where there are none.
    - `members`: of a group. Static.
    """

    steps: Int[Array, "rows longest 2"]
    alone: Bool[Array, " rows"]
    slowdowns: Float[Array, "branches 2"] | None
    members: int = eqx.field(static=True)


def sequences_of(program: Program) -> Sequences:
    """The sequences of a program."""
    classes = program.rows.class_.value
    number = bucket(len(classes), 64)
    longest = max(len(program.sequences[c].value) for c in classes)
    steps = np.full((number, longest, 2), (-1, 0), np.int32)
    for r, c in enumerate(classes):
        sequence = program.sequences[c].value
        steps[r, : len(sequence)] = sequence
    alone = np.zeros(number, bool)
    alone[: len(classes)] = program.blocks.direct.value[classes] >= 0
    branches, outer = program.blocks.branches, program.blocks.outer_branches
    slowdowns = np.concatenate([branches.slowdowns.value, outer.slowdowns.value[::-1]])
    slowdowns = slowdowns.astype(program.latencies.mean.dtype)
    return Sequences(
        jax.device_put(steps),
        jax.device_put(alone),
        jax.device_put(slowdowns) if len(slowdowns) else None,
        program.group_size,
    )
