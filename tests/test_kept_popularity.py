"""Experts whose popularity stays, given by a file or drawn once for a run; and the load of a layer
and microbatch, which is one for all its ops.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtr, ndtri

import prism_jax as prism
from prism_jax._padding import pad
from prism_jax.analysis import Std
from prism_jax.data import load_job
from prism_jax.engine import prepare
from prism_jax.engine._reference import reference_steps
from prism_jax.latency import AbstractLatency, shape_of
from prism_jax.loads import Loads, Unevenness, fullest, with_draws
from prism_jax.op_law import class_moments, gpu_factors
from prism_jax.op_law._segment import NODE_SCORES, segment_maxima
from prism_jax.op_law._tables import _gpu_spread
from prism_jax.program import Blocks, Variability, compile_job
from prism_jax.program._assemble import assemble
from prism_jax.replica import make_plan
from prism_jax.schedule import OneFOneB, op_graph
from prism_jax.workload import Branches, Kernel, Load, Segment
from prism_jax.workload._architecture import layers_of
from prism_jax.workload.modules import MoE

from .helpers import by_numpy, graph_of, lognormal
from .test_expert_load import EXPERTS, waits
from .test_reference_steps import _alike


# Concentration that shares are drawn by, members, experts of each, tokens that are sent.
_CASES = [
    (c, *case)
    for c in (1.0, 10.0, 100.0, 1000.0, np.inf)
    for case in ((2, 4, 8192), (8, 1, 65536), (8, 16, 65536), (64, 4, 131072))
]
_fullest = by_numpy(fullest)


def _shares(rng, concentration, members, experts):
    number = members * experts
    if not np.isfinite(concentration):
        return np.full((members, experts), 1 / number)
    return rng.dirichlet(np.full(number, concentration / number)).reshape(members, experts)


def _loads(shares, counts, capacity=None):
    room = np.full((len(shares), *np.max([one.shape for one in shares], axis=0)), np.nan)
    for row, one in zip(room, shares, strict=True):
        row[: one.shape[0], : one.shape[1]] = one
    members, experts = np.array([one.shape for one in shares], float).T
    alike = np.ones_like(members)
    capacity = alike * (np.inf if capacity is None else capacity)
    loads = Loads(members, np.array(counts), experts, alike, capacity, np.nan_to_num(room, nan=-1))
    loads = pad(with_draws(loads), {}, float)
    return loads, Unevenness(jnp.asarray(np.inf * alike), jnp.asarray(alike))


def _counted(rng, samples, shares, counts, capacity=np.inf):
    """The loads of all members, by counting tokens."""
    loads = rng.multinomial(counts, shares.ravel(), size=samples) * shares.size / counts
    return np.minimum(loads, capacity).reshape(samples, *shares.shape).mean(axis=2)


def test_the_fullest_member_is_that_of_counted_tokens():
    rng, samples = np.random.default_rng(0), 4000
    shares = [_shares(rng, *case[:3]) for case in _CASES]
    found = np.asarray(_fullest(*_loads(shares, [case[3] for case in _CASES])).load)
    for case, one, (mean, variance, _) in zip(_CASES, shares, found.T, strict=True):
        drawn = _counted(rng, samples, one, case[3]).max(axis=1)
        assert abs(np.mean(drawn) - mean) < 4.5 * np.std(drawn) / np.sqrt(samples), case
        assert np.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.05), case


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1.0, 1.25, 2.0])
def test_capacity_cuts_loads_of_kept_popularities(capacity):
    rng = np.random.default_rng(1)
    cases = [*_CASES, *((c, 1, 16, 8192) for c in (10.0, 100.0))]
    shares = [_shares(rng, *case[:3]) for case in cases]
    found = np.asarray(_fullest(*_loads(shares, [case[3] for case in cases], capacity)).load)
    for case, one, (mean, variance, _) in zip(cases, shares, found.T, strict=True):
        drawn = _counted(rng, 2000, one, case[3], capacity).max(axis=1)
        assert mean == pytest.approx(np.mean(drawn), rel=0.002), case
        # Where nearly all is cut, little is left that varies.
        assert np.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.07, abs=6e-4), case


@pytest.mark.slow
def test_members_who_drop_nearly_all_beyond_their_capacity_have_loads():
    """Of a law that is nearly a point, in single precision: what is skewer than a cube can be is
    taken for less, and a point has no skewness.
    """
    tops, members, capacity = np.linspace(1.2, 1.5, 61), 8, 1.25
    each = [np.array([[top, *[(members - top) / (members - 1)] * (members - 1)]]) for top in tops]
    loads, uneven = _loads([one.T / members for one in each], [65536] * len(tops), capacity)
    laws = loads, uneven
    single = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == float else x, laws)
    for some, parameters in (single, laws):
        found = fullest(some, parameters, 0.02)
        assert np.all(np.isfinite(np.concatenate(jax.tree.leaves(found), axis=None)))
        np.testing.assert_allclose(found.load[0], np.minimum(tops, capacity), atol=0.006)
        # One member is the fullest, whether it stands alone or among the others.
        np.testing.assert_allclose(found.correction[0], 0, atol=1e-4)


@pytest.mark.slow
def test_kept_popularities_have_the_mean_of_redrawn_ones():
    """And those whose experts are equally popular have the same law, whichever way it is made."""
    rng, runs, concentrations = np.random.default_rng(2), 100, (20.0, 200.0, np.inf)
    shares = [_shares(rng, c, 8, 1) for c in concentrations for _ in range(runs)]
    unknown = [np.full((8, 1), np.nan)] * 3
    loads, uneven = _loads([*shares, *unknown], [65536] * (len(shares) + 3))
    concentration = uneven.concentration.at[-3:].set(jnp.asarray(concentrations))
    found = np.asarray(_fullest(loads, Unevenness(concentration, uneven.spread)).load)
    for number, one in enumerate(concentrations):
        kept, anew = found[:, number * runs : (number + 1) * runs], found[:, number - 3]
        assert np.mean(kept[0]) == pytest.approx(anew[0], abs=4 * np.sqrt(anew[1] / runs))
        both = np.var(kept[0]) + np.mean(kept[1])
        assert both == pytest.approx(anew[1], rel=0.3 if np.isfinite(one) else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_the_derivative_where_only_some_layers_have_popularities_that_stay(capacity):
    """With respect to the spread of loads, which sensitivities to `expert_load` are, and to that of
    GPUs, if there is none.
    """
    shares = [np.array([[3.0], *[[1.0]] * 7]) / 10, np.full((8, 1), np.nan)]
    loads, uneven = _loads(shares, [65536] * 2, capacity)
    concentration = jnp.asarray([jnp.inf, 50.0])

    def sums(spread, sigma):
        gpus = _gpu_spread(lognormal(sigma), spread.dtype)
        found = fullest(loads, Unevenness(concentration, spread), gpus)
        return sum(jnp.sum(x) for x in jax.tree.leaves(found))

    value_of, slope_of = by_numpy(sums), by_numpy(jax.grad(sums, argnums=(0, 1)))
    for sigma in (0.0, 0.02):
        at = jnp.asarray(sigma)
        slopes, of_gpus = slope_of(uneven.spread, at)
        assert np.isfinite(of_gpus)
        for number, slope in enumerate(slopes):
            up, down = (uneven.spread.at[number].add(by) for by in (1e-5, -1e-5))
            assert float(slope) == pytest.approx(
                float(value_of(up, at) - value_of(down, at)) / 2e-5, rel=1e-4, abs=1e-6
            )


def test_members_wait_for_the_slowest_of_load_times_gpu():
    rng, concentrations = np.random.default_rng(3), (1.0, 10.0, 100.0, 1000.0, np.inf)
    shares = [_shares(rng, c, 8, 1) for c in concentrations]
    found = _fullest(*_loads(shares, [65536] * len(shares)), 0.02)
    loads = [_counted(rng, 20_000, one, 65536) for one in shares]
    for c, (mean, std, ends) in zip(concentrations, waits(rng, found, loads), strict=True):
        assert mean == pytest.approx(np.mean(ends), rel=0.005), c
        # Closest where it is clear who is the fullest, or where all are.
        assert std == pytest.approx(np.std(ends), rel=0.2 if c == 1000.0 else 0.02), c


@pytest.mark.parametrize("deciding", [1, 2])
def test_the_gpu_of_the_fullest_member_skews_no_segment(deciding):
    """One or two of eight members can decide, any of them. What a segment draws anew, on GPUs that
    stay, has the spread and the skewness of drawn ones, however slow the slowest GPU is.
    """
    rng, sigma, noise, members, size = np.random.default_rng(6), 0.01, 0.005, 8, (400, 400)
    groups, _ = by_numpy(gpu_factors)(lognormal(sigma), jnp.asarray([float(members)]), jnp.zeros(1))
    group = jax.tree.map(lambda x: x[0], groups)
    numbers = jnp.asarray([1.0, noise**2, 0.0])
    counts = jnp.asarray([members, deciding / members])
    found = np.asarray(by_numpy(segment_maxima)(*numbers, group, *counts))
    for node in (4, 9, 18):
        below = ndtr(NODE_SCORES[node]) ** (1 / members)  # P(a GPU is below the slowest).
        gpus = np.exp(sigma * ndtri(below * rng.random((deciding, size[0]))) - sigma**2 / 2)
        slowest = rng.random(size[0]) < deciding / members
        gpus[0] = np.where(slowest, np.asarray(group.slowest)[node], gpus[0])
        ends = np.full(size, -np.inf)
        for gpu in gpus:
            ends = np.maximum(ends, gpu[:, None] * (1 + noise * rng.standard_normal(size)))
        anew = ends - ends.mean(axis=1, keepdims=True)
        std = np.sqrt(np.mean(anew**2))
        assert np.sqrt(found[1, node]) == pytest.approx(std, rel=0.02)
        assert found[2, node] / std**3 == pytest.approx(np.mean(anew**3) / std**3, abs=0.15)


_LAYERS = 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("concentration", "kinds", "within"),
    [(10.0, 1, 0.02), (1000.0, 1, 0.15), (10.0, _LAYERS, 0.12), (1000.0, _LAYERS, 0.12)],
)
def test_layers_whose_fullest_member_is_the_same_share_its_gpu(concentration, kinds, within):
    """Of one popularity for all layers, and of one for each, where members of eight come again."""
    rng, samples, sigma, members = np.random.default_rng(5), 10_000, 0.02, 8
    shares = [_shares(rng, concentration, members, 1) for _ in range(kinds)]
    each = _LAYERS // kinds
    loads, uneven = _loads(shares, [65536] * kinds)
    blocks = Blocks(
        direct=jnp.full((1,), -1),
        compute=jnp.ones((1,), bool),
        segments=jnp.eye(kinds),
        class_segments=jnp.full((1, kinds), float(each)),
        class_collectives=jnp.zeros((1, kinds)),
        members=jnp.full(kinds, float(members)),
        group=jnp.zeros(kinds, int),
    )
    cumulants = jnp.asarray([[1.0], [1e-4], [0.0]]) * jnp.ones((1, kinds))
    groups, _ = gpu_factors(lognormal(sigma), jnp.asarray([float(members)]), jnp.zeros(1))
    load = _fullest(loads, uneven, sigma)
    network, acting = jnp.ones((kinds, 1)), dataclasses.replace(loads, kernels=jnp.eye(kinds))
    _, moments, shared, *_ = class_moments(blocks, cumulants, network, groups, acting, load)
    gpus = np.exp(sigma * rng.standard_normal((samples, members)) - sigma**2 / 2)
    drawn = np.zeros(samples)
    for one in [one for one in shares for _ in range(each)]:
        runs = 1 + 0.01 * rng.standard_normal((samples, members))
        drawn += (gpus * _counted(rng, samples, one, 65536) * runs).max(axis=1)
    mean, std, others = (
        np.interp(gpus.max(axis=1), groups.slowest[0], row[0, 0])
        for row in (*np.asarray(moments[:2]), np.asarray(shared))
    )
    assert np.mean(mean) == pytest.approx(np.mean(drawn), rel=0.005)
    found = np.sqrt(np.mean(std**2 + others**2) + np.var(mean))
    assert found == pytest.approx(np.std(drawn), rel=within)


def _job(*overrides):
    return load_job(EXPERTS, overrides=[f"model.modules.moe.{one}" for one in overrides])


def test_experts_whose_popularity_stays_run_on_gpus_that_differ():
    """Their blocks are hardly skewed, so the limit on skewness refuses no such job."""
    moe = ("num_experts=64", "load_seed=1", "load_concentration=50")
    values = ["kernels.rank.sigma=0.01", *(f"model.modules.moe.{value}" for value in moe)]
    program = compile_job(load_job(EXPERTS, values))
    moments = np.asarray(prepare(program, jax.random.key(0)).plan.tables.moments)
    assert np.abs(moments[2]).max() < 0.5


def _popularity(job):
    modules = [one for part in layers_of(job.model) for one in part.modules]
    return [one.load_popularity for one in modules if isinstance(one, MoE)]


def test_each_layer_of_a_run_has_experts_of_its_own():
    first = _popularity(_job("load_concentration=50", "load_seed=1"))
    again = _popularity(_job("load_concentration=50", "load_seed=1"))
    other = _popularity(_job("load_concentration=50", "load_seed=2"))
    assert first == again
    assert len({*first, *other}) == 4
    even = _popularity(_job("load_concentration=inf", "load_seed=1"))
    assert set(even) == {(1 / 8,) * 8}
    assert _popularity(_job("load_concentration=50")) == [None, None]


@pytest.mark.slow
def test_a_job_whose_experts_are_equally_popular():
    """Takes as long with these popularities given as with any other way to say so; and longer where
    an expert has more.
    """

    def mean(*overrides):
        program = compile_job(_job(*overrides))
        return prism.simulate(program, num_samples=8192, key=jax.random.key(0)).mean

    even = mean("load_concentration=inf")
    assert mean("load_popularity=[5,5,5,5,5,5,5,5]") == pytest.approx(even, rel=1e-4)
    assert mean("load_popularity=[5,5,5,5,5,5,5,9]") > 1.05 * even


_LOAD = Load(60.0, 8, 65536, 1, 1, np.inf)
_SHARED_LAYERS, _EXPERTS, _SENT = 3, 2.0, 0.5


def _layers(times: float, load: Load = _LOAD, layers: int = _SHARED_LAYERS):
    """A block of layers with a dispatch, experts and a combine, and compute before them."""
    send = Kernel("all_to_all", "tokens", times * _SENT, "x", load)
    experts = Kernel("gemm", "experts", times * _EXPERTS, load=load)
    before = Kernel("norm", "before", times)
    return ((Segment(((before, 1),), send), layers), (Segment(((experts, 1),), send), layers))


def _pipeline(ranks: int, microbatches: int, variability=None, **options):
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
    program = _pipeline(1, microbatches)
    law = prism.simulate(program, num_samples=100_000, key=jax.random.key(0), sampling="plain")
    _, std, skewness = _law_of_load(_LOAD.concentration)
    layers, ids = microbatches * _SHARED_LAYERS, jnp.arange(100_000, dtype=jnp.uint32)
    assert law.std == pytest.approx(np.sqrt(layers) * each * std, rel=0.01)
    steps = prism.sample_replica_ends(program, ids, jax.random.key(1))
    skewed = np.mean((np.asarray(steps[0], float) - law.mean) ** 3) / law.std**3
    assert skewed == pytest.approx(skewness / np.sqrt(layers), abs=0.03)


@pytest.mark.slow
def test_the_spread_has_its_derivative_in_the_concentration():
    program = _pipeline(1, 2)

    def std(concentration):
        changed = _at(program, concentration)
        return prism.estimate(changed, Std(), num_samples=16384, key=jax.random.key(0))

    at, step = jnp.asarray(60.0), 0.5
    up, down = (_law_of_load(60.0 + sign * step)[1] for sign in (1, -1))
    slope = np.sqrt(2 * _SHARED_LAYERS) * 3 * (_EXPERTS + 2 * _SENT) * (up - down) / (2 * step)
    assert float(jax.grad(std)(at)) == pytest.approx(slope, rel=0.03)


@pytest.mark.slow
def test_pipelines_and_replicas_are_those_that_are_simulated_one_by_one():
    each = {"gemm": 0.05, "norm": 0.05, "all_to_all": 0.1}
    laws: dict[str, AbstractLatency] = {kind: lognormal(sigma) for kind, sigma in each.items()}
    varied = Variability(residual=laws, rank=lognormal(0.02), microbatch=lognormal(0.03))
    program = _pipeline(2, 4, varied, num_replicas=4)
    law = prism.simulate(program, num_samples=8_000, key=jax.random.key(1))
    _alike(reference_steps(program, 8_000, 0), law)


@pytest.mark.parametrize(("beside", "share"), [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)])
def test_an_exchange_beside_compute_goes_with_the_load_as_far_as_it_decides(beside, share):
    send = Kernel("all_to_all", "tokens", 0.64, "x", _LOAD)
    mean, spread, _ = _law_of_load(_LOAD.concentration)
    compute = ((Kernel("gemm", "shared experts", beside * mean * 0.64), 1),) if beside else ()
    block = ((Segment((), None, (Branches(compute, (((send, 1),),)),)), _SHARED_LAYERS),)
    program = assemble(graph_of([()]), [block], group_size=8)
    std, _ = np.asarray(make_plan(program).tables.load)[:, 0, 0]
    whole = np.sqrt(_SHARED_LAYERS) * 0.64 * spread
    assert std / whole == pytest.approx(share, abs=0.1)
