"""The ops that may stall, and the strata of replica samples for rare events."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from .._ragged import ragged, row_numbers, take
from ..collapse import count_calls
from ..workload import Block
from ._program import Stratum
from ._variability import Variability


class StallEntries(NamedTuple):
    """The kernels that may stall, op after op.

    `kind` is the position of the kernel's kind in `sorted(variability.stalls)`; `calls` is the
    number of calls by all members.
    """

    op: Int[np.ndarray, "stalls"]
    kind: Int[np.ndarray, "stalls"]
    calls: Int[np.ndarray, "stalls"]


def stall_entries(
    variability: Variability,
    different: Sequence[Block],
    block_of_op: Int[np.ndarray, "ops"],
    group_size: int,
) -> StallEntries:
    """Finds the kernels that may stall in ops whose blocks are `different[block_of_op]`."""
    position = {kind: number for number, kind in enumerate(sorted(variability.stalls))}
    stalling = [
        [
            (position[kernel.kind], calls)
            for kernel, calls in count_calls(block, group_size).items()
            if kernel.kind in position
        ]
        for block in different
    ]
    kinds = take(ragged([[kind for kind, _ in row] for row in stalling]), block_of_op)
    calls = take(ragged([[calls for _, calls in row] for row in stalling]), block_of_op)
    return StallEntries(row_numbers(kinds), kinds.values, calls.values)


def make_strata(variability: Variability, entries: StallEntries) -> tuple[Stratum, ...]:
    """The strata: half of the samples follow the law, the other half is spread over rare events."""
    regimes = np.ones(1)
    if variability.network is not None:
        congested = float(variability.network.probability)
        regimes = np.array([1 - congested, congested])
        regimes = (regimes + 0.5) / 2
    stalls = np.ones(1)
    if len(entries.op):
        rates = [float(stall.rate) for _, stall in sorted(variability.stalls.items())]
        rate = float(np.bincount(entries.kind, entries.calls, len(rates)) @ rates)
        if rate > 20:
            raise ValueError(
                f"A replica's step has {rate:.3g} stalls on average; stalls are rare pauses, so "
                "lower their rates to a few per step or put them into the residual law."
            )
        # Up to the number of stalls beyond which the probability is below 1e-9.
        law = [math.exp(-rate)]
        while len(law) < 3 or 1 - sum(law) > 1e-9:
            law.append(law[-1] * rate / len(law))
        counts = np.arange(len(law))
        law = np.array(law) / sum(law)
        rare = np.where(counts > 0, 0.5**counts, 0)
        stalls = (law + rare / rare.sum()) / 2
    return tuple(
        Stratum(regime=g, stalls=k, share=float(regimes[g] * stalls[k]))
        for g in range(len(regimes))
        for k in range(len(stalls))
    )
