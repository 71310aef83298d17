"""The load of a layer and microbatch is one for all its ops, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax._padding import pad
from prism_jax.analysis import Std
from prism_jax.engine._reference import reference_steps
from prism_jax.latency import AbstractLatency, shape_of
from prism_jax.loads import Loads, Unevenness, fullest, with_draws
from prism_jax.program import Variability, block_laws_of
from prism_jax.program._assemble import assemble
from prism_jax.schedule import OneFOneB, op_graph
from prism_jax.workload import Branches, Kernel, Load, Segment

from .helpers import by_numpy, graph_of, lognormal
from .test_reference_steps import _alike


_LOAD = Load(60.0, 8, 65536, 1, 1, np.inf)
_LAYERS, _EXPERTS, _SENT = 3, 2.0, 0.5


def _layers(times: float, load: Load = _LOAD, layers: int = _LAYERS):
    """A block of layers with a dispatch, experts and a combine, and compute before them."""
    send = Kernel("all_to_all", "tokens", times * _SENT, "x", load)
    experts = Kernel("gemm", "experts", times * _EXPERTS, load=load)
    before = Kernel("norm", "before", times)
    return (
        (Segment(((before, 1),), send), layers),
        (Segment(((experts, 1),), send), layers),
    )


def _program(ranks: int, microbatches: int, variability=None, **options):
    graph = op_graph(OneFOneB(ranks, microbatches))
    blocks = {"F": _layers(1.0), "B": _layers(2.0), "SR": ()}
    of_ops = [blocks[phase] for phase in graph.phase]
    return assemble(graph, of_ops, variability=variability, group_size=8, **options)


def _law_of_load(concentration: float) -> tuple[float, float, float]:
    loads = Loads(*np.array([[8], [65536], [1], [1]]), capacity=(np.inf,))
    loads = pad(with_draws(loads), {}, float)
    uneven = Unevenness(jnp.asarray([concentration]), jnp.ones(1))
    mean, variance, third = by_numpy(fullest)(loads, uneven).load
    std, skewness = shape_of(variance, third)
    return float(mean[0]), float(std[0]), float(skewness[0])


def _at(program, concentration):
    uneven = program.loads.unevenness
    uneven = dataclasses.replace(uneven, concentration=uneven.concentration * 0 + concentration)
    return dataclasses.replace(program, loads=dataclasses.replace(program.loads, unevenness=uneven))


def test_all_ops_of_a_microbatch_have_the_loads_of_its_layers():
    """Two microbatches one after the other, of which nothing else varies: in closed form."""
    microbatches, each = 2, 3 * (_EXPERTS + 2 * _SENT)
    program = _program(1, microbatches)
    law = prism.simulate(program, num_samples=100_000, key=jax.random.key(0), sampling="plain")
    _, std, skewness = _law_of_load(_LOAD.concentration)
    layers, ids = microbatches * _LAYERS, jnp.arange(100_000, dtype=jnp.uint32)
    assert law.std == pytest.approx(np.sqrt(layers) * each * std, rel=0.01)
    steps = prism.sample_replica_ends(program, ids, jax.random.key(1))
    skewed = np.mean((np.asarray(steps[0], float) - law.mean) ** 3) / law.std**3
    assert skewed == pytest.approx(skewness / np.sqrt(layers), abs=0.03)


@pytest.mark.slow
def test_the_spread_has_its_derivative_in_the_concentration():
    program = _program(1, 2)

    def std(concentration):
        changed = _at(program, concentration)
        return prism.estimate(changed, Std(), num_samples=16384, key=jax.random.key(0))

    at, step = jnp.asarray(60.0), 0.5
    up, down = (_law_of_load(60.0 + sign * step)[1] for sign in (1, -1))
    slope = np.sqrt(2 * _LAYERS) * 3 * (_EXPERTS + 2 * _SENT) * (up - down) / (2 * step)
    assert float(jax.grad(std)(at)) == pytest.approx(slope, rel=0.03)


@pytest.mark.slow
def test_pipelines_and_replicas_are_those_that_are_simulated_one_by_one():
    each = {"gemm": 0.05, "norm": 0.05, "all_to_all": 0.1}
    laws: dict[str, AbstractLatency] = {kind: lognormal(sigma) for kind, sigma in each.items()}
    varied = Variability(residual=laws, rank=lognormal(0.02), microbatch=lognormal(0.03))
    program = _program(2, 4, varied, num_replicas=4)
    law = prism.simulate(program, num_samples=8_000, key=jax.random.key(1))
    _alike(reference_steps(program, 8_000, 0), law)


@pytest.mark.parametrize(("beside", "share"), [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)])
def test_an_exchange_beside_compute_goes_with_the_load_as_far_as_it_decides(beside, share):
    send = Kernel("all_to_all", "tokens", 0.64, "x", _LOAD)
    mean, spread, _ = _law_of_load(_LOAD.concentration)
    compute = ((Kernel("gemm", "shared experts", beside * mean * 0.64), 1),) if beside else ()
    block = ((Segment((), None, (Branches(compute, (((send, 1),),)),)), _LAYERS),)
    program = assemble(graph_of([()]), [block], group_size=8)
    std, _ = np.asarray(block_laws_of(program).load)[:, 0, 0]
    whole = np.sqrt(_LAYERS) * 0.64 * spread
    assert std / whole == pytest.approx(share, abs=0.1)
