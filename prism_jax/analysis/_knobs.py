"""Knobs on a program: factors on the means and spreads of its parts."""

import dataclasses
import itertools as it
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._misc import unknown_name
from ..host import on_host, vjp_on_host
from ..latency import scale_spread
from ..program import Adjustment, Program, Variability


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
    num_stages = int(program.ops.stage.max(initial=0)) + 1
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
    number, *of_parameters = _arguments(program, factors)
    mean, variability, spread, of_groups = on_host(_turned, *of_parameters)
    loads = program.loads
    if loads is not None and loads.unevenness is not None:
        unevenness = dataclasses.replace(loads.unevenness, spread=spread)
        loads = dataclasses.replace(loads, unevenness=unevenness)
    return dataclasses.replace(
        program,
        latencies=dataclasses.replace(program.latencies, mean=mean),
        variability=variability,
        loads=loads,
        adjustment=Adjustment(number, *of_groups),
    )


def _arguments(program: Program, factors: Mapping[Label, ArrayLike]) -> tuple[Any, ...]:
    """The group of each op, and the arguments of `_turned`."""
    stage = np.where(~program.ops.is_send_recv, program.ops.stage, -1)  # No communication.
    number, pairs = _groups(program, stage)
    parameters = eqx.filter(dataclasses.replace(program, adjustment=None), eqx.is_inexact_array)
    return number, parameters, _factors(program), pairs, _knobs(program, factors)


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


# Those of an adjustment: on the latency and the spread of groups, and of ranks. Knobs make more
# groups than there were.
_Factors = tuple[Array, Array, Array]


def _turned(
    program: Program, factors: _Factors | None, pairs: Int[Array, "2 pairs"], knobs: Knobs
) -> tuple[Array, Variability, Array | None, _Factors]:
    """The means of kernels, all laws, the spread of loads, and the factors of the adjustment on
    pairs of groups.
    """
    table, variability = program.latencies, program.variability

    def stacked(group: str, moment: str, name: str) -> Array:
        number = sum(label[::2] == (group, moment) for label in knobs)
        return jnp.stack([knobs[group, f"{name} {i}", moment] for i in range(number)])

    of_kinds = jnp.stack([knobs["kernel", kind, "mean"] for kind in table.kinds])
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
    of_loads, loads = None, program.loads
    if loads is not None and loads.unevenness is not None:
        of_loads = loads.unevenness.spread * knobs["shared factor", "expert_load", "spread"]
    latency, spread = (stacked("stage", moment, "stage") for moment in ("mean", "spread"))
    gpu = stacked("rank", "spread", "GPUs of rank")
    of_groups = _multiplied(factors, pairs, latency, spread, gpu)
    mean = table.mean * of_kinds[np.array(table.kind)]
    return mean, dataclasses.replace(variability, **changed), of_loads, of_groups


def adjusted(
    program: Program,
    group: Int[np.ndarray, " ops"],
    latency: Float[Array, " groups"],
    spread: Float[Array, " groups"],
    gpu: Float[Array, " ranks"],
) -> Adjustment:
    """The program's adjustment with further factors on groups of ops; -1 stands for no group."""
    number, pairs = _groups(program, group)
    return Adjustment(number, *_multiplied(_factors(program), pairs, latency, spread, gpu))


def _groups(
    program: Program, group: Int[np.ndarray, " ops"]
) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, "2 pairs"]]:
    """For each op, the number of its pair of a group of the adjustment and a further one; and the
    pairs.
    """
    adjustment = program.adjustment
    outer: Any = np.zeros(program.num_ops, np.int64) if adjustment is None else adjustment.group
    width = group.max(initial=-1) + 2
    pairs, number = np.unique(outer * width + group + 1, return_inverse=True)
    return number, np.stack([pairs // width, pairs % width - 1])


def _factors(program: Program) -> _Factors | None:
    adjustment = program.adjustment
    return adjustment and (adjustment.latency, adjustment.spread, adjustment.gpu)


def _multiplied(factors: _Factors | None, pairs, latency, spread, gpu) -> _Factors:
    """The factors of an adjustment times further ones, for pairs of groups."""
    # -1 takes the last.
    latency, spread = (jnp.append(x, jnp.ones((), x.dtype))[pairs[1]] for x in (latency, spread))
    if factors is None:
        return latency, spread, gpu
    return latency * factors[0][pairs[0]], spread * factors[1][pairs[0]], gpu * factors[2]


def slopes(
    program: Program, factors: Mapping[Label, ArrayLike], gradients: Program
) -> dict[Label, Float[np.ndarray, " figures"]]:
    """The derivatives of figures with respect to all knobs, from those with respect to what
    `turned` gives for these factors, whose first axis are the figures.
    """
    _, *of_parameters = _arguments(program, factors)
    _, backward = vjp_on_host(_turned, *of_parameters)
    loads = gradients.loads
    of_loads = None if loads is None or loads.unevenness is None else loads.unevenness.spread
    return backward(
        (gradients.latencies.mean, gradients.variability, of_loads, _factors(gradients))
    )


def factor_slopes(
    program: Program, factors: Mapping[str, ArrayLike], gradient: Program
) -> Float[np.ndarray, " factors"]:
    """The derivative with respect to these factors, from that with respect to what `varied` gives
    for them.
    """
    spreads = _spreads(program, factors)
    derivatives = slopes(program, spreads, jax.tree.map(lambda x: x[None], gradient))
    return np.array([derivatives[label][0] for label in spreads], np.float64)


def slopes_by_part(
    program: Program, gradients: Program
) -> dict[Label, Float[np.ndarray, " figures"]]:
    """The derivatives with respect to all knobs, from those with respect to `turned(program, {})`.
    That of a rank's mean, which has no knob, is the sum of those of its stages.
    """
    derivatives, parts = slopes(program, {}, gradients), varying_parts(program)
    of_stages = np.array([derivatives["stage", name, "mean"] for name in parts["stage"]], float)
    of_ranks = np.zeros((program.num_ranks, of_stages.shape[1]))
    np.add.at(of_ranks, ranks_of_stages(program), of_stages)
    labels = [("rank", name, "mean") for name in parts["rank"]]
    return derivatives | dict(zip(labels, of_ranks, strict=True))


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
    ranks = np.zeros(int(ops.stage.max(initial=0)) + 1, np.int64)
    ranks[ops.stage[compute]] = ops.rank[compute]
    return ranks
