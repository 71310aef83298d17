"""The factor of one pipeline rank of one replica in one step, on its compute."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_jax.analysis import Mean, Quantile, estimate, sensitivity
from prism_jax.analysis._knobs import varied
from prism_jax.engine import simulate, simulated_steps
from prism_jax.engine._reference import reference_steps
from prism_jax.latency import Gamma
from prism_jax.op_law import Mixed, class_laws
from prism_jax.program import Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica import leading_axes, make_plan, sample_replica_ends
from prism_jax.schedule import GPipe, OneFOneB
from prism_jax.workload import Kernel, Segment

from .helpers import graph_of, lognormal, one_kernel, pipeline_program, rich_program
from .independent import Laws, simulate_block


def _ends(program, number, seed=0):
    ids = jnp.arange(number, dtype=jnp.uint32)
    return np.asarray(sample_replica_ends(program, ids, jax.random.key(seed)))


@pytest.mark.parametrize(
    "law", [lognormal(0.1), pytest.param(Gamma(1.0, 0.1), marks=pytest.mark.slow)]
)
def test_a_chain_is_its_sum_times_the_factor(law):
    program = pipeline_program(GPipe(1, 4), variability=Variability(worker_step=law))
    found = simulate(program, num_samples=40_000, key=jax.random.key(0))
    assert found.mean == pytest.approx(12.0, abs=4 * found.errors.mean)
    std = 12 * float(jnp.sqrt(law.variance()) / law.mean())
    assert found.std == pytest.approx(std, rel=4 / np.sqrt(2 * 40_000))
    for q in (0.05, 0.5, 0.95):
        low, high = found.quantile_interval(q, 0.999)
        assert low <= 12 * float(law.quantile(q) / law.mean()) <= high


def test_ops_of_a_rank_share_a_draw_and_ranks_and_steps_have_their_own():
    """Two ops of rank 0, one of rank 1, which does not wait for them."""
    graph = graph_of([(), (0,), ()], rank=[0, 0, 1])
    laws = Variability(rank=lognormal(0.04), worker_step=lognormal(0.03))
    samples = 40_000
    program = assemble(graph, [one_kernel("gemm", 1.0)] * 3, variability=laws)
    logs = np.log(_ends(program, samples) / [[2.0], [1.0]])
    # The logarithm is normal, with the variances of the GPU and of the worker's step added up.
    sigma = np.hypot(0.04, 0.03)
    for mine in logs:
        law = scipy.stats.norm(-(sigma**2) / 2, sigma)
        assert scipy.stats.kstest(mine, law.cdf).pvalue > 0.01
    assert abs(np.corrcoef(logs)[0, 1]) < 4 / np.sqrt(samples)
    for mine in logs:
        assert abs(np.corrcoef(mine[1:], mine[:-1])[0, 1]) < 4 / np.sqrt(samples)


@pytest.mark.slow
def test_worker_step_factors_are_redrawn_where_gpus_are_kept():
    allocations, steps = 100, 400

    def law(**laws):
        program = pipeline_program(
            OneFOneB(2, 1), variability=Variability(**laws), send_recv=0.0, num_replicas=2
        )
        number, key = allocations * steps, jax.random.key(0)
        law = simulate(program, num_samples=number, key=key, allocations=allocations)
        return law, np.std(law.allocations.means, ddof=1), law.allocations.std

    anew, between, within = law(rank=lognormal(0.0), worker_step=lognormal(0.05))
    assert within > 0.05
    noise = within / np.sqrt(steps)
    assert between == pytest.approx(noise, rel=4 / np.sqrt(2 * allocations))
    assert anew.run_mean_std(10**6) < noise
    kept, of_gpus, rest = law(rank=lognormal(0.05))
    assert of_gpus == pytest.approx(within, rel=0.3)
    assert rest < 1e-3 * within
    assert kept.run_mean_std(10**6) > 10 * anew.run_mean_std(10**6)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["importance", "plain"])
def test_pools_equal_every_replica_of_every_step(sampling):
    variability = Variability(
        residual={"gemm": lognormal(0.03), "send_recv": lognormal(0.3)},
        rank=lognormal(0.02),
        worker_step=lognormal(0.05),
        step=lognormal(0.01),
    )
    program = pipeline_program(OneFOneB(4, 6), variability=variability, num_replicas=16)
    steps = reference_steps(program, 20_000, 0)
    law = simulate(program, num_samples=100_000, key=jax.random.key(2), sampling=sampling)
    noise = np.hypot(steps.std() / np.sqrt(len(steps)), law.errors.mean)
    assert abs(law.mean - steps.mean()) < 4 * noise
    # The law has more steps, but rests on fewer samples.
    error = np.sqrt(2 * 0.95 * 0.05 / len(steps))
    assert abs(np.mean(steps <= law.quantile(0.95)) - 0.95) < 4 * error


def test_the_worker_step_leads_importance_where_it_alone_varies():
    program = pipeline_program(GPipe(1, 4), variability=Variability(worker_step=lognormal(0.1)))
    lead = leading_axes(program, make_plan(program), jax.random.key(0))
    assert lead.axes.worker_steps[0] == 0
    assert abs(lead.direction[0]) == pytest.approx(1.0)
    without = pipeline_program(GPipe(1, 4))
    lead = leading_axes(without, make_plan(without), jax.random.key(0))
    assert lead.axes.worker_steps is None


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, lognormal(0.02)])
def test_communication_is_not_slowed(rank):
    """Of constant kernels: a chain is longer by its collectives, whatever the factor."""
    laws = {"rank": rank, "worker_step": lognormal(0.2)}

    def ends(gather):
        block = ((Segment(((Kernel("gemm", "a", 1.0), 2),), gather), 5),)
        program = assemble(
            graph_of([(), (0,)]), [block] * 2, variability=Variability(**laws), group_size=4
        )
        return _ends(program, 5_000)[0]

    bare = ends(None)
    assert bare.min() < 0.6 * 20 < 1.6 * 20 < bare.max()
    with_collectives = ends(Kernel("all_gather", "c", 0.7, "nvlink"))
    np.testing.assert_allclose(with_collectives - bare, 10 * 0.7, rtol=1e-6)


def test_cumulants_of_compute_and_communication_add():
    """Far beyond the factors of GPUs at which moments are known."""
    residual: dict[str, Any] = {"gemm": lognormal(0.3), "all_gather": lognormal(0.5)}
    collective = Kernel("all_gather", "c", 1e-6, "nvlink")
    block = ((Segment(((Kernel("gemm", "a", 2e-6), 2),), collective), 3),)
    laws = Variability(residual=residual, rank=lognormal(0.02), worker_step=lognormal(0.2))
    program = assemble(graph_of([()]), [block], variability=laws)
    plan, factor = make_plan(program), np.array([[0.3, 1.0, 3.0]])
    ones, zeros = jnp.ones_like(jnp.asarray(factor)), jnp.zeros(3, jnp.int32)
    classes, mixed = jnp.zeros(1, jnp.int32), Mixed(collapsed=True, single=False)
    middle = plan.tables.nodes[9] * ones
    of_plan = plan.structure.classes, plan.tables, classes, mixed, middle, plan.tables.nodes
    law = class_laws(*of_plan, zeros, jnp.asarray(factor))
    slowest = np.asarray(middle) * factor

    def cumulants(law, count, mean, factor):
        scale = mean * factor / float(law.mean())
        moments = (law.mean(), law.variance(), law.third_moment())
        return [count * float(x) * scale ** (i + 1) for i, x in enumerate(moments)]

    compute = cumulants(residual["gemm"], 6, 2e-6, slowest)
    communication = cumulants(residual["all_gather"], 3, 1e-6, np.ones_like(slowest))
    mean, variance, third = (x + y for x, y in zip(compute, communication, strict=True))
    np.testing.assert_allclose(law.collapsed.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(law.collapsed.std, np.sqrt(variance), rtol=1e-10)
    np.testing.assert_allclose(law.collapsed.skewness, third / variance**1.5, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0.0, 0.02], ids=["equal", "unequal"])
def test_members_of_a_worker_share_its_step_factor(rank):
    residual, samples = {"gemm": 0.03, "all_gather": 0.2}, 20_000
    collective = Kernel("all_gather", "c", 4e-4, "nvlink")
    block = ((Segment(((Kernel("gemm", "a", 1e-3), 2),), collective), 5),)
    laws: dict[str, Any] = {"residual": {k: lognormal(sigma) for k, sigma in residual.items()}}
    laws["rank"] = lognormal(rank) if rank else None

    def ends(**more):
        variability = Variability(**laws, **more)
        program = assemble(graph_of([()]), [block], variability=variability, group_size=4)
        return _ends(program, samples, 0)[0]

    block_ends, narrow = ends(worker_step=lognormal(0.06)), ends()
    drawn, *_ = simulate_block(block, 4, Laws(residual, rank, worker_step=0.06), samples, seed=1)
    error = np.hypot(block_ends.std(), drawn.std()) / np.sqrt(samples)
    assert abs(block_ends.mean() - drawn.mean()) < 4 * error + 2e-4 * drawn.mean()
    assert block_ends.std() == pytest.approx(drawn.std(), rel=4 / np.sqrt(samples))
    assert block_ends.std() > 1.5 * narrow.std()


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 16])
def test_derivatives_are_those_of_differences(num_replicas):
    program = rich_program(num_replicas, worker_step=lognormal(0.05))

    def sigma(p):
        return p.variability.worker_step.sigma

    def at(seed, change):
        changed = eqx.tree_at(sigma, program, sigma(program) + change)
        key = jax.random.key(1000 + seed)
        return simulated_steps(changed, num_samples=64_000, key=key).steps

    step, seeds = 0.005, range(4)
    steps = [(at(seed, step), at(seed, -step)) for seed in seeds]
    for objective in (Mean(), Quantile(0.95)):
        differences = [
            (objective.value(up) - objective.value(down)) / (2 * step) for up, down in steps
        ]
        slopes = []
        for seed in seeds:
            options = {"num_samples": 32_000, "key": jax.random.key(seed)}
            slopes.append(float(sigma(eqx.filter_grad(estimate)(program, objective, **options))))
        noise = np.hypot(np.std(slopes, ddof=1), np.std(differences, ddof=1)) / 2
        largest = max(abs(np.mean(differences)), abs(np.mean(slopes)))
        assert largest > 10 * noise
        assert abs(np.mean(slopes) - np.mean(differences)) < 5 * noise + 0.03 * largest


@pytest.mark.slow
def test_its_spread_can_be_turned():
    program = rich_program(8, worker_step=lognormal(0.1), stalls={}, network=None)
    off = varied(program, {"worker_step": 0.0})
    without = rich_program(8, stalls={}, network=None)
    np.testing.assert_allclose(_ends(off, 500), _ends(without, 500), rtol=1e-9)
    assert np.abs(_ends(program, 500) / _ends(without, 500) - 1).max() > 0.05


@pytest.mark.slow
def test_its_spread_costs():
    program = rich_program(8, worker_step=lognormal(0.1), stalls={}, network=None)
    found = sensitivity(
        program, Mean(), parts=["worker_step"], num_samples=8_000, key=jax.random.key(0)
    )
    (row,) = [row for row in found.parts if row.name == "worker_step"]
    assert row.gain.value > 5 * row.gain.standard_error > 0
