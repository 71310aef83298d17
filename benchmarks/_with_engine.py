"""The reference step with this engine, and the rate of its random draws alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import prism_jax as prism
from prism_jax import op_law, replica
from prism_jax.random import key_data, normal_pairs

from ._baselines import SIGMA


_WIDTH = 8  # Ops of a level of draws.


def program(graph, num_replicas: int = 1, **shared):
    """The reference step as a program, of a kind of kernel for each stage and phase; `shared` are
    the laws of shared factors.
    """
    kinds = [f"{phase} {stage}" for phase, stage in zip(graph.phase, graph.stage, strict=True)]
    each = zip(graph.means, graph.predecessors, kinds, graph.stage, strict=True)
    law = prism.latency.LogNormal(jnp.exp(-(jnp.asarray(SIGMA) ** 2) / 2), jnp.asarray(SIGMA))
    laws: Any = {"variability": prism.Variability(residual=dict.fromkeys(kinds, law), **shared)}
    return prism.compile_graph([prism.Op(*one) for one in each], num_replicas=num_replicas, **laws)


def draws(the_program, num_samples: int, key) -> float:
    """Draws the same latencies, sums them without a graph, and returns their mean: the limit."""
    # The row of each op's law, eight to a level, all of them full.
    levels = -(-the_program.num_ops // _WIDTH)
    rows = jnp.asarray(np.resize(the_program.ops.row, (levels, _WIDTH)))
    batches = _batches(_sum_of_draws, the_program, num_samples, key, rows)
    return sum(float(np.sum(x.samples(), dtype=float)) for x in batches) / num_samples


def _batches(function, the_program, num_samples: int, key, *more):
    plan = replica.make_plan(the_program)
    shared, size = (plan, key_data(key), *more), replica.tiles_of(plan)
    return replica.tiles(function, shared, num_samples, per_batch=size)


def _sum_of_draws(shared, ids):
    plan, key, rows = shared
    of_ops = plan.structure.replica
    one, calm = jnp.ones((len(of_ops.rows.class_), 1), plan.dtype), jnp.zeros((1,), jnp.int32)
    rest = of_ops.rows.class_, of_ops.mixed, one, plan.tables.nodes, calm
    law: Any = op_law.class_laws(plan.structure.classes, plan.tables, *rest).single
    pairs = jnp.arange(_WIDTH // 2, dtype=jnp.uint32)[:, None]

    def level(total, x):
        number, row = x
        pair = number * np.uint32(_WIDTH // 2) + pairs
        z = jnp.concatenate(normal_pairs(key, ids, pair, plan.dtype))
        mine = op_law.ClassLaw(None, op_law.Single(law.mean[row], law.sigma[row], None))
        return total + mine.latency(z, None), None

    start = jnp.zeros((_WIDTH, *ids.shape), plan.dtype)
    numbers = jnp.arange(len(rows), dtype=jnp.uint32)
    return jnp.sum(jax.lax.scan(level, start, (numbers, rows))[0], axis=0)


def value(the_program, num_samples: int, key) -> float:
    """The mean makespan of samples of the core."""
    return _over_tiles(_value_of_tile, the_program, num_samples, key)[0]


def value_and_gradient(the_program, num_samples: int, key):
    """The mean makespan of samples of the core, and its derivative with respect to all parameters
    of the program, in one pass.
    """
    total, of_tables = _over_tiles(_value_and_gradient_of_tile, the_program, num_samples, key)
    of_tables = jax.tree.map(lambda g: g[None], of_tables)
    return total, replica.gradients_of(the_program, of_tables)


def _over_tiles(function, the_program, num_samples, key):
    """The means over samples of what a function of a tile sums."""
    totals: Any = None
    for batch in _batches(function, the_program, num_samples, key):
        found = jax.tree.map(lambda x: x.sum(axis=0, dtype=float), batch.by_tile())
        totals = found if totals is None else jax.tree.map(np.add, totals, found)
    total, of_tables = jax.tree.map(lambda x: x / num_samples, totals)
    return float(total), of_tables


def _value_of_tile(shared, ids):
    plan, key = shared
    ends = replica.replica_ends(plan, replica.by_strata(plan, ids), key)
    return jnp.sum(jnp.max(ends, axis=0)), ()


def _value_and_gradient_of_tile(shared, ids):
    plan, key = shared

    def total(tables):
        return _value_of_tile((dataclasses.replace(plan, tables=tables), key), ids)[0]

    return jax.value_and_grad(total)(plan.tables)
