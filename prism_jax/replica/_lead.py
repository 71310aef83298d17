"""The leading axes, whose scores do not come from the stream of each op but from importance
sampling or quasi-random points.

A replica sample is a function of independent standard normals: one for each op, each pipeline
rank's slowest GPU, each microbatch and each rank in its step. Those along which its end rises
fastest, on average, lead.
"""

import statistics
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from ..maxplus import bucket
from ..program import Program
from ..random import KeyData, Stream, counters, fold, key_data, normals
from ._class_laws import mean_reductions
from ._ends import Axes, by_strata, replica_ends
from ._plan import Plan
from ._structure import graph_of


_MOST_AXES = 256
# Half of the samples are drawn by the law itself, so that no weight exceeds two.
_SHIFTED = 0.5
# The gradient is the mean over this many samples, or fewer if there are many axes.
_PILOT_SAMPLES = 1024
_PILOT_NUMBERS = 2**24
# It is compiled for these many levels and lanes, which hold most graphs: fewer programs of its own
# cost less than padding does in so few samples.
_PILOT_ROOM = (4096, 16)
# Sobol points that are made at once, a power of two.
_POINTS = 2**14
# Importance sampling aims at this quantile of the step, from the top.
_AIM = 0.01


class Lead(eqx.Module):
    """The leading axes of a program.

    **Attributes:**

    - `axes`: which draws are leading axes.
    - `order`: the same draws by number, the one along which the end rises fastest first; -1 for
        none.
    - `direction`: the mean gradient of a replica's end along them, of unit length.
    - `shift`: how far half of the samples are shifted along it; zero for no shift.
    """

    axes: Axes
    order: Int[np.ndarray, " axes"]
    direction: Float[Array, " axes"]
    shift: Float[Array, ""]


def leading_axes(program: Program, plan: Plan, key: PRNGKeyArray, *, importance: bool) -> Lead:
    """Finds the leading axes by the mean gradient of a replica's end."""
    counts, room = _counts(program), _room(program, plan)
    starts = np.cumsum([0, *room])
    there = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=False)])
    gradient = _gradient(program, plan, key)
    # Axes of zero gradient are kept: the number of Sobol axes must not depend on values.
    leading = there[np.argsort(-np.abs(gradient[there]), kind="stable")[: num_axes(program)]]
    order = np.append(leading, np.full(_MOST_AXES - len(leading), -1)).astype(np.int32)
    share = _AIM / program.num_replicas
    shift = -statistics.NormalDist().inv_cdf(share) if importance else 0.0
    place = np.full(starts[-1], _MOST_AXES)
    place[leading] = np.arange(len(leading))
    return Lead(
        axes=_axes(plan, place, room),
        order=order,
        direction=_direction(gradient, order, plan),
        shift=jnp.asarray(shift, plan.dtype),
    )


def turned(lead: Lead, program: Program, plan: Plan, key: PRNGKeyArray) -> Lead:
    """The same axes, shifted in the direction of a program with other parameters. What varies less
    in it would only make its samples weigh unlike.
    """
    order = np.asarray(lead.order)
    return replace(lead, direction=_direction(_gradient(program, plan, key), order, plan))


def _gradient(program: Program, plan: Plan, key: PRNGKeyArray) -> np.ndarray:
    """The mean gradient along all axes that there is room for."""
    graph, room = graph_of(program, _PILOT_ROOM), _room(program, plan)
    wide = eqx.tree_at(lambda plan: plan.structure.graph, plan, graph)
    everything = _axes(wide, np.arange(sum(room)), room)
    return np.asarray(_mean_gradient(wide, everything, sum(room), key_data(key)))


def _direction(gradient: np.ndarray, order: np.ndarray, plan: Plan) -> Float[Array, " axes"]:
    """The gradient along the leading axes, as a vector of unit length."""
    leading = np.where(order >= 0, gradient[order], 0)
    length = np.linalg.norm(leading)
    return jnp.asarray(leading / (length if length > 0 else 1), plan.dtype)


def num_axes(program: Program) -> int:
    """The number of leading axes."""
    return min(sum(_counts(program)), _MOST_AXES)


def _counts(program: Program) -> tuple[int, int, int, int]:
    """The numbers of ops, ranks, microbatches, and ranks with a factor in each step."""
    worker_steps = 0 if program.variability.worker_step is None else program.num_ranks
    return program.num_ops, program.num_ranks, program.num_microbatches, worker_steps


def _room(program: Program, plan: Plan) -> tuple[int, int, int, int]:
    """The number of axes that there is room for."""
    ranks, microbatches = plan.structure.ranks, plan.structure.graph.num_microbatches
    worker_steps = 0 if program.variability.worker_step is None else ranks
    return bucket(program.num_ops, 4096, 4), ranks, microbatches, worker_steps


def _axes(plan: Plan, place: np.ndarray, room: tuple[int, int, int, int]) -> Axes:
    """Axes from the row of scores that each op, rank, microbatch and rank in its step takes."""
    ops, ranks, microbatches, worker_steps = np.split(place.astype(np.int32), np.cumsum(room)[:-1])
    lanes = np.asarray(plan.structure.graph.lanes.ops)
    none = np.int32(place.max() + 1)
    return Axes(
        ops=jnp.asarray(np.where(lanes >= 0, ops[lanes], none)),
        ranks=jnp.asarray(ranks),
        microbatches=jnp.asarray(microbatches),
        worker_steps=jnp.asarray(worker_steps) if len(worker_steps) else None,
    )


@eqx.filter_jit
def _mean_gradient(plan: Plan, axes: Axes, number: int, key: KeyData) -> Float[Array, " axes"]:
    """The mean gradient of the end of a replica without stalls, along all axes."""
    samples = int(np.clip(_PILOT_NUMBERS // number, 16, _PILOT_SAMPLES))
    ids = jnp.arange(samples, dtype=jnp.uint32)
    sampled = by_strata(plan, ids)
    sampled = replace(sampled, stalls=jnp.zeros_like(sampled.stalls))
    reductions = mean_reductions(plan)[:, sampled.regimes]

    def total(z):
        ends = replica_ends(plan, replace(sampled, given=(axes, z)), key)
        return jnp.sum(jnp.max(ends + reductions, axis=0))

    z = normals(fold(key, Stream.LEAD), ids, counters(number), plan.dtype)
    return jnp.mean(jax.grad(total)(z), axis=1)


def shifted_scores(
    lead: Lead, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> tuple[Float[Array, "axes samples"], Float[Array, " samples"]]:
    """Scores of the leading axes, where every other sample is shifted, and the likelihood ratio of
    the law to this mixture (Hesterberg, "Weighted average importance sampling and defensive mixture
    distributions", 1995).
    """
    number = lead.direction.shape[0]
    z = normals(fold(key, Stream.LEAD), sample_ids, counters(number), lead.direction.dtype)
    moved = jnp.where(sample_ids % 2 == 1, lead.shift, 0)
    z = z + lead.direction[:, None] * moved[None, :]
    along = jnp.sum(lead.direction[:, None] * z, axis=0)
    ratio = jnp.exp(lead.shift * along - lead.shift**2 / 2)
    return z, 1 / ((1 - _SHIFTED) + _SHIFTED * ratio)


def given_scores(
    lead: Lead | None, sample_ids: UInt32[Array, " samples"], key: KeyData, *points: Any
) -> tuple[tuple[Axes, Float[Array, "axes samples"]] | None, Float[Array, " samples"]]:
    """The given scores of some samples, as in `Sampled`, and the samples' likelihoods. Quasi-random
    `points`, of shape `(samples, axes)`, replace drawn ones.
    """
    likelihood = jnp.ones(sample_ids.shape, jnp.float32)
    if lead is None:
        return None, likelihood
    if points:
        return (lead.axes, points[0].T), likelihood
    scores, likelihood = shifted_scores(lead, sample_ids, key)
    return (lead.axes, scores), likelihood.astype(jnp.float32)


def sobol_scores(
    number: int, room: int, count: int, seed: tuple[int, ...], dtype: Any
) -> Float[np.ndarray, "count room"]:
    """Scores of `count` points of a scrambled Sobol sequence of `number` axes, and zeros for
    further axes for which there is room.

    Source: `scipy.stats.qmc.Sobol`, with linear matrix scrambling and a digital shift.
    """
    from scipy.special import ndtri
    from scipy.stats import qmc

    sequence = qmc.Sobol(number, scramble=True, rng=np.random.default_rng(seed))
    scores = np.zeros((count, room), dtype)
    # A power of two at a time, so that memory holds little but the scores.
    for start in range(0, count, _POINTS):
        points = sequence.random(min(_POINTS, 2 ** max(count - 1, 1).bit_length()))
        # The points lie on a grid of 2^-30, which holds zero.
        points = ndtri(np.clip(points, 2.0**-31, 1 - 2.0**-31))
        scores[start : start + _POINTS, :number] = points[: count - start]
    return scores
