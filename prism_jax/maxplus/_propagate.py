"""Max-plus propagation: an op starts when all it waits for has ended, and ends a latency later."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ._levels import Levels


class Latencies(eqx.Module):
    """How the latency of an op comes about, where it is needed and from little memory.

    An op's latency is a function of one row of each table, of what all ops share, and of noise of
    its own, which is made again rather than kept.

    **Attributes:**

    - `tables`: arrays of shape `(rows, samples)`, or `(rows, 1)` where samples do not differ.
    - `rows`: for each table, which row an op reads: `(levels, width)`; any row for padding.
    - `shared`: a PyTree of arrays.
    - `latency`: `(op, rows, shared, z) -> latency` in seconds, not negative; elementwise, for
        arguments of shape `(lanes, samples)` and `(samples,)` alike.
    - `noise`: `(noise_arguments, level, lane) -> z`: scores of the lanes of a level, where `lane`
        has the shape `(lanes, 1)` or `(samples,)`.
    - `noise_arguments`: a PyTree of arrays. Not differentiated.
    """

    tables: dict[str, Shaped[Array, "rows samples"]]
    rows: dict[str, Int[Array, "levels width"]]
    shared: Any
    latency: Callable[..., Any] = eqx.field(static=True)
    noise: Callable[..., Any] = eqx.field(static=True)
    noise_arguments: Any


def propagate(
    levels: Levels, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "sinks samples"]:
    """The ends of a graph's sinks, in seconds: the latest end of the ops of each.

    Latencies are made where they are used, one level after the other.

    Differentiable in reverse mode with respect to `latencies.tables` and `latencies.shared`. The
    derivative of a max-plus program is one along the critical path and zero elsewhere: one pass
    keeps which of the ends that an op waits for was the latest (a bit where there are two), another
    follows these back, one level after the other, and makes the latencies on the path again. Where
    ends are equal, the path goes through the first.

    **Arguments:**

    - `levels`: the graph.
    - `latencies`: see [`Latencies`][].
    - `num_samples`: the length of the samples' axis.
    - `dtype`: of the ends.
    """
    values = (latencies.tables, latencies.shared)
    rest = dataclasses.replace(latencies, tables={}, shared=None)
    return _ends(values, levels, rest, num_samples, dtype)


@eqx.filter_custom_vjp
def _ends(values, levels, latencies, num_samples, dtype):
    return _forward(values, levels, latencies, num_samples, dtype, keep=False)[0]


@_ends.def_fwd
def _ends_forward(perturbed, values, levels, latencies, num_samples, dtype):
    del perturbed
    return _forward(values, levels, latencies, num_samples, dtype, keep=True)


def _forward(values, levels: Levels, latencies: Latencies, num_samples, dtype, *, keep):
    """The ends of the sinks, and, to `keep`, which end was the latest at each join and sink."""
    tables, shared = values
    lanes = jnp.arange(levels.ops.value.shape[1], dtype=jnp.uint32)[:, None]

    def step(state, level):
        number, ops, reads, writes, rows = level
        latest, choice = _latest(state, reads, keep)
        mine = {name: tables[name][row] for name, row in rows.items()}
        z = latencies.noise(latencies.noise_arguments, number, lanes)
        drawn = latencies.latency(ops[:, None], mine, shared, z)
        state = state.at[writes].set(latest + drawn)
        return state, _pack(choice, levels) if keep else None

    state = jnp.zeros((levels.num_slots, num_samples), dtype)
    state, choices = lax.scan(step, state, _per_level(levels, latencies))
    ends, choice = _latest(state, jnp.asarray(levels.sinks.value), keep)
    return ends, (choices, choice)


def _per_level(levels: Levels, latencies: Latencies):
    return (
        jnp.arange(len(levels.ops.value), dtype=jnp.uint32),
        jnp.asarray(levels.ops.value),
        jnp.asarray(levels.reads.value),
        jnp.asarray(levels.writes.value),
        {name: jnp.asarray(row, jnp.int32) for name, row in latencies.rows.items()},
    )


def _latest(state, reads: Int[Array, "lanes fan_in"], keep: bool):
    """The latest of the ends that each lane waits for, and which one it is: the first of equals."""
    latest = state[reads[:, 0]]
    choice: Any = jnp.zeros(latest.shape, jnp.uint32) if keep else None
    for k in range(1, reads.shape[1]):
        end = state[reads[:, k]]
        if keep:
            choice = jnp.where(end > latest, jnp.uint32(k), choice)
        latest = jnp.maximum(latest, end)
    return latest, choice


def _bits(levels: Levels) -> tuple[int, int]:
    """Bits that a choice takes, and lanes that share a word of at most 32."""
    bits = (levels.reads.value.shape[2] - 1).bit_length()
    return bits, min(32 // max(bits, 1), levels.ops.value.shape[1])


def _pack(choice, levels: Levels):
    """Choices of the lanes, packed into words: `(words, samples)`."""
    bits, lanes = _bits(levels)
    if not bits:
        return None
    dtype = next(
        d for d in (jnp.uint8, jnp.uint16, jnp.uint32) if jnp.iinfo(d).bits >= bits * lanes
    )
    shifts = np.arange(lanes, dtype=np.uint32) * np.uint32(bits)
    words = [
        jnp.sum(part << shifts[: len(part), None], axis=0, dtype=jnp.uint32).astype(dtype)
        for part in (choice[i : i + lanes] for i in range(0, len(choice), lanes))
    ]
    return jnp.stack(words)


@_ends.def_bwd
def _ends_backward(residuals, cotangent, perturbed, values, levels, latencies, num_samples, dtype):
    del perturbed, dtype
    choices, at_sinks = residuals
    tables, shared = values
    # The place of an op is its level times the width, plus its lane.
    width = levels.ops.value.shape[1]
    places = np.full(levels.num_ops + 1, -1, np.int32)  # The last entry stands for "no op".
    flat = levels.ops.value.reshape(-1)
    places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    before = jnp.asarray(places[levels.predecessors.value])
    sinks = jnp.asarray(places[levels.sink_ops.value])
    numbers, ops, _, _, rows = _per_level(levels, latencies)
    columns = jnp.arange(num_samples)
    floats = {k for k, v in tables.items() if jnp.issubdtype(v.dtype, jnp.inexact)}

    # Three loops, with what passes from one to the next in memory: in a single one, XLA would draw
    # the same noise again for each of its uses.
    def walk(place, level):
        number, before, choice = level
        lane = place - number.astype(jnp.int32) * np.int32(width)
        z = latencies.noise(latencies.noise_arguments, number, lane.astype(jnp.uint32))
        return _followed(place, lane, before, choice, levels), (lane, z)

    def contribution(carry, level):
        weight, of_shared = carry
        ops, rows, lane, z = level
        parts, more = _contribution(latencies, tables, shared, ops, rows, lane, z, weight, floats)
        return (weight, jax.tree.map(jnp.add, of_shared, more)), parts

    def add(totals, level):
        rows, lane, parts = level
        return {
            name: total.at[rows[name]].add(
                jnp.where(
                    lane[None, :] == np.arange(width, dtype=np.int32)[:, None],
                    parts[name][None, :],
                    0,
                )
            )
            for name, total in totals.items()
        }, None

    def follow(carry):
        """The paths of one sink of each sample, and one less to follow."""
        cotangent, of_tables, of_shared = carry
        sink = jnp.argmax(cotangent != 0, axis=0)
        weight = cotangent[sink, columns]
        place = sinks[sink, at_sinks[sink, columns].astype(jnp.int32)]
        _, (lanes, z) = lax.scan(walk, place, (numbers, before, choices), reverse=True)
        (_, of_shared), parts = lax.scan(contribution, (weight, of_shared), (ops, rows, lanes, z))
        of_tables, _ = lax.scan(add, of_tables, (rows, lanes, parts))
        return cotangent.at[sink, columns].set(0), of_tables, of_shared

    of_tables = {k: jnp.zeros((tables[k].shape[0], num_samples), tables[k].dtype) for k in floats}
    start = (cotangent, of_tables, jax.tree.map(jnp.zeros_like, shared))
    _, of_tables, of_shared = lax.while_loop(lambda carry: jnp.any(carry[0] != 0), follow, start)
    of_tables = {
        k: jnp.sum(v, axis=1, keepdims=True) if tables[k].shape[1] == 1 else v
        for k, v in of_tables.items()
    }
    return {**dict.fromkeys(tables), **of_tables}, of_shared


def _followed(place, lane, before, choice, levels: Levels):
    """Where a path goes on from this level: unchanged if it does not pass here."""
    bits, lanes = _bits(levels)
    for j in range(before.shape[0]):
        onward = before[j, 0]
        if bits:
            word = choice[j // lanes].astype(jnp.uint32)
            chosen = (word >> np.uint32(j % lanes * bits)) & np.uint32(2**bits - 1)
            for k in range(1, before.shape[1]):
                onward = jnp.where(chosen == k, before[j, k], onward)
        place = jnp.where(lane == j, onward, place)
    return place


def _contribution(latencies: Latencies, tables, shared, ops, rows, lane, z, weight, floats):
    """What the latencies on the path at one level contribute to the derivative: with respect to the
    row of each table that they read, and to what is shared.
    """

    def at_lane(x):
        """Of values per lane, that of the lane on the path; zero where there is none."""
        value = jnp.zeros((), x.dtype)
        for j in range(len(x)):
            value = jnp.where(lane == j, x[j], value)
        return value

    mine = {name: at_lane(tables[name][row]) for name, row in rows.items()}
    op = at_lane(ops[:, None])

    def latency(inexact, shared):
        return latencies.latency(op, {**mine, **inexact}, shared, z)

    _, vjp = jax.vjp(latency, {name: mine[name] for name in floats}, shared)
    return vjp(jnp.where((lane >= 0) & (lane < len(ops)), weight, 0))


def op_ends(levels: Levels, latencies: Float[Array, "ops samples"]) -> Float[Array, "ops samples"]:
    """The end of every op, in seconds, from latencies that already exist.

    For graphs and sample counts small enough to hold. Differentiable; ties share equally.
    """
    lanes = levels.ops.value
    ends = jnp.zeros((levels.num_ops + 1, latencies.shape[1]), latencies.dtype)
    # The row behind the last op stands for "waits for nothing".
    before = jnp.asarray(levels.predecessors.value)

    def step(ends, level):
        ops, before = level
        new = jnp.max(ends[before], axis=1) + latencies[ops]
        return ends.at[jnp.where(ops < 0, levels.num_ops + 1, ops)].set(new, mode="drop"), None

    ends, _ = lax.scan(step, ends, (jnp.asarray(lanes), before))
    return ends[:-1]
