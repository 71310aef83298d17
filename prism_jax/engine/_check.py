"""What `simulate` and `estimate` refuse."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..program import Program, check_variability, stall_rate
from ..random import check_key
from ..replica import Plan


# The cube of a normal approximates a sum of kernels well up to this skewness.
MAX_SKEWNESS = 1.5
# The stratum with the most stalls also represents more stalls, whose probability must not matter.
MAX_UNSEEN_STALLS = 1e-6


def check_program(program: Any, key: Any) -> None:
    """Raises unless `program` is a program, and its values and the key are not traced."""
    if not isinstance(program, Program):
        raise ValueError(
            f"A {type(program).__name__} was given in place of a program; use `compile_job` to get "
            "one."
        )
    if program.adjustment is not None and program.resolution == "kernel":
        raise ValueError(
            "An `adjustment` goes with whole blocks; compile the program without "
            '`resolution="kernel"`.'
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((program, key))):
        raise ValueError(
            "`estimate` and `simulate` loop on the host and cannot be traced by `jax.jit` or "
            "`jax.vmap`; call them outside, or use `sample_replica_ends`, which can."
        )
    check_key(key)


def check_num_samples(num_samples: Any) -> int:
    """`num_samples` as an `int`. Raises unless it counts something."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer):
        raise ValueError(f"`num_samples={num_samples!r}` must be a whole number of at least 1.")
    if not 1 <= num_samples < 2**32:
        raise ValueError(f"`num_samples={num_samples}` must be at least 1 and below 2^32.")
    return int(num_samples)


def check_plan(program: Program, plan: Plan) -> None:
    """Raises if some latency of the program is impossible, or is beyond what the plan can hold."""
    check_variability(program.variability)
    moments = np.asarray(plan.tables.moments)
    finite = all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(plan))
    if not finite or (moments[:2] < 0).any() or (np.asarray(plan.tables.mean) < 0).any():
        raise ValueError(
            "Some latency of the program is negative or not finite; check the means and the "
            "parameters of the laws (a negative or huge sigma does this)."
        )
    if program.resolution == "block":
        direct = program.blocks.direct.value
        collapsed = moments[2, : len(direct)][direct < 0]  # Others keep their own law.
        skewness = max(
            np.abs(x).max(initial=0) for x in (collapsed, np.asarray(plan.tables.skewness))
        )
        if skewness > MAX_SKEWNESS:
            raise ValueError(
                f"The kernels of a block have a summed latency of skewness {skewness:.2g}, and the "
                f"collapse of blocks is right up to {MAX_SKEWNESS}; lower their spread, describe "
                'what is rare and long as stalls, or use `resolution="kernel"`.'
            )
    if len(program.stall_ops.value):
        rate, most = stall_rate(program), max(stratum.stalls for stratum in program.strata)
        unseen = float(plan.tables.stall_counts[most]) * rate / (most + 1)
        if unseen > MAX_UNSEEN_STALLS:
            raise ValueError(
                f"A replica's step has {rate:.2g} stalls on average, more than the program was "
                "compiled for; compile it with the new rate."
            )
