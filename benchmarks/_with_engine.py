"""The reference step with this engine, and what it is measured against: its own draws alone."""

from typing import Any

import numpy as np


def program(graph, num_replicas: int = 1):
    """The reference step as a program, of a kernel for each stage and phase."""
    import jax.numpy as jnp

    from prism_jax.latency import LogNormal
    from prism_jax.program import Variability, assemble
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
    from prism_jax.program import assemble
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
    import jax

    from prism_jax.engine._plan import make_plan
    from prism_jax.engine._random import key_data
    from prism_jax.engine._tiles import map_tiles, tiles_of, untile

    total = 0.0

    def keep(first, count, result):
        nonlocal total
        total += float(np.sum(untile(result), dtype=float))

    plan = jax.block_until_ready(make_plan(the_program))
    tiles = tiles_of(the_program.num_ops)
    map_tiles(_sum_of_draws, (plan, key_data(key)), num_samples, keep, tiles=tiles)
    return total / num_samples


def _sum_of_draws(shared, ids):
    import jax.numpy as jnp
    from jax import lax

    from prism_jax.engine._plan import latency
    from prism_jax.engine._random import normals

    plan, key = shared
    program = plan.program
    width = 8
    levels = -(-program.num_ops // width)
    row = np.resize(program.ops.row.value, (levels, width))
    classes = program.rows.class_.value
    means = plan.mean[classes, 0]
    sigmas = plan.sigmas[program.latencies.kind.value[program.blocks.direct.value[classes]]]
    lanes = jnp.arange(width, dtype=jnp.uint32)[:, None]

    def level(total, x):
        number, row = x
        z = normals(key, ids, number * np.uint32(width) + lanes, means.dtype)
        laws = {"own": means[row][:, None], "sigma": sigmas[row][:, None]}
        return total + latency(laws, None, z), None

    start = jnp.zeros((width, *ids.shape), means.dtype)
    numbers = jnp.arange(levels, dtype=jnp.uint32)
    return jnp.sum(lax.scan(level, start, (numbers, jnp.asarray(row)))[0], axis=0)


def value(the_program, num_samples: int, key) -> float:
    """The mean makespan of samples of the core."""
    return _over_tiles(_value_of_tile, the_program, num_samples, key)[0]


def value_and_gradient(the_program, num_samples: int, key):
    """The mean makespan of samples of the core, and its derivative with respect to all parameters
    of the program, in one pass.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from prism_jax.engine._pull_back import _plan_vjp

    total, of_plan = _over_tiles(_value_and_gradient_of_tile, the_program, num_samples, key)
    of_plan = jax.tree.map(lambda g: jnp.asarray(g / num_samples, jnp.float32), of_plan)
    parameters, static = eqx.partition(the_program, eqx.is_inexact_array)
    return total, jax.block_until_ready(_plan_vjp(parameters, static, of_plan))


def _over_tiles(function, the_program, num_samples, key):
    import jax
    import numpy as np

    from prism_jax.engine._random import key_data
    from prism_jax.engine._simulate import make_plan_jit
    from prism_jax.engine._tiles import map_tiles, sum_tiles, tiles_of

    plan = jax.block_until_ready(make_plan_jit(the_program))
    totals: Any = None

    def keep(first, count, result):
        nonlocal totals
        zero = jax.tree.map(lambda x: np.zeros(x.shape[1:]), result[0])
        totals = sum_tiles(result, zero if totals is None else totals)

    tiles = tiles_of(the_program.num_ops)
    map_tiles(function, (plan, key_data(key)), num_samples, keep, tiles=tiles)

    total, of_plan = totals
    return float(total) / num_samples, of_plan


def _value_of_tile(shared, ids):
    import jax.numpy as jnp

    from prism_jax.engine._replica import replica_ends, strata_of

    plan, key = shared
    ends = replica_ends(plan, ids, key, *strata_of(plan.program, ids))
    return jnp.sum(jnp.max(ends, axis=0)), ()


def _value_and_gradient_of_tile(shared, ids):
    import equinox as eqx
    import jax

    plan, key = shared
    floats, rest = eqx.partition(plan, eqx.is_inexact_array)

    def total(floats):
        return _value_of_tile((eqx.combine(floats, rest), key), ids)[0]

    return jax.value_and_grad(total)(floats)
