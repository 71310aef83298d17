"""Finds the leading axes, whose scores do not come from the stream of each op but from importance
sampling.

A replica sample is a function of independent standard normals: one for each op, each pipeline
rank's slowest GPU, each microbatch, each rank in its step, and the loads of each stage and
microbatch. Those along which its end rises fastest, on average, lead.
"""

import statistics
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._padding import bucket
from ..host import on_host, vjp_on_host
from ..maxplus import cells, critical_ops, op_ends
from ..program import Program
from ..random import KeyData, key_data
from ._ends import Axes, Lead, by_strata, replica_latencies
from ._plan import Plan, load_numbers, mean_reductions, without_graph, without_steps


_MOST_AXES = 256
# The gradient is the mean over this many samples, or fewer if there are many axes. A sixteenth of
# them is enough for the direction along given axes; all are computed by pieces of a sixteenth, or
# of `_AT_ONCE` numbers if that is more.
_PILOT_SAMPLES = 1024
_PILOT_NUMBERS = 2**19
_FOR_DIRECTION = 16
_AT_ONCE = 2**15
# Importance sampling aims at this quantile of the step, from the top.
_AIM = 0.01


def leading_axes(program: Program, plan: Plan, key: "jax.Array") -> Lead:
    """Finds the leading axes by the mean gradient of a replica's end."""
    gradient = _gradient(program, plan, key)
    # Axes of zero gradient are kept: along them the end may rise with other parameters.
    leading = np.argsort(-np.abs(gradient), kind="stable")[:_MOST_AXES]
    order = np.append(leading, np.full(_MOST_AXES - len(leading), -1)).astype(np.int32)
    share = _AIM / program.num_replicas
    shift = -statistics.NormalDist().inv_cdf(share)
    row = np.full(len(gradient), _MOST_AXES)
    row[leading] = np.arange(len(leading))
    return Lead(
        axes=_axes(program, plan, row, _MOST_AXES, np.asarray(plan.structure.replica.levels.ops)),
        order=order,
        direction=_direction(gradient, order, plan),
        shift=jax.device_put(np.asarray(shift, plan.dtype)),
    )


def redirected(lead: Lead, program: Program, plan: Plan, key: "jax.Array") -> Lead:
    """The same axes, shifted in the direction of a program with other parameters. What varies less
    in it would only make its samples weigh unlike.
    """
    gradient = _gradient(program, plan, key, whole=False)
    return replace(lead, direction=_direction(gradient, np.asarray(lead.order), plan))


def _gradient(
    program: Program, plan: Plan, key: "jax.Array", *, whole: bool = True
) -> Float[np.ndarray, " axes"]:
    """The mean gradient of the end of a replica without stalls, along all axes: that of the latency
    of each op, if it is on the critical path. By NumPy, because it takes seconds to compile.

    **Arguments:**

    - `whole`: whether of all samples, or of those that are enough for a direction.
    """
    number, num_ops = sum(_counts(program)), program.num_ops
    room = bucket(number, 64)  # Of axes and of ops, so that many graphs share what JAX traces.
    most = _PILOT_SAMPLES
    num_directions = (
        int(np.clip(_PILOT_NUMBERS // room, 16 * _FOR_DIRECTION, most)) // _FOR_DIRECTION
    )
    samples = int(np.clip(_PILOT_NUMBERS // room, 16, most)) if whole else num_directions
    at_once = max(num_directions, _AT_ONCE // room)
    words = key_data(key)
    rng = np.random.Generator(np.random.Philox(key=[int(word) for word in np.asarray(words)]))
    scores = np.zeros((room, samples), plan.dtype)
    scores[:number] = rng.standard_normal((number, samples))
    op = np.where(np.arange(room) < num_ops, np.arange(room), -1)
    axes = _axes(program, plan, np.arange(number), room, op)
    after = np.asarray(on_host(mean_reductions, without_graph(plan)))[: program.sinks.number]
    of_ops = _in_one_line(program, plan, op), axes, words
    levels, slopes = program.levels, np.zeros((number, samples), plan.dtype)
    for first in range(0, samples, at_once):
        batch = slice(first, first + at_once)
        ids = np.arange(samples, dtype=np.uint32)[batch]
        (latencies, regimes), backward = vjp_on_host(_latencies, *of_ops, ids, scores[:, batch])
        ends = op_ends(levels, np.asarray(latencies, np.float64)[:num_ops])
        reduced = ends[levels.sink_ops].max(axis=1) + after[:, np.asarray(regimes)]
        critical = np.zeros(latencies.shape, plan.dtype)
        critical[:num_ops] = critical_ops(levels, ends, reduced.argmax(axis=0))
        slopes[:, batch] = backward((critical[None], np.zeros((1, *regimes.shape))))[0, :number]
    return np.mean(slopes, axis=1)


def _in_one_line(program: Program, plan: Plan, op: Int[np.ndarray, " room"]) -> Plan:
    """The plan of ops in the order of their numbers, in place of lanes, and without stalls and all
    that follows.
    """
    cell = cells(program.levels)[op]

    def parts(plan: Plan):
        replica = plan.structure.replica
        kept = replica.ops, replica.levels, replica.stall_op
        return [*kept, plan.structure.sinks, plan.structure.tail]

    ops = jax.tree.map(lambda x: jax.device_put(np.asarray(x)[cell]), plan.structure.replica.ops)
    replaced = [ops, None, None, None, None]
    return without_steps(eqx.tree_at(parts, plan, replaced, is_leaf=lambda x: x is None))


def _latencies(plan: Plan, axes: Axes, key: KeyData, ids, scores: Float[Array, "axes samples"]):
    """The latencies of ops from scores of all axes, and the network's regimes of the samples."""
    sampled = by_strata(plan, ids)
    latencies = replica_latencies(plan, replace(sampled, leading=(axes, scores)), key)
    law = jax.tree.map(lambda table, row: table[row], latencies.tables, latencies.rows)
    seconds = law.latency(axes.ops[:, None], jnp.zeros((), plan.dtype), latencies.common)
    return jnp.broadcast_to(seconds, scores.shape), sampled.regimes


def _direction(gradient: np.ndarray, order: np.ndarray, plan: Plan) -> Float[Array, " axes"]:
    """The gradient along the leading axes, as a vector of unit length."""
    leading = np.where(order >= 0, gradient[order], 0)
    length = np.linalg.norm(leading)
    return jax.device_put(np.asarray(leading / (length if length > 0 else 1), plan.dtype))


def _counts(program: Program) -> tuple[int, int, int, int, int]:
    """The numbers of ops, ranks, microbatches, ranks with a factor in each step, and loads."""
    worker_steps = 0 if program.variability.worker_step is None else program.num_ranks
    pairs = len(load_numbers(program)[1])
    return program.num_ops, program.num_ranks, program.num_microbatches, worker_steps, pairs


def _axes(
    program: Program,
    plan: Plan,
    row: Int[np.ndarray, " axes"],
    rows: int,
    op: Int[np.ndarray, "..."],
) -> Axes:
    """Axes from the row of scores that each op, rank, microbatch and rank in its step takes, of so
    many rows; and from the op at each place, or -1 for none.
    """
    parts = np.split(row, np.cumsum(_counts(program))[:-1])
    replica, ranks = plan.structure.replica, plan.structure.ranks

    def padded(part: np.ndarray, room: int) -> Any:
        return jax.device_put(np.append(part, np.full(room - len(part), rows)).astype(np.int32))

    return Axes(
        ops=jax.device_put(np.append(parts[0], rows)[np.maximum(op, -1)].astype(np.int32)),
        ranks=padded(parts[1], ranks),
        microbatches=padded(parts[2], replica.num_microbatches),
        worker_steps=padded(parts[3], ranks) if len(parts[3]) else None,
        loads=None if replica.load_class is None else padded(parts[4], len(replica.load_class)),
    )
