"""Knobs on a program: factors on the means and spreads of its parts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._misc import FrozenArray, unknown_name
from ..host import on_host, vjp_on_host
from ..latency import scale_spread
from ..program import Adjustment, Network, Program


_SHARED = ("rank", "step", "worker_step", "microbatch")
# The groups of parts: how a part is named, and the fields of `Knobs` of its spread and its mean.
GROUPS = {
    "kernel": ("{}", "kernel_spread", "kernel_mean"),
    "shared factor": ("{}", "factor_spread", None),
    "stalls": ("stalls of {}", "stall_rate", None),
    "stage": ("stage {}", "stage_spread", "stage_mean"),
    "rank": ("GPUs of rank {}", "gpu_spread", None),
}
# Those that together cover everything that varies, exactly once.
ELEMENTARY = ("kernel", "shared factor", "stalls")
# The group of a part, its name, and `mean` or `spread`.
Label = tuple[str, str, str]


class Knobs(eqx.Module):
    """Factors on the means and spreads of parts of a program. Ones change nothing; a factor of zero
    on a spread removes it.

    **Attributes:**

    - `kernel_mean`, `kernel_spread`: for each kind of kernel, on its mean latency and on the
        spread of its own noise.
    - `factor_spread`: on the spread of each shared factor: `rank`, `step`, `worker_step`,
        `microbatch`, `network`, where it multiplies what congestion adds, and `expert_load`, where
        it multiplies how far loads are from their mean.
    - `stall_rate`: for each kind of kernel that stalls.
    - `stage_mean`, `stage_spread`: `(stages,)`, on the latency of the ops of a (global virtual)
        stage, and on the spread of their own noise.
    - `gpu_spread`: `(ranks,)`, on how far the slowest GPU of a pipeline rank is from the mean one.
    """

    kernel_mean: dict[str, Float[Array, ""]]
    kernel_spread: dict[str, Float[Array, ""]]
    factor_spread: dict[str, Float[Array, ""]]
    stall_rate: dict[str, Float[Array, ""]]
    stage_mean: Float[Array, " stages"]
    stage_spread: Float[Array, " stages"]
    gpu_spread: Float[Array, " ranks"]


def neutral(program: Program) -> Knobs:
    """The knobs of a program, all at one."""
    variability = program.variability
    one = jnp.ones((), program.latencies.mean.dtype)
    shared = [name for name in (*_SHARED, "network") if getattr(variability, name) is not None]
    shared += [] if program.loads is None else ["expert_load"]
    stages = jnp.ones((int(program.ops.stage.value.max(initial=0)) + 1,), one.dtype)
    return Knobs(
        kernel_mean=dict.fromkeys(program.latencies.kinds, one),
        kernel_spread=dict.fromkeys(program.latencies.kinds, one),
        factor_spread=dict.fromkeys(shared, one),
        stall_rate=dict.fromkeys(variability.stalls, one),
        stage_mean=stages,
        stage_spread=stages,
        gpu_spread=jnp.ones((program.num_ranks,), one.dtype),
    )


def apply_knobs(program: Program, knobs: Knobs) -> Program:
    """The program with all knobs applied. Differentiable. Programs that differ only by knobs share
    their compiled code. An `adjustment` that the program already has is multiplied by the new one.
    """
    return on_host(_turned, program, knobs)


def _turned(program: Program, knobs: Knobs) -> Program:
    table, variability = program.latencies, program.variability
    factors = jnp.stack([knobs.kernel_mean[kind] for kind in table.kinds])
    residual = {
        k: scale_spread(law, knobs.kernel_spread[k]) for k, law in variability.residual.items()
    }
    shared = {
        name: scale_spread(getattr(variability, name), knobs.factor_spread[name])
        for name in _SHARED
        if name in knobs.factor_spread
    }
    network = variability.network
    if network is not None:
        slowdown = 1 + (network.slowdown - 1) * knobs.factor_spread["network"]
        network = Network(network.probability, slowdown)
    stalls = {
        kind: dataclasses.replace(stall, rate=stall.rate * knobs.stall_rate[kind])
        for kind, stall in variability.stalls.items()
    }
    loads = program.loads
    if loads is not None:
        spread = loads.unevenness.spread * knobs.factor_spread["expert_load"]
        loads = eqx.tree_at(lambda one: one.unevenness.spread, loads, spread)
    stage = np.where(~program.ops.is_send_recv, program.ops.stage.value, -1)  # No communication.
    return dataclasses.replace(
        program,
        loads=loads,
        latencies=dataclasses.replace(table, mean=table.mean * factors[table.kind.value]),
        variability=dataclasses.replace(
            variability, residual=residual, network=network, stalls=stalls, **shared
        ),
        adjustment=adjusted(program, stage, knobs.stage_mean, knobs.stage_spread, knobs.gpu_spread),
    )


def adjusted(
    program: Program,
    group: Int[np.ndarray, " ops"],
    latency: Float[Array, " groups"],
    spread: Float[Array, " groups"],
    gpu: Float[Array, " ranks"],
) -> Adjustment:
    """The program's adjustment with further factors on groups of ops; -1 stands for no group."""
    own = program.adjustment
    outer = np.zeros(program.num_ops, np.int64) if own is None else own.group.value
    pairs, number = np.unique(np.stack([outer, group]), axis=1, return_inverse=True)

    def of_groups(outer, inner):
        values = jnp.append(inner, jnp.ones((), inner.dtype))[pairs[1]]  # -1 takes the last.
        return values if outer is None else values * outer[pairs[0]]

    return Adjustment(
        group=FrozenArray(number.reshape(-1)),
        latency=of_groups(own and own.latency, latency),
        spread=of_groups(own and own.spread, spread),
        gpu=gpu if own is None else gpu * own.gpu,
    )


def through_knobs(program: Program, knobs: Knobs, gradient: Program) -> Knobs:
    """The derivative with respect to knobs, from that with respect to the turned program."""
    _, backward = vjp_on_host(_turned, program, knobs)
    found = backward(jax.tree.map(lambda x: np.asarray(x)[None], gradient))
    return jax.tree.map(lambda x: jax.device_put(x[0]), found)


def scaled(knobs: Knobs, factors: Mapping[str, ArrayLike]) -> Knobs:
    """The knobs with factors on the variability of some parts, which are named as in `parts_of`."""
    parts = parts_of(knobs)
    for name, factor in factors.items():
        group, place = parts[name]
        field = GROUPS[group][1]
        old = getattr(knobs, field)
        if isinstance(old, dict):
            new = {**old, place: old[place] * jnp.asarray(factor, old[place].dtype)}
        else:
            new = old.at[place].multiply(jnp.asarray(factor, old.dtype))
        knobs = dataclasses.replace(knobs, **{field: new})
    return knobs


def varied(program: Program, factors: Mapping[str, ArrayLike]) -> Program:
    """The program with factors on the variability of some parts."""
    return apply_knobs(program, scaled(neutral(program), factors))


def factor_slopes(
    program: Program, factors: Mapping[str, ArrayLike], gradient: Program
) -> Float[np.ndarray, " factors"]:
    """The derivative with respect to these factors, from that with respect to what `varied` gives
    for them.
    """
    knobs = through_knobs(program, scaled(neutral(program), factors), gradient)
    parts = parts_of(knobs)
    places = ((GROUPS[parts[name][0]][1], parts[name][1]) for name in factors)
    return np.array([float(getattr(knobs, field)[place]) for field, place in places])


def slopes_by_part(program: Program, gradient: Program) -> dict[Label, float]:
    """The derivatives with respect to all knobs, from that with respect to `varied(program, {})`.
    That of a rank's mean is the sum of those of its stages.
    """
    knobs = jax.tree.map(np.asarray, through_knobs(program, neutral(program), gradient))
    of_ranks = np.bincount(ranks_of_stages(program), knobs.stage_mean, program.num_ranks)
    found: dict[Label, float] = {}
    for group, name, place in all_parts(knobs):
        _, spread, mean = GROUPS[group]
        if group == "rank":
            found[group, name, "mean"] = float(of_ranks[int(place)])
        elif mean:
            found[group, name, "mean"] = float(getattr(knobs, mean)[place])
        found[group, name, "spread"] = float(getattr(knobs, spread)[place])
    return found


def check_parts(program: Program, names: Iterable[str]) -> list[str]:
    """The names of parts as a list. Raises a `ValueError` for a name that is not of a part."""
    if isinstance(names, str):
        raise ValueError(f"`{names}` must be a list of parts: `[{names!r}]`.")
    names, parts = list(names), parts_of(neutral(program))
    for name in names:
        if name not in parts:
            raise ValueError(unknown_name("part", name, tuple(parts)))
    return names


def parts_of(knobs: Knobs) -> dict[str, tuple[str, str | int]]:
    """For the name of each part that may vary (`gemm`, `rank`, `stalls of gemm`, `stage 3`,
    `GPUs of rank 0`), its group and its place in the fields of this group.
    """
    return {name: (group, place) for group, name, place in all_parts(knobs)}


def all_parts(knobs: Knobs) -> Iterator[tuple[str, str, str | int]]:
    """The group, the name and the place of each part."""
    for group, (label, field, _) in GROUPS.items():
        of = getattr(knobs, field)
        # A traced dictionary comes back in this order.
        for place in sorted(of) if isinstance(of, dict) else range(len(of)):
            yield group, label.format(place), place


def ranks_of_stages(program: Program) -> Int[np.ndarray, " stages"]:
    """The pipeline rank that runs each (global virtual) stage."""
    ops, compute = program.ops, ~program.ops.is_send_recv
    ranks = np.zeros(int(ops.stage.value.max(initial=0)) + 1, np.int64)
    ranks[ops.stage.value[compute]] = ops.rank.value[compute]
    return ranks
