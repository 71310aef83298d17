"""The reference step with this engine, and the rate of its random draws alone."""

from typing import Any

import numpy as np


def program(graph, num_replicas: int = 1):
    """The reference step as a program, of a kernel for each stage and phase."""
    import jax.numpy as jnp

    from prism_jax.latency import LogNormal
    from prism_jax.program import Variability
    from prism_jax.program._assemble import assemble
    from prism_jax.schedule import OpGraph
    from prism_jax.workload import Kernel, Segment

    from ._graph import MEANS, SIGMA

    rank = np.array(graph.stage)
    none = np.full(len(rank), -1)
    orders = tuple(tuple(np.flatnonzero(rank == r).tolist()) for r in range(max(rank) + 1))
    ops = OpGraph(
        phase=np.array(graph.phase),
        stage=rank,
        microbatch=np.zeros_like(rank),
        rank=rank,
        peer=none,
        other_stage=none,
        other_microbatch=none,
        backward=np.array(graph.phase) == "B",
        predecessors=tuple(graph.predecessors),
        orders=orders,
        last=tuple((order[-1],) for order in orders),
    )
    blocks = [
        ((Segment(((Kernel(phase, f"stage {stage}", MEANS[phase]), 1),)), 1),)
        for phase, stage in zip(graph.phase, graph.stage, strict=True)
    ]
    law = LogNormal(jnp.exp(-(jnp.asarray(SIGMA) ** 2) / 2), jnp.asarray(SIGMA))
    return assemble(
        ops,
        blocks,
        variability=Variability(residual=dict.fromkeys(MEANS, law)),
        num_replicas=num_replicas,
    )


def interleaved(ranks: int, virtual_stages: int, microbatches: int):
    """A program of interleaved 1F1B with send_recv."""
    from prism_jax.program._assemble import assemble
    from prism_jax.schedule import InterleavedOneFOneB, op_graph
    from prism_jax.workload import Kernel, Segment

    graph = op_graph(InterleavedOneFOneB(ranks, microbatches, virtual_stages))
    seconds = {"F": 1e-3, "B": 2e-3, "SR": 1e-4}
    block = {
        phase: (
            (Segment((), Kernel("send_recv", "x", seconds[phase], "network")), 1)
            if phase == "SR"
            else (Segment(((Kernel(phase, "x", seconds[phase]), 1),)), 1),
        )
        for phase in seconds
    }
    return assemble(graph, [block[phase] for phase in graph.phase])


def draws(the_program, num_samples: int, key) -> float:
    """Draws the same latencies, sums them without a graph, and returns their mean: the limit."""
    from prism_jax.random import key_data
    from prism_jax.replica import make_plan, tiles, tiles_of

    shared = (make_plan(the_program), key_data(key), _op_rows(the_program))
    size = tiles_of(shared[0])
    sums = (batch.samples() for batch in tiles(_sum_of_draws, shared, num_samples, per_batch=size))
    return sum(float(np.sum(x, dtype=float)) for x in sums) / num_samples


def _op_rows(the_program, width: int = 8):
    """The row of each op's law, eight to a level, all of them full."""
    import jax.numpy as jnp

    levels = -(-the_program.num_ops // width)
    return jnp.asarray(np.resize(the_program.ops.row.value, (levels, width)))


def _sum_of_draws(shared, ids):
    import jax.numpy as jnp
    from jax import lax

    from prism_jax.random import normals
    from prism_jax.replica import ClassLaw, class_laws
    from prism_jax.replica._op_law import Single

    plan, key, rows = shared
    width = rows.shape[1]
    graph = plan.structure.graph
    one = jnp.ones((len(graph.row_class), 1), plan.dtype)
    calm = jnp.zeros((1,), jnp.int32)
    law = class_laws(plan, graph.row_class, graph.mixed, one, plan.tables.nodes, calm).single
    assert law is not None
    assert law.sigma is not None
    mean, sigma = law.mean, law.sigma
    lanes = jnp.arange(width, dtype=jnp.uint32)[:, None]

    def level(total, x):
        number, row = x
        z = normals(key, ids, number * np.uint32(width) + lanes, plan.dtype)
        mine = ClassLaw(None, Single(mean[row], sigma[row], None))
        return total + mine.latency(z, None), None

    start = jnp.zeros((width, *ids.shape), plan.dtype)
    numbers = jnp.arange(len(rows), dtype=jnp.uint32)
    return jnp.sum(lax.scan(level, start, (numbers, rows))[0], axis=0)


def value(the_program, num_samples: int, key) -> float:
    """The mean makespan of samples of the core."""
    return _over_tiles(_value_of_tile, the_program, num_samples, key)[0]


def value_and_gradient(the_program, num_samples: int, key):
    """The mean makespan of samples of the core, and its derivative with respect to all parameters
    of the program, in one pass.
    """
    import jax

    from prism_jax.replica._gradient import gradient_of

    total, of_tables = _over_tiles(_value_and_gradient_of_tile, the_program, num_samples, key)
    of_tables = jax.tree.map(lambda g: g / num_samples, of_tables)
    return total, jax.block_until_ready(gradient_of(the_program, of_tables))


def _over_tiles(function, the_program, num_samples, key):
    import jax

    from prism_jax.random import key_data
    from prism_jax.replica import make_plan, tiles, tiles_of

    shared = (make_plan(the_program), key_data(key))
    totals: Any = None
    for batch in tiles(function, shared, num_samples, per_batch=tiles_of(shared[0])):
        found = jax.tree.map(lambda x: x.sum(axis=0, dtype=float), batch.by_tile())
        totals = found if totals is None else jax.tree.map(np.add, totals, found)
    total, of_tables = totals
    return float(total) / num_samples, of_tables


def _value_of_tile(shared, ids):
    import jax.numpy as jnp

    from prism_jax.replica import by_strata, replica_ends

    plan, key = shared
    return jnp.sum(jnp.max(replica_ends(plan, by_strata(plan, ids), key), axis=0)), ()


def _value_and_gradient_of_tile(shared, ids):
    import dataclasses

    import jax

    plan, key = shared

    def total(tables):
        return _value_of_tile((dataclasses.replace(plan, tables=tables), key), ids)[0]

    return jax.value_and_grad(total)(plan.tables)
