"""Knobs on a program: factors on the means and spreads of its parts."""

import dataclasses
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
from ..program import Adjustment, Network, Program


_SHARED = ("rank", "step", "worker_step", "microbatch")
# The fields of `Knobs` that together cover everything that varies, exactly once.
ELEMENTARY = ("kernel_spread", "factor_spread", "stall_rate")


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
        unevenness = dataclasses.replace(loads.unevenness, spread=spread)
        loads = dataclasses.replace(loads, unevenness=unevenness)
    return dataclasses.replace(
        program,
        loads=loads,
        latencies=dataclasses.replace(table, mean=table.mean * factors[table.kind.value]),
        variability=dataclasses.replace(
            variability, residual=residual, network=network, stalls=stalls, **shared
        ),
        adjustment=_by_stage(program, knobs),
    )


def _by_stage(program: Program, knobs: Knobs) -> Adjustment:
    """An adjustment by stage, without communication."""
    stage = np.where(~program.ops.is_send_recv, program.ops.stage.value, -1)
    return adjusted(program, stage, knobs.stage_mean, knobs.stage_spread, knobs.gpu_spread)


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
        field, where = parts[name]
        old = getattr(knobs, field)
        if isinstance(old, dict):
            new = {**old, where: old[where] * jnp.asarray(factor, old[where].dtype)}
        else:
            new = old.at[where].multiply(jnp.asarray(factor, old.dtype))
        knobs = dataclasses.replace(knobs, **{field: new})
    return knobs


def of_part(knobs: Knobs, name: str) -> Float[Array, ""]:
    """The knob of the variability of a part."""
    field, where = parts_of(knobs)[name]
    return getattr(knobs, field)[where]


def check_parts(knobs: Knobs, names: Iterable[str]) -> list[str]:
    """The names of parts as a list. Raises a `ValueError` for a name that is not of a part."""
    if isinstance(names, str):
        raise ValueError(f"`{names}` must be a list of parts: `[{names!r}]`.")
    names, parts = list(names), parts_of(knobs)
    for name in names:
        if name not in parts:
            raise ValueError(unknown_name("part", name, tuple(parts)))
    return names


def parts_of(knobs: Knobs) -> dict[str, tuple[str, str | int]]:
    """For the name of each part that may vary (`gemm`, `rank`, `stalls of gemm`, `stage 3`,
    `GPUs of rank 0`), its field of `Knobs` and its place in the field.
    """
    parts: dict[str, tuple[str, str | int]] = {}
    for field, label in (
        ("kernel_spread", "{}"),
        ("factor_spread", "{}"),
        ("stall_rate", "stalls of {}"),
    ):
        parts |= {label.format(name): (field, name) for name in getattr(knobs, field)}
    for field, label in (("stage_spread", "stage {}"), ("gpu_spread", "GPUs of rank {}")):
        parts |= {label.format(i): (field, i) for i in range(len(getattr(knobs, field)))}
    return parts
