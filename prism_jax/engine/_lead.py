"""The axes that matter most, whose scores come from elsewhere than the stream of each op:
importance sampling and quasi-random points.

A replica sample is a function of independent standard normals: one for each op, each pipeline
rank's slowest GPU and each microbatch. Those along which its end rises fastest, on average, lead.
"""

import statistics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from ..program import Program
from ._plan import Plan
from ._random import KeyData, counters, fold, key_data, normals
from ._replica import LEAD, Axes, replica_ends, strata_of
from ._step import mean_reductions


NUM_AXES = 256
# Half of the samples are drawn by the law itself, so that no weight exceeds two.
_SHIFTED = 0.5
# The gradient is the mean over so many samples, fewer where there are many axes.
_PILOT_SAMPLES = 1024
_PILOT_NUMBERS = 2**24
# Sobol points that are made at once, a power of two.
_POINTS = 2**14
# Importance sampling aims at this quantile of the step, from the top.
_AIM = 0.01


class Lead(eqx.Module):
    """The leading axes of a program.

    **Attributes:**

    - `axes`: which axis leads where.
    - `direction`: the mean gradient of a replica's end along them, of unit length.
    - `shift`: how far half of the samples are moved along it; zero for none.
    """

    axes: Axes
    direction: Float[Array, " axes"]
    shift: Float[Array, ""]


def leading_axes(plan: Plan, key: PRNGKeyArray, *, importance: bool) -> Lead:
    """Finds the leading axes by the mean gradient of a replica's end."""
    program = plan.program
    gradient = np.asarray(_mean_gradient(plan, key_data(key)))
    # Axes of zero gradient are kept: the number of rows must not depend on values.
    order = np.argsort(-np.abs(gradient), kind="stable")[:NUM_AXES]
    length = np.linalg.norm(gradient[order])
    direction = gradient[order] / (length if length > 0 else 1)
    share = _AIM / program.num_replicas
    shift = -statistics.NormalDist().inv_cdf(share) if importance else 0.0
    return Lead(
        axes=_axes(program, order),
        direction=jnp.asarray(direction, plan.mean.dtype),
        shift=jnp.asarray(shift, plan.mean.dtype),
    )


def _axes(program: Program, order: np.ndarray) -> Axes:
    """Places of the axes in `order`, which numbers ops, then ranks, then microbatches."""
    counts = (program.num_ops, program.num_ranks, program.num_microbatches)
    place = np.full(sum(counts), len(order), np.int32)
    place[order] = np.arange(len(order))
    ops, ranks, microbatches = np.split(place, np.cumsum(counts)[:-1])
    lanes = program.levels.ops.value
    return Axes(
        ops=jnp.asarray(np.where(lanes >= 0, ops[lanes], len(order))),
        ranks=jnp.asarray(ranks),
        microbatches=jnp.asarray(microbatches),
    )


@eqx.filter_jit
def _mean_gradient(plan: Plan, key: KeyData) -> Float[Array, " axes"]:
    program = plan.program
    number = program.num_ops + program.num_ranks + program.num_microbatches
    axes = _axes(program, np.arange(number))
    samples = int(np.clip(_PILOT_NUMBERS // number, 16, _PILOT_SAMPLES))
    ids = jnp.arange(samples, dtype=jnp.uint32)
    regimes, stalls = strata_of(program, ids)
    reductions = mean_reductions(plan)[:, regimes]

    def total(z):
        ends = replica_ends(plan, ids, key, regimes, jnp.zeros_like(stalls), (axes, z))
        return jnp.sum(jnp.max(ends + reductions, axis=0))

    z = normals(fold(key, LEAD), ids, counters(number), plan.mean.dtype)
    return jnp.mean(jax.grad(total)(z), axis=1)


def shifted_scores(
    lead: Lead, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> tuple[Float[Array, "axes samples"], Float[Array, " samples"]]:
    """Scores of the leading axes, of which every other sample is shifted, and how much likelier
    each sample is by its law than by this mixture (Hesterberg, "Weighted average importance
    sampling and defensive mixture distributions", 1995).
    """
    number = lead.direction.shape[0]
    z = normals(fold(key, LEAD), sample_ids, counters(number), lead.direction.dtype)
    moved = jnp.where(sample_ids % 2 == 1, lead.shift, 0)
    z = z + lead.direction[:, None] * moved[None, :]
    along = jnp.sum(lead.direction[:, None] * z, axis=0)
    ratio = jnp.exp(lead.shift * along - lead.shift**2 / 2)
    return z, 1 / ((1 - _SHIFTED) + _SHIFTED * ratio)


def sobol_scores(number: int, count: int, seed: tuple[int, ...], dtype) -> np.ndarray:
    """Scores of `count` points of a scrambled Sobol sequence: `(count, number)`.

    Source: `scipy.stats.qmc.Sobol`, with linear matrix scrambling and a digital shift.
    """
    from scipy.special import ndtri
    from scipy.stats import qmc

    sequence = qmc.Sobol(number, scramble=True, rng=np.random.default_rng(seed))
    scores = np.empty((count, number), dtype)
    # A power of two at a time, so that memory holds little but the scores.
    for start in range(0, count, _POINTS):
        points = sequence.random(min(_POINTS, 2 ** max(count - 1, 1).bit_length()))
        # The points lie on a grid of 2^-30, which holds zero.
        points = ndtri(np.clip(points, 2.0**-31, 1 - 2.0**-31))
        scores[start : start + _POINTS] = points[: count - start]
    return scores
