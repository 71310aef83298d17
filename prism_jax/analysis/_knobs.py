"""Knobs on a program: factors on the means and spreads of its parts."""

import dataclasses
import itertools as it
from collections.abc import Iterable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._misc import FrozenArray, unknown_name
from ..host import on_host, vjp_on_host
from ..latency import scale_spread
from ..program import Adjustment, Program


_SHARED = ("rank", "step", "worker_step", "microbatch")
# The groups that together cover everything that varies, exactly once.
ELEMENTARY = ("kernel", "shared factor", "stalls")
# Those whose parts have a mean to turn, too.
_WITH_MEANS = ("kernel", "stage")
# The group of a part, its name, and `mean` or `spread`.
Label = tuple[str, str, str]
# A factor for each. Ones change nothing; a factor of zero on a spread removes it.
Knobs = dict[Label, Array]


def varying_parts(program: Program) -> dict[str, list[str]]:
    """The names of the parts that may vary, by their groups:

    - `kernel`: each kind of kernel, with its mean latency and the spread of its own noise.
    - `shared factor`: `rank`, `step`, `worker_step`, `microbatch`, `network`, whose spread is what
        congestion adds, and `expert_load`, whose spread is how far loads are from their mean.
    - `stalls`: those of each kind of kernel that stalls, with their rate.
    - `stage`: each (global virtual) stage, with the latency of its ops and the spread of their own
        noise.
    - `rank`: the GPUs of each pipeline rank, with how far the slowest is from the mean one.
    """
    variability = program.variability
    shared = [name for name in (*_SHARED, "network") if getattr(variability, name) is not None]
    shared += [] if program.loads is None else ["expert_load"]
    num_stages = int(program.ops.stage.value.max(initial=0)) + 1
    return {
        "kernel": sorted(program.latencies.kinds),
        "shared factor": sorted(shared),
        "stalls": [f"stalls of {kind}" for kind in sorted(variability.stalls)],
        "stage": [f"stage {stage}" for stage in range(num_stages)],
        "rank": [f"GPUs of rank {rank}" for rank in range(program.num_ranks)],
    }


def turned(program: Program, factors: Mapping[Label, ArrayLike]) -> Program:
    """The program with factors on some knobs. Differentiable. Programs with other factors, or with
    none, share its compiled code. An `adjustment` that the program already has is multiplied by
    the new one.
    """
    return on_host(_turned, program, _knobs(program, factors))


def varied(program: Program, factors: Mapping[str, ArrayLike]) -> Program:
    """`turned`, with factors on the variability of some parts, by their names."""
    return turned(program, _spreads(program, factors))


def _knobs(program: Program, factors: Mapping[Label, ArrayLike]) -> Knobs:
    """All knobs: at these factors, and the others at one."""
    unit = jnp.ones((), program.latencies.mean.dtype)
    knobs = {
        (group, name, moment): unit
        for group, names in varying_parts(program).items()
        for name in names
        for moment in (("mean", "spread") if group in _WITH_MEANS else ("spread",))
    }
    return knobs | {label: jnp.asarray(factor, unit.dtype) for label, factor in factors.items()}


def _spreads(program: Program, factors: Mapping[str, ArrayLike]) -> dict[Label, ArrayLike]:
    """Factors on the variability of parts by their labels."""
    groups = {name: group for group, names in varying_parts(program).items() for name in names}
    return {(groups[name], name, "spread"): factor for name, factor in factors.items()}


def _turned(program: Program, knobs: Knobs) -> Program:
    table, variability, parts = program.latencies, program.variability, varying_parts(program)

    def stacked(group: str, moment: str) -> Array:
        return jnp.stack([knobs[group, name, moment] for name in parts[group]])

    factors = jnp.stack([knobs["kernel", kind, "mean"] for kind in table.kinds])
    changed: dict[str, object] = {
        name: scale_spread(law, knobs["shared factor", name, "spread"])
        for name in _SHARED
        if (law := getattr(variability, name)) is not None
    }
    changed["residual"] = {
        kind: scale_spread(law, knobs["kernel", kind, "spread"])
        for kind, law in variability.residual.items()
    }
    changed["stalls"] = {
        kind: dataclasses.replace(
            stall, rate=stall.rate * knobs["stalls", f"stalls of {kind}", "spread"]
        )
        for kind, stall in variability.stalls.items()
    }
    if (network := variability.network) is not None:
        changed["network"] = network.with_spread(knobs["shared factor", "network", "spread"])
    loads = program.loads
    if loads is not None:
        spread = loads.unevenness.spread * knobs["shared factor", "expert_load", "spread"]
        loads = eqx.tree_at(lambda table: table.unevenness.spread, loads, spread)
    stage = np.where(~program.ops.is_send_recv, program.ops.stage.value, -1)  # No communication.
    of_parts = stacked("stage", "mean"), stacked("stage", "spread"), stacked("rank", "spread")
    return dataclasses.replace(
        program,
        loads=loads,
        latencies=dataclasses.replace(table, mean=table.mean * factors[table.kind.value]),
        variability=dataclasses.replace(variability, **changed),
        adjustment=adjusted(program, stage, *of_parts),
    )


def adjusted(
    program: Program,
    group: Int[np.ndarray, " ops"],
    latency: Float[Array, " groups"],
    spread: Float[Array, " groups"],
    gpu: Float[Array, " ranks"],
) -> Adjustment:
    """The program's adjustment with further factors on groups of ops; -1 stands for no group."""
    adjustment = program.adjustment
    outer = np.zeros(program.num_ops, np.int64) if adjustment is None else adjustment.group.value
    pairs, number = np.unique(np.stack([outer, group]), axis=1, return_inverse=True)

    def of_groups(outer, inner):
        values = jnp.append(inner, jnp.ones((), inner.dtype))[pairs[1]]  # -1 takes the last.
        return values if outer is None else values * outer[pairs[0]]

    return Adjustment(
        group=FrozenArray(number.reshape(-1)),
        latency=of_groups(adjustment and adjustment.latency, latency),
        spread=of_groups(adjustment and adjustment.spread, spread),
        gpu=gpu if adjustment is None else gpu * adjustment.gpu,
    )


def slopes(
    program: Program, factors: Mapping[Label, ArrayLike], gradient: Program
) -> dict[Label, float]:
    """The derivatives with respect to all knobs, from that with respect to what `turned` gives for
    these factors.
    """
    knobs = _knobs(program, factors)
    _, backward = vjp_on_host(_turned, program, knobs)
    derivatives = backward(jax.tree.map(lambda x: np.asarray(x)[None], gradient))
    return {label: float(derivatives[label][0]) for label in knobs}


def factor_slopes(
    program: Program, factors: Mapping[str, ArrayLike], gradient: Program
) -> Float[np.ndarray, " factors"]:
    """The derivative with respect to these factors, from that with respect to what `varied` gives
    for them.
    """
    spreads = _spreads(program, factors)
    derivatives = slopes(program, spreads, gradient)
    return np.array([derivatives[label] for label in spreads])


def slopes_by_part(program: Program, gradient: Program) -> dict[Label, float]:
    """The derivatives with respect to all knobs, from that with respect to `turned(program, {})`.
    That of a rank's mean, which has no knob, is the sum of those of its stages.
    """
    derivatives, parts = slopes(program, {}, gradient), varying_parts(program)
    of_stages = [derivatives["stage", name, "mean"] for name in parts["stage"]]
    of_ranks = np.bincount(ranks_of_stages(program), of_stages, program.num_ranks)
    labels = [("rank", name, "mean") for name in parts["rank"]]
    return derivatives | dict(zip(labels, of_ranks.tolist(), strict=True))


def check_part_names(program: Program, names: Iterable[str]) -> list[str]:
    """The names of parts as a list. Raises a `ValueError` for a name that is not of a part."""
    if isinstance(names, str):
        raise ValueError(f"`{names}` must be a list of parts: `[{names!r}]`.")
    names, allowed = list(names), [*it.chain(*varying_parts(program).values())]
    for name in names:
        if name not in allowed:
            raise ValueError(unknown_name("part", name, allowed))
    return names


def ranks_of_stages(program: Program) -> Int[np.ndarray, " stages"]:
    """The pipeline rank that runs each (global virtual) stage."""
    ops, compute = program.ops, ~program.ops.is_send_recv
    ranks = np.zeros(int(ops.stage.value.max(initial=0)) + 1, np.int64)
    ranks[ops.stage.value[compute]] = ops.rank.value[compute]
    return ranks
