"""Placement, against all placements there are and closed forms."""

import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.analysis import Mean, Quantile, Std
from prism_jax.placement import _trials, place
from prism_jax.placement._exchange import search
from prism_jax.placement._placed import Nodes, nodes_of, placed, ready_slopes, replicas_ready
from prism_jax.placement._placement import _with_known_gpus
from prism_jax.placement._trials import Trials
from prism_jax.program import Variability
from prism_jax.schedule import GPipe, OneFOneB

from .helpers import lognormal, one_kernel, pipeline_program


def _program(schedule, num_replicas, **options):
    variability = Variability(
        residual={"gemm": lognormal(0.03)}, rank=lognormal(0.02), step=lognormal(0.005)
    )
    options = {"variability": variability, "num_replicas": num_replicas, **options}
    return pipeline_program(schedule, **options)


def _trials_of(program, factors):
    nodes = nodes_of(program, factors, 1)
    program = _with_known_gpus(program, nodes)
    return Trials(program, nodes, Quantile(0.95), jax.random.key(1))


@pytest.mark.parametrize(
    ("devices", "group", "replicas", "ranks"),
    [(1, 1, 2, 3), (4, 4, 2, 2), (8, 4, 4, 2), (2, 4, 2, 3), (8, 2, 2, 4), (6, 4, 3, 2)],
)
def test_the_slowest_gpu_of_each_rank(devices, group, replicas, ranks):
    """Against the numbering of ranks written out: groups, then replicas, then pipeline ranks."""
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.9, 1.1, (group * replicas * ranks // devices, devices))
    nodes = Nodes(factors, replicas, ranks)
    order = rng.permutation(len(factors))
    slowest, leader = nodes.slowest(order)
    placed = factors[order].reshape(-1)
    for r, s in it.product(range(replicas), range(ranks)):
        first = (s * replicas + r) * group
        assert slowest[r, s] == placed[first : first + group].max()
    flat = factors.reshape(-1)
    np.testing.assert_array_equal(flat[leader], slowest.max(axis=1))
    assert len(set(leader.tolist())) == replicas
    # The slowest of all ranks are at least so slow, however nodes are placed.
    for _ in range(20):
        anywhere = nodes.slowest(rng.permutation(len(factors)))[0].reshape(-1)
        assert np.all(-np.sort(-anywhere) >= nodes.least())
    if devices % group == 0:
        total = np.zeros((replicas, ranks))
        np.maximum.at(total.reshape(-1), nodes.places, nodes.pieces[order])
        np.testing.assert_array_equal(total, slowest)


def test_replicas_of_known_gpus():
    """They take longer in proportion where all GPUs do, and slopes are those of differences."""
    program = _program(OneFOneB(3, 4), 2, send_recv=0.0)
    steps = placed(program, num_samples=5000, key=jax.random.key(0))
    rows, noise = np.array([[1.0, 1.0, 1.0], [1.1, 1.1, 1.1]]), np.array([7, 7])
    ready = replicas_ready(steps, rows, noise)
    np.testing.assert_allclose(ready[1] / ready[0], 1.1, rtol=1e-5)
    number = np.arange(100)
    slopes = ready_slopes(steps, np.ones((100, 3)), np.full(100, 7), number)
    for rank, by in it.product(range(3), (1e-2,)):
        ends = []
        for sign in (1, -1):
            row = np.ones((1, 3))
            row[0, rank] += sign * by
            ends.append(replicas_ready(steps, row, np.array([7]))[0, :100])
        difference = np.mean(ends[0] - ends[1]) / (2 * by)
        assert np.mean(slopes[:, rank]) == pytest.approx(difference, rel=0.02)
    assert slopes.sum(axis=1) == pytest.approx(ready[0, :100], rel=1e-4)


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 2), (2, 3), (5, 1)])
def test_exchange_search_finds_the_best_of_all_placements(ranks, replicas):
    program = _program(OneFOneB(ranks, 3), replicas)
    number = ranks * replicas
    rng = np.random.default_rng(ranks)
    factors = np.exp(0.05 * rng.standard_normal(number))
    trials = _trials_of(program, factors)
    every = [np.array(order) for order in it.permutations(range(number))]
    best = trials.values(every).min()
    assert trials.values([search(trials)])[0] == pytest.approx(best, abs=1e-9)
    assert trials.tried == trials.reversed(0.5).tried == len(every)  # Repeats do not count.
    found = place(program, factors, devices_per_node=1, num_samples=2048, key=jax.random.key(2))
    assert sorted(found.order) == list(range(number))
    assert found.after.value <= found.before.value + 4 * found.gain.standard_error
    assert found.bound.value <= found.after.value + 4 * found.bound.standard_error
    assert found.after.value <= found.worst.value + 4 * found.worst.standard_error


def test_a_chain_is_assigned_exactly():
    """The mean of a sum of stages is lowest with the slowest node at the shortest stage."""
    lengths = np.array([3.0, 1.0, 9.0, 5.0, 7.0, 2.0, 8.0, 4.0, 6.0, 10.0])
    program = _program(GPipe(10, 1), 1, forward=lengths, backward=lengths)
    factors = np.random.default_rng(0).permutation(1 + np.arange(10) / 50)
    found = place(
        program,
        factors,
        devices_per_node=1,
        objective=Mean(),
        num_samples=1024,
        key=jax.random.key(0),
    )
    np.testing.assert_array_equal(np.argsort(-factors[found.order]), np.argsort(lengths))


@pytest.mark.slow
def test_no_random_placement_is_better():
    """One of the instances of `benchmarks/placement.py`."""
    program = _program(OneFOneB(3, 4), 4)
    factors = np.exp(0.04 * np.random.default_rng(3).standard_normal(12))
    found = place(program, factors, devices_per_node=1, num_samples=8192, key=jax.random.key(3))
    trials = _trials_of(program, factors)
    rng = np.random.default_rng(1)
    others = trials.values([rng.permutation(12) for _ in range(1000)])
    assert trials.values([found.order])[0] <= others.min()
    assert found.table().shape == (12, 4)


def test_large_jobs_go_by_means_and_scatter(monkeypatch):
    """The figure is nearly that of all replicas simulated."""
    program = _program(OneFOneB(4, 6), 8)
    factors = np.exp(0.02 * np.random.default_rng(3).standard_normal(32))
    orders = [np.random.default_rng(seed).permutation(32) for seed in range(40)]
    simulated = _trials_of(program, factors).values(orders)
    monkeypatch.setattr(_trials, "_OPS", 2**10)
    likened = _trials_of(program, factors).values(orders)
    np.testing.assert_allclose(likened, simulated, rtol=2e-3)
    assert np.corrcoef(likened, simulated)[0, 1] > 0.9  # What the search goes by.


@pytest.mark.parametrize("devices", [1, 2])
def test_figures_of_orders_nearby_are_the_same(devices):
    program = _program(OneFOneB(3, 4), 4)
    factors = np.exp(0.1 * np.random.default_rng(4).standard_normal(12))
    nodes = nodes_of(program, factors, devices)
    trials = Trials(_with_known_gpus(program, nodes), nodes, Std(), jax.random.key(1))
    rng = np.random.default_rng(5)
    order = rng.permutation(12 // devices)
    others = [order]
    for places in (2, 3, len(order)):
        other = order.copy()
        some = rng.choice(len(order), places, replace=False)
        other[some] = np.roll(other[some], 1)
        others.append(other)
    np.testing.assert_array_equal(trials.values_near(order, others), trials.values(others))


def test_objectives_that_are_not_monotone_have_no_bound():
    program = _program(OneFOneB(2, 2), 2)
    found = place(
        program,
        np.array([1.0, 1.1, 1.2, 1.0]),
        devices_per_node=1,
        objective=Std(),
        num_samples=64,
        key=jax.random.key(0),
    )
    assert found.bound is None


def test_nodes_of_equal_gpus_stay_equal():
    program = pipeline_program(OneFOneB(2, 2), num_replicas=2, tail=one_kernel("optimizer", 1.0))
    found = place(
        program, np.full(4, 1.7), devices_per_node=1, num_samples=64, key=jax.random.key(0)
    )
    # Factors count relative to their mean.
    assert found.before.value == pytest.approx(found.after.value, rel=1e-6)
    assert found.worst.value == pytest.approx(found.bound.value, rel=1e-6)
    assert found.before.value == pytest.approx(
        float(jnp.asarray(2 * 3 + 3 + 2 * 0.05 + 1)), rel=1e-2
    )


_JOB = "megatron-175b-a100-64"


@pytest.mark.slow
def test_the_command(tmp_path, answered):
    path, out = tmp_path / "factors.csv", tmp_path / "placement.csv"
    lines = [f"{node},{1.2 if node == 2 else 1.0}" for node in reversed(range(8))]
    path.write_text("\n".join(["node,factor", *lines]))
    words = ["place", _JOB, "--factors", str(path), "--samples", "512", "--out", str(out)]
    found = answered([*words, "--json"])
    assert found["after"]["value"] < found["worst"]["value"]
    assert sorted(found["order"]) == list(range(8))
    assert out.read_text().startswith("replica,rank,node,factor [1]")
