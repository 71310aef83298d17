"""Tables that follow from a program's parameters, computed once before any sample is drawn."""

import dataclasses
import functools as ft
import operator
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from .._padding import bucket, without_axes
from ..host import on_host, vjp_on_host
from ..latency import AbstractLatency, log_sigma
from ..program import Adjustment, Program, Sets, Stall, all_laws, block_laws, relative_cumulants
from ._op_law import NUM_SCORES, SCORE_RANGE, Table
from ._parameters import Varied, exact_gradients, parameters_of
from ._structure import Classes, Structure, structure_of


# So many more stalls than the most of any stratum have all of the rest that matters: with the rates
# and strata of `assemble`, each number has less than 0.4 of the probability of the one before.
_MORE_STALLS = 16


class Tables(eqx.Module):
    """Tables from which latencies are looked up. Differentiable in the program's parameters.

    **Attributes:**

    - `laws`: of each of `all_laws`, its mean, and its relative variance and third central moment,
        to be checked.
    - `moments`: mean, standard deviation and skewness of each class, by regime of the network and
        factor of the slowest GPU, in seconds; zero for a class that is one kernel with a law of its
        own.
    - `shared`: by how much a rank's other GPUs, given the slowest, make all its ops of a class
        vary together: a standard deviation in seconds. `None` where GPUs are equal.
    - `communication`: the same of its communication alone, where compute has factors of its own in
        each step.
    - `skewness`: of the segments that members run by themselves.
    - `nodes`, `tail_nodes`: those factors, for a rank's group and for all GPUs together.
    - `mean`: of each class that is one kernel with a law of its own, by regime, in seconds.
    - `sigmas`: that law's shape, for each kind of kernel, where it is log-normal or constant.
    - `residuals`: tables of that shape where it is neither; `None` where no op needs one.
    - `slowest`, `tail_slowest`, `worker_step`, `microbatch`, `step`: tables of the shared factors,
        of `microbatch` perhaps sets.
    - `loading`: what each class has of the factor of its microbatch, by regime: the share of its
        compute; or, for a single kernel, its loading. `None` where no such factor varies.
    - `load`: the standard deviation in seconds and the skewness of what ops of a stage and
        microbatch share by the loads of their layers, for each class, by regime; `None` if loads
        are equal.
    - `stall_shares`: the share of each entry of `Replica.stall_op`; `stall_sizes` by kind.
    - `stall_slack`: by kind, class and regime, how much of a stall is hidden, in seconds.
    - `stall_meeting`: by class, how likely two stalls of an op are before the same wait.
    - `stall_counts`: the probabilities of 0, 1 ... stalls of a replica.
    - `network`: the probabilities of the regimes.
    - `adjustment`: the factors of the program's.
    """

    laws: Float[Array, "3 laws"]
    moments: Float[Array, "3 classes regimes nodes"]
    shared: Float[Array, "classes regimes nodes"] | None
    communication: Float[Array, "3 classes regimes"] | None
    skewness: Float[Array, " segments"]
    nodes: Float[Array, " nodes"]
    tail_nodes: Float[Array, " nodes"]
    mean: Float[Array, "classes regimes"]
    sigmas: Float[Array, " kinds"]
    residuals: Float[Array, "kinds scores"] | None
    slowest: Table | None
    tail_slowest: Table | None
    worker_step: Table | None
    microbatch: Table | Float[Array, "stretches factors"] | None
    loading: Float[Array, "classes regimes"] | None
    load: Float[Array, "2 classes regimes"] | None
    step: Table | None
    stall_shares: Float[Array, " stalls"] | None
    stall_sizes: Float[Array, "stall_kinds scores"] | None
    stall_slack: Float[Array, "stall_kinds classes regimes"] | None
    stall_meeting: Float[Array, " classes"] | None
    stall_counts: Float[Array, " counts"]
    network: Float[Array, " regimes"]
    adjustment: Adjustment | None


class Plan(eqx.Module):
    """All that the devices need of a program: index arrays, and tables."""

    structure: Structure
    tables: Tables

    @property
    def dtype(self) -> jnp.dtype:
        """Of all times."""
        return self.tables.mean.dtype


def without_graph(plan: Plan) -> Plan:
    """The plan of the parts after the ops; its compiled code serves all graphs."""
    return eqx.tree_at(lambda plan: plan.structure.replica, plan, None)


def without_steps(plan: Plan) -> Plan:
    """The plan of the ops of a replica; its compiled code serves programs whose steps, or the
    contents of whose blocks, differ. No derivative goes through it.
    """
    of_steps = ("laws", "skewness", "tail_nodes", "tail_slowest", "step")
    plan = _without_contents(plan)
    return _without(plan, "structure.last", *map("tables.{}".format, of_steps))


def without_ops(plan: Plan) -> Plan:
    """The plan of the steps that replicas make; its compiled code serves all graphs, and programs
    the contents of whose blocks differ. No derivative goes through it.
    """
    structure, parts = plan.structure, ["structure.replica", "tables.laws", "tables.skewness"]
    if structure.reduced or structure.last.collapsed or structure.last.single:
        return _without(_without_contents(plan), *parts)
    return _without(plan, *parts, "structure.classes", "tables.residuals")


def _without_contents(plan: Plan) -> Plan:
    """The plan without what only tables depend on."""
    classes = plan.structure.classes
    blocks = without_axes(classes.blocks, "segments", "kernels", "branches", "waits")
    return eqx.tree_at(
        lambda plan: plan.structure.classes,
        plan,
        dataclasses.replace(classes, blocks=blocks, loads=None, stalling=None),
    )


def _without(plan: Plan, *parts: str) -> Plan:
    """The plan with `None` for parts that it may have."""
    where = operator.attrgetter(*parts)
    return eqx.tree_at(where, plan, (None,) * len(parts), is_leaf=lambda x: x is None)


def make_plan(program: Program, structure: Structure | None = None) -> Plan:
    """Computes the tables, on the host unless the program is traced. Differentiable.

    **Arguments:**

    - `structure`: of a program that differs in its parameters only, if there is one.
    """
    if isinstance(program.levels.ops, Tracer):
        raise ValueError(
            "The whole numbers of a program cannot be traced; give a function its parameters, of "
            "`eqx.partition(program, eqx.is_inexact_array)`, and combine them with the rest in it."
        )
    structure = structure_of(program) if structure is None else structure
    return Plan(structure, on_host(tabulate, structure.classes, parameters_of(program)))


def gradients_of(program: Program, of_tables: Tables) -> Program:
    """The derivatives of figures with respect to a program's parameters, from those with respect to
    its tables, whose first axis are the figures: a program with this axis before all others, and
    with `None` for everything that is not a float.
    """
    classes = structure_of(program).classes
    _, backward = vjp_on_host(tabulate, classes, parameters_of(program))
    return exact_gradients(program, backward(of_tables))


def tabulate(classes: Classes, parameters: Varied) -> Tables:
    """The tables of classes of ops and parameters."""
    variability, mean = parameters.variability, parameters.latencies.mean
    dtype = mean.dtype
    laws = [*map(variability.residual.__getitem__, sorted(variability.residual))]
    shapes = relative_cumulants(laws, dtype)
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    blocks = block_laws(
        classes.blocks,
        variability,
        mean,
        shapes[:, classes.kind],
        classes.on_network,
        classes.members,
        classes.worker,
        scores,
        parameters.latencies.loading,
        classes.loads,
        parameters.unevenness,
        classes.stalling,
    )
    # These are only checked.
    checked = jax.lax.stop_gradient(list(all_laws(variability).values())[len(laws) :])
    if checked:
        shapes = jnp.concatenate([shapes, relative_cumulants(checked, dtype)], axis=1)
    direct: Any = classes.blocks.direct
    single = (direct >= 0)[:, None]
    stalls = [*map(variability.stalls.__getitem__, sorted(variability.stalls))]
    rates = _rates(stalls, classes)
    sizes = jnp.stack([_at_scores(stall.size, dtype) for stall in stalls]) if stalls else None
    differ = variability.rank is not None or classes.worker is not None
    in_step = _factors(variability.worker_step, dtype)
    if classes.worker is None:
        of_data = _factors(variability.microbatch, dtype)
    else:
        in_step, of_data = (
            None if law is None else table
            for law, table in (
                (variability.worker_step, blocks.in_step),
                (variability.microbatch, blocks.of_data),
            )
        )
    return Tables(
        laws=jax.lax.stop_gradient(shapes),
        moments=jnp.where(single[..., None], 0, blocks.moments),
        shared=blocks.shared if differ else None,
        communication=None if variability.worker_step is None else blocks.communication,
        skewness=blocks.skewness,
        nodes=blocks.nodes[0],
        tail_nodes=blocks.nodes[1],
        mean=jnp.where(single, mean[direct][:, None] * blocks.on_network[direct], 0),
        sigmas=_of_kinds([*map(ft.partial(_sigma, dtype=dtype), laws)]),
        residuals=_of_kinds([_factors(law, dtype) for law in laws]) if classes.tables else None,
        slowest=blocks.at_scores[0] if differ else None,
        tail_slowest=blocks.at_scores[1] if differ else None,
        worker_step=in_step,
        microbatch=of_data,
        loading=blocks.loading,
        load=blocks.load,
        step=_factors(variability.step, dtype),
        stall_shares=None if rates is None else _shares(rates).astype(dtype),
        stall_sizes=None if rates is None else sizes,
        stall_slack=None if rates is None else blocks.slack,
        stall_meeting=None if rates is None else blocks.meeting,
        stall_counts=_counts(rates, classes, dtype),
        network=blocks.probabilities,
        adjustment=parameters.adjustment,
    )


def _rates(stalls: Sequence[Stall], classes: Classes) -> Float[Array, " stalls"] | None:
    """Expected stalls of each op and kind that may stall, in one replica's step."""
    if classes.stall_kind is None or classes.stall_calls is None:
        return None
    rates = jnp.stack([stall.rate for stall in stalls])
    return rates[classes.stall_kind] * classes.stall_calls.astype(rates.dtype)


def _shares(rates: Float[Array, " stalls"]) -> Float[Array, " stalls"]:
    total = jax.lax.stop_gradient(jnp.sum(rates))
    # Twice, because the derivative of the second division has the square of what it divides by.
    rates = rates / jnp.where(total > 0, total, 1)
    return rates / jnp.where(total > 0, jnp.sum(rates), 1)


def _counts(rates, classes: Classes, dtype) -> Float[Array, " counts"]:
    """The probability of 0, 1, ... stalls in one replica's step, up to the most of any stratum,
    which stands for itself and more.
    """
    if rates is None:
        return jnp.ones((1,), dtype)
    rate = jnp.sum(rates)
    # Each from the one before it: powers and factorials alone overflow. A rate of zero and its
    # derivative are right. The last is a sum of more terms, for one minus a sum has few digits.
    terms = [jnp.exp(-rate)]
    for k in range(1, 1 + classes.stall_counts + _MORE_STALLS):
        terms.append(terms[-1] * rate / k)
    law = jnp.stack(terms)
    number = jnp.arange(len(terms), dtype=jnp.int32)
    last = jnp.sum(jnp.where(number >= classes.most_stalls, law, 0))
    law = jnp.where(number < classes.most_stalls, law, 0)
    law = jnp.where(number == classes.most_stalls, last, law)
    return law[: 1 + classes.stall_counts].astype(dtype)


def _of_kinds(values: list[Array]) -> Float[Array, "kinds ..."]:
    """With as many kinds as there is room for."""
    return jnp.stack(
        [*values, *[jnp.ones_like(values[0])] * (bucket(len(values), 16) - len(values))]
    )


def _sigma(law: AbstractLatency, dtype) -> Float[Array, ""]:
    """The parameter of a log-normal law, zero for others."""
    sigma = log_sigma(law)
    return jnp.asarray(0.0 if sigma is None else sigma, dtype)


def _at_scores(law: AbstractLatency, dtype) -> Table:
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    return law.from_normal(scores).astype(dtype) * jnp.ones_like(scores)


def _factors(law: AbstractLatency | Sets | None, dtype) -> Any:
    """A law relative to its mean, in a table; sets as they are; `None` for none."""
    if law is None:
        return None
    if isinstance(law, Sets):
        return (law.factors / law.mean()).astype(dtype)
    return _at_scores(law, dtype) / law.mean().astype(dtype)
