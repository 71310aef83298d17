"""What `simulate` and `estimate` refuse."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._misc import check_type, whole_number
from ..latency import AbstractLatency
from ..op_law import every_kind
from ..program import Program, all_laws, check_means, check_scale, check_variability, stall_rate
from ..random import check_key
from ..replica import Plan


# The cube of a normal approximates a sum of kernels well up to this skewness. Up to the other, it
# is within 0.09 standard deviations of a gamma law from p1 to p99: less than a thousandth of a
# block whose standard deviation is at most so much of its mean.
MAX_SKEWNESS, _MAX_OF_NARROW, _NARROW = 1.5, 3.0, 0.01
# The most samples, 2^32, tell the mean of a law that is this wide to 1.5%, and none do beyond.
MAX_SPREAD = 1000
# The stratum with the most stalls also represents more stalls, whose probability must not matter.
MAX_UNSEEN_STALLS = 1e-6


def check_program(program: Any, key: Any) -> None:
    """Raises unless `program` is a program, whose values and the key are not traced, of numbers
    that JAX is set to compute with.
    """
    fix = "use `compile_job` to get one"
    if isinstance(getattr(program, "program", None), Program):  # Of a `Scenario`.
        fix = "give its `.program`, where all replicas are changed, or the scenario to `what_if`"
    check_type(program, Program, "program", fix)
    leaves = jax.tree.leaves((program, key))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ValueError(
            "`estimate` and `simulate` loop on the host and cannot be traced by `jax.jit` or "
            "`jax.vmap`; call them outside, or use `sample_replica_ends`, which can."
        )
    check_key(key)
    wide = any(getattr(leaf, "dtype", None) == np.float64 for leaf in leaves)
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "The program has numbers of float64, which JAX would cut; set `jax_enable_x64`, or "
            "compile the program without it."
        )
    # A plan holds it in its structure, which programs that differ in parameters only share.
    if isinstance(program.sinks.contention, np.ndarray | jax.Array):
        raise ValueError(
            "`program.sinks.contention` is an array; give a number, which neither `sweep` changes "
            "nor `estimate` has a derivative of."
        )


def check_num_samples(num_samples: Any) -> int:
    """`num_samples` as an `int`. Raises unless it counts something."""
    return whole_number(num_samples, "num_samples", most=2**32 - 1)


def check_plan(program: Program, plan: Plan) -> None:
    """Raises if some latency of the program is impossible, or is beyond what the plan can hold.
    Parameters and tables of several programs may have these as their first axis.
    """
    check_variability(program.variability)
    table, tables = program.latencies, plan.tables
    kinds = np.array(table.kinds, object)[np.array(table.kind)]
    mean = np.asarray(table.mean)
    check_means(mean, lambda k: f"Kernel {kinds[k]} {table.sizes[k]}", mean.dtype)
    _check_laws(program, plan)
    _check_collapse(program, plan, kinds)
    parts = plan.structure, [x for name, x in vars(tables).items() if name != "laws"]
    floats = filter(eqx.is_inexact_array, jax.tree.leaves(parts))
    finite = all(np.isfinite(np.asarray(x)).all() for x in floats)
    if not finite or (np.asarray(tables.moments)[..., :2, :, :, :] < 0).any():
        raise ValueError(
            "Some latency of the program is negative or not finite; check the factors of the "
            "network, the sizes of stalls and the program's adjustment."
        )
    if len(program.stall_ops):
        rate, most = stall_rate(program), int(plan.structure.classes.most_stalls)
        unseen = float(np.max(np.asarray(tables.stall_counts)[..., most])) * rate / (most + 1)
        if unseen > MAX_UNSEEN_STALLS:
            raise ValueError(
                f"A replica's step has {rate:.2g} stalls on average, more than the program was "
                "compiled for; compile it with the new rate."
            )


def _check_laws(program: Program, plan: Plan) -> None:
    """Raises if samples cannot tell the mean of some law, or the dtype does not hold its cubes."""
    laws, moments = all_laws(every_kind(program)), np.asarray(plan.tables.laws)
    means, variances = np.moveaxis(moments, (-2, -1), (0, 1))[:2]
    for (name, law), variance in zip(laws.items(), variances, strict=True):
        # What is no number here is computed again, for the law's own scale may be the reason.
        if not np.all(variance <= MAX_SPREAD**2) and not (spread := _spread(law)) <= MAX_SPREAD:
            times = f"{spread:.3g}" if spread < math.inf else "over 1e15"
            raise ValueError(
                f"The law of the {name} has a standard deviation of {times} times its mean, and "
                f"samples do not tell the mean beyond {MAX_SPREAD} times; lower its spread."
            )
    for name, mean in zip(laws, means, strict=True):
        if name.startswith("residual"):  # Of others, only quantiles matter.
            for extreme in {float(mean.min()), float(mean.max())}:
                check_scale(f"the {name}", extreme, moments.dtype)


def _spread(law: AbstractLatency) -> float:
    """The standard deviation over the mean, in double precision; infinite beyond that. The largest
    of a batch.
    """
    with jax.enable_x64(True), np.errstate(all="ignore"):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), law)
        mean, variance = np.asarray(wide.mean()), np.asarray(wide.variance())
        spread = np.where(mean == 0, 0, np.sqrt(variance) / mean)
    return float(np.max(np.where(np.isfinite(spread), spread, math.inf)))


def _check_collapse(program: Program, plan: Plan, kinds: np.ndarray) -> None:
    """Raises if three moments do not tell the latency of some block."""
    blocks, tables = program.blocks, plan.tables
    several = blocks.direct < 0  # Others keep their own law.
    moments = np.asarray(tables.moments)[..., : len(several), :, :][..., several, :, :]
    means, stds, thirds = np.moveaxis(moments, -4, 0)
    skewness = np.append(thirds, np.asarray(tables.skewness))
    of_loads = [] if tables.load is None else np.asarray(tables.load)[..., 1, :, :]
    skewness = np.append(skewness, of_loads)
    limits, narrow = np.full(len(skewness), MAX_SKEWNESS), stds <= _NARROW * means
    limits[: narrow.size][narrow.ravel()] = _MAX_OF_NARROW
    finite = np.isfinite(moments).all() and np.isfinite(skewness).all()
    beyond = np.abs(skewness[np.abs(skewness) > limits])
    if finite and not len(beyond):
        return
    runs, of_segments, of_collectives = (
        np.asarray(x) for x in (blocks.segments, blocks.class_segments, blocks.class_collectives)
    )
    inside = of_segments[several].any(axis=0) @ runs + of_collectives[several].sum(axis=0)
    for branches in filter(None, (blocks.branches, blocks.outer_branches)):
        inside = inside + branches.communication.sum(axis=(0, 1))
    if blocks.branches is not None:
        inside = inside + np.abs(blocks.branches.compute).sum(axis=0) @ runs
    laws = np.asarray(tables.laws, np.float64)[:, np.asarray(plan.structure.classes.kind)]
    _, variance, third = laws[:, : len(kinds)]
    mean = np.asarray(program.latencies.mean, np.float64)
    worst = int(np.argmax((inside > 0) * np.abs(third) * mean**3))
    largest = f"{beyond.max():.2g}" if finite else f"far above {MAX_SKEWNESS}"
    raise ValueError(
        f"The kernels of a block have a summed latency of skewness {largest}, most of it by "
        f"`{kinds[worst]}`, whose standard deviation is {np.sqrt(variance[worst]):.2g} times its "
        f"mean, and the collapse of blocks is right up to {MAX_SKEWNESS}; lower this spread, "
        "or describe what is rare and long as stalls."
    )
