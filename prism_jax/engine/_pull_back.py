"""Derivatives of figures of the step time with respect to a program's parameters.

Three ways lead from a parameter to a step: through the ends of the replica that decides it, through
the step's own draws (factor, reductions, tail), and through the weights of strata, which depend on
the rate of stalls and on the network. The samples are not stored; they are drawn again.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ..program import Program, network_probabilities
from ._decide import Decision, decide
from ._plan import Plan, make_plan
from ._random import KeyData, key_data
from ._replica import replica_ends, strata_of, stratum_weights
from ._replicas import Replicas, weight_derivatives
from ._simulate import (
    check_num_samples,
    check_plan,
    check_program,
    draw_replicas,
    make_plan_jit,
    step_tile,
)
from ._step import compose_steps
from ._tiles import map_tiles, sum_tiles, untile


@dataclasses.dataclass(frozen=True)
class Composed:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64.
    - `decision`: what decided each.
    - `plan`, `key`: of the simulation.
    """

    steps: Float[np.ndarray, " n"]
    decision: Decision
    plan: Plan
    key: KeyData


def composed_steps(program: Program, *, num_samples: int, key: PRNGKeyArray) -> Composed:
    """Simulates steps and keeps their times (8 bytes each)."""
    check_program(program)
    check_num_samples(num_samples)
    plan = make_plan_jit(program)
    check_plan(plan)
    words = key_data(key)
    kept, drawn = draw_replicas(plan, words, num_samples)
    decision = decide(program, kept, words, drawn)
    results = map_tiles(step_tile, (plan, words), drawn, decision.inputs)
    steps = np.concatenate([untile(result) for _, _, result in results]).astype(np.float64)
    return Composed(steps, decision, plan, words)


def pull_back(
    program: Program,
    composed: Composed,
    slope: Float[np.ndarray, " n"],
    influence: Float[np.ndarray, " n"],
) -> Program:
    """The derivative of a figure with respect to the program's parameters.

    **Arguments:**

    - `slope`: of the figure with respect to each step time.
    - `influence`: of the figure with respect to the logarithm of each step's weight.

    **Returns:**

    A program whose parameters are the derivatives; `None` in place of what is not a float.
    """
    plan, decision, key = composed.plan, composed.decision, composed.key
    zero = jax.tree.map(lambda x: np.zeros(x.shape), eqx.filter(plan, eqx.is_inexact_array))
    of_plan, of_ends = _through_steps(composed, slope, zero)
    of_plan = _through_replicas(plan, key, decision.kept, of_ends, of_plan)
    parameters, static = eqx.partition(program, eqx.is_inexact_array)
    of_plan = jax.tree.map(lambda g, x: jnp.asarray(g, x.dtype), of_plan, _floats(plan))
    through_plan = _plan_vjp(parameters, static, of_plan)
    if len(program.strata) == 1:
        return through_plan
    through_weights = _through_weights(composed, influence, parameters, static)
    return jax.tree.map(jnp.add, through_plan, through_weights)


def _floats(plan: Plan) -> Plan:
    return eqx.filter(plan, eqx.is_inexact_array)


@eqx.filter_jit
def _plan_vjp(parameters, static, cotangent):
    _, vjp = jax.vjp(lambda p: _floats(make_plan(eqx.combine(p, static))), parameters)
    return vjp(cotangent)[0]


def _through_steps(composed: Composed, slope, of_plan):
    """Back through the composition of steps, to the plan and to the kept samples' ends."""
    decision = composed.decision
    of_ends = np.zeros(decision.kept.ends.shape)

    def inputs(first, count):
        ends, regimes = decision.inputs(first, count)
        return ends, regimes, slope[first : first + count].astype(ends.dtype)

    shared = (composed.plan, composed.key)
    for first, count, (result, _) in map_tiles(_step_vjp, shared, len(composed.steps), inputs):
        plan_part, ends_part = result
        of_plan = sum_tiles((plan_part, count), of_plan)
        samples = decision.samples(np.arange(first, first + count))
        for row, part in zip(of_ends, untile((ends_part, count)), strict=True):
            row += np.bincount(samples, part, minlength=len(row))
    return of_plan, of_ends


def _step_vjp(shared, ids, ends, regimes, slope):
    plan, key = shared
    floats, rest = eqx.partition(plan, eqx.is_inexact_array)

    def forward(floats, ends):
        return compose_steps(eqx.combine(floats, rest), ends, ids, key, regimes)

    _, vjp = jax.vjp(forward, floats, ends)
    return vjp(slope)


def _through_replicas(plan: Plan, key: KeyData, kept: Replicas, of_ends, of_plan):
    """Back through the samples of a replica that steps depend on, to the plan."""
    needed = np.flatnonzero(np.any(of_ends != 0, axis=0))

    def inputs(first, count):
        chosen = needed[first : first + count]
        return kept.ids[chosen], of_ends[:, chosen].astype(kept.ends.dtype)

    for _, _, result in map_tiles(_replica_vjp, (plan, key), len(needed), inputs):
        of_plan = sum_tiles(result, of_plan)
    return of_plan


def _replica_vjp(shared, _, ids, cotangent):
    plan, key = shared
    floats, rest = eqx.partition(plan, eqx.is_inexact_array)
    regimes, stalls = strata_of(plan.program, ids)

    def forward(floats):
        return replica_ends(eqx.combine(floats, rest), ids, key, regimes, stalls)

    _, vjp = jax.vjp(forward, floats)
    return vjp(cotangent)[0]


def _through_weights(composed: Composed, influence, parameters, static):
    """Through the weights of the strata: how likely stalls and a congested network are."""
    decision = composed.decision
    kept = decision.kept
    regimes, position = decision.picks(np.arange(len(composed.steps)))
    of_stratum = np.zeros(len(kept.counts))
    of_regime = np.zeros(len(decision.probabilities))
    for g, selection in enumerate(decision.selections):
        members = regimes == g
        if not members.any():
            continue
        of_regime[g] = influence[members].sum() / decision.probabilities[g]
        slopes = weight_derivatives(selection, position[members], influence[members])
        slopes -= np.sum(selection.weights * slopes)
        stratum = kept.stratum[selection.order]
        of_stratum += np.bincount(stratum, slopes * selection.weights, len(of_stratum))
    return _weights_vjp(parameters, static, jnp.asarray(of_stratum), jnp.asarray(of_regime))


@eqx.filter_jit
def _weights_vjp(parameters, static, of_stratum, of_regime):
    def forward(parameters):
        program = eqx.combine(parameters, static)
        # The samples of a stratum share its weight, so a relative change of it is one of theirs.
        weights = stratum_weights(program)
        weights = jnp.log(jnp.where(weights > 0, weights, 1))
        return weights, network_probabilities(program)

    outputs, vjp = jax.vjp(forward, parameters)
    return vjp((of_stratum.astype(outputs[0].dtype), of_regime.astype(outputs[1].dtype)))[0]
