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
from ._check import check_num_samples, check_plan, check_program
from ._compose import run_steps
from ._decide import STEP_TILES, Decision, chances, decide
from ._draw import (
    Draws,
    automatic_sampling,
    draw_replicas,
    find_lead,
    given_scores,
    parts,
    sobol_points,
)
from ._plan import Plan, make_plan
from ._random import KeyData, fold, key_data
from ._replica import replica_ends, strata_of, stratum_weights
from ._replicas import Replicas
from ._simulate import make_plan_jit
from ._step import Over, last_spreads, steps_of
from ._tiles import map_tiles, sum_tiles, tiles_of, untile


# The stream of random numbers of replicas that are unlike the others.
ODD = 200


@dataclasses.dataclass(frozen=True)
class Composed:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64; with `over`, probabilities.
    - `over`: see [`Over`][].
    - `parts`: how each part of the run was drawn, and what decided its steps.
    - `plan`, `key`: of the simulation.
    """

    steps: Float[np.ndarray, " n"]
    parts: tuple[tuple[Draws, Decision], ...]
    plan: Plan
    key: KeyData
    over: Over | None = None


def composed_steps(
    program: Program,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    like: Composed | None = None,
    odd: tuple[Program, int] | None = None,
) -> Composed:
    """Simulates steps, as `simulate` does, and keeps their times (8 bytes each).

    With `like`, steps of a program of the same graph, they are drawn in the same way: so that the
    same random numbers mean the same where samples are weighted, too. With `odd`, so many of the
    replicas are those of another program of the same graph; such steps have no derivative.
    """
    check_program(program, key)
    num_samples = check_num_samples(num_samples)
    plan = make_plan_jit(program)
    check_plan(plan)
    words = key_data(key)
    sampling = automatic_sampling(program, num_samples, "vector")
    lead = find_lead(plan, sampling) if like is None else like.parts[0][0].lead
    likely = chances(program)
    number = program.num_replicas - (odd[1] if odd else 0)
    done, steps = [], []
    for first, count in parts(program, num_samples, sampling):
        draws = Draws(sampling, lead, first, count)
        kept, finished = draw_replicas(plan, words, draws)
        if finished:
            decision = decide(program, likely, kept, words, count, num_replicas=number)
            if odd is not None:
                decision = _with_odd(decision, *odd, words, draws)
            done.append((draws, decision))
            finished = run_steps(plan, decision, words, count, steps.append)
        _whole(finished)
    return Composed(np.concatenate(steps).astype(np.float64), tuple(done), plan, words)


def _with_odd(
    decision: Decision, program: Program, number: int, key: KeyData, draws: Draws
) -> Decision:
    """The decision with so many replicas of another program."""
    plan = make_plan_jit(program)
    check_plan(plan)
    own = fold(key, ODD)
    kept, finished = draw_replicas(plan, own, draws)
    _whole(finished)
    other = decide(program, chances(program), kept, own, draws.steps, num_replicas=number)
    # All replicas of a step have the same network.
    offsets = (other.offsets[0], decision.offsets[1])
    other = dataclasses.replace(other, offsets=offsets, shuffled=True)
    return dataclasses.replace(decision, others=(other,))


def given_the_rest(composed: Composed, threshold: float, narrowest: float) -> Composed | None:
    """The same steps as probabilities to take longer than a threshold, given all draws of a step
    but its last.

    **Arguments:**

    - `composed`: from `composed_steps`.
    - `threshold`: in seconds.
    - `narrowest`: the least that the last draw must spread a step by, in seconds.

    **Returns:**

    What was composed; `None` where neither the step factor nor the tail spread it so far.
    """
    spreads = last_spreads(composed.plan, float(np.median(composed.steps)))
    last = max(spreads, key=lambda name: float(spreads[name]), default=None)
    if last is None or float(spreads[last]) <= narrowest:
        return None
    dtype = composed.plan.mean.dtype
    over = Over(jnp.asarray(threshold, dtype), last)
    steps = []
    for draws, decision in composed.parts:
        _whole(run_steps(composed.plan, decision, composed.key, draws.steps, steps.append, over))
    steps = np.concatenate(steps).astype(np.float64)
    return dataclasses.replace(composed, steps=steps, over=over)


def _whole(finished: bool) -> None:
    """A figure of some of the steps would not say so."""
    if not finished:
        raise KeyboardInterrupt


def pull_back(
    program: Program,
    composed: Composed,
    slope: Float[np.ndarray, " n"],
    influence: Float[np.ndarray, " n"],
) -> Program:
    """The derivative of a figure with respect to the program's parameters.

    **Arguments:**

    - `slope`: of the figure with respect to each of `composed.steps`.
    - `influence`: of the figure with respect to the logarithm of each step's weight.

    **Returns:**

    A program whose parameters are the derivatives; `None` in place of what is not a float.
    """
    plan = composed.plan
    of_plan = jax.tree.map(lambda x: np.zeros(x.shape), _floats(plan))
    for draws, decision in composed.parts:
        mine = slice(draws.first, draws.first + draws.steps)
        of_plan, of_ends = _through_steps(composed, decision, slope[mine], of_plan)
        of_plan = _through_replicas(composed, draws, decision.kept, of_ends, of_plan)
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


def _through_steps(composed: Composed, decision: Decision, slope, of_plan):
    """Back through the composition of steps, to the plan and to the kept samples' ends."""
    start = decision.kept.first
    of_ends = np.zeros(decision.kept.ends.shape)

    def inputs(first, count):
        ends, regimes = decision.inputs(first, count)
        return ends, regimes, slope[first - start :][:count].astype(ends.dtype)

    shared = (composed.plan, composed.key, composed.over)

    def add(first, count, result):
        nonlocal of_plan
        plan_part, ends_part = result[0]
        of_plan = sum_tiles((plan_part, count), of_plan)
        samples = decision.samples(first - start, count)
        for rank, part in enumerate(untile((ends_part, count)).T):
            of_ends[:, rank] += np.bincount(samples, part, minlength=len(of_ends))

    _whole(map_tiles(_step_vjp, shared, len(slope), add, inputs, first=start, tiles=STEP_TILES))
    return of_plan, of_ends


def _step_vjp(shared, ids, ends, regimes, slope):
    plan, key, over = shared
    floats, rest = eqx.partition(plan, eqx.is_inexact_array)

    def forward(floats, ends):
        return steps_of(eqx.combine(floats, rest), ends.T, ids, key, regimes, over)

    _, vjp = jax.vjp(forward, floats, ends)
    return vjp(slope)


def _through_replicas(composed: Composed, draws: Draws, kept: Replicas, of_ends, of_plan):
    """Back through the samples of a replica that steps depend on, to the plan."""
    needed = np.flatnonzero(np.any(of_ends != 0, axis=1))
    points = sobol_points(draws, composed.key, kept.ends.dtype)

    def inputs(first, count):
        chosen = needed[first : first + count]
        ids = kept.ids[chosen]
        given = () if points is None else (points[ids - np.uint32(draws.first)],)
        return ids, of_ends[chosen].astype(kept.ends.dtype), *given

    shared = (composed.plan, draws.lead, composed.key)
    tiles = tiles_of(composed.plan.program.num_ops)

    def add(first, count, result):
        nonlocal of_plan
        del first, count
        of_plan = sum_tiles(result, of_plan)

    _whole(map_tiles(_replica_vjp, shared, len(needed), add, inputs, tiles=tiles))
    return of_plan


def _replica_vjp(shared, _, ids, cotangent, *points):
    plan, lead, key = shared
    floats, rest = eqx.partition(plan, eqx.is_inexact_array)
    regimes, stalls = strata_of(plan.program, ids)
    given, _ = given_scores(lead, ids, key, *points)

    def forward(floats):
        return replica_ends(eqx.combine(floats, rest), ids, key, regimes, stalls, given)

    _, vjp = jax.vjp(forward, floats)
    return vjp(cotangent.T)[0]


def _through_weights(composed: Composed, influence, parameters, static):
    """Through the weights of the strata: how likely stalls and a congested network are."""
    program = composed.plan.program
    of_stratum = np.zeros(len(program.strata))
    of_regime = np.zeros(1 + max(s.regime for s in program.strata))
    for draws, decision in composed.parts:
        mine = influence[draws.first :][: draws.steps]
        regimes, position = decision.picks(0, draws.steps)
        for g, selection in enumerate(decision.selections):
            members = regimes == g
            if not members.any():
                continue
            of_regime[g] += mine[members].sum() / decision.probabilities[g]
            total = np.bincount(position[members], mine[members], len(selection.order))
            change = selection.weight_derivatives(total)
            of_stratum += np.bincount(selection.stratum, change, len(of_stratum))
            of_stratum -= change.sum() * selection.mass
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
