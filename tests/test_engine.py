import contextlib
import inspect
import socket
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import gamma

from benchmarks import _with_engine
from benchmarks._baselines import reference_graph
from prism_jax.engine import _pools, _together, prepare, simulate
from prism_jax.engine._run import prepare_together
from prism_jax.latency import Gamma, LogNormal, Scaled
from prism_jax.program import Op, Stall, Variability, compile_graph
from prism_jax.program._assemble import assemble
from prism_jax.random import counters, key_data, normals
from prism_jax.random._threefry import threefry
from prism_jax.replica import sample_replica_ends
from prism_jax.replica._plan import structure_of
from prism_jax.schedule import GPipe, InterleavedOneFOneB, LoopedBFS, OneFOneB, evaluate
from prism_jax.workload import Kernel, Segment

from .helpers import (
    compilations,
    event_loop_ends,
    graph_of,
    lognormal,
    negative_spread,
    one_kernel,
    pipeline_program,
    random_dag,
    rich_program,
)


@pytest.mark.parametrize("seed", range(20))
def test_equals_an_event_loop_exactly_on_random_graphs(seed):
    rng = np.random.default_rng(seed)
    predecessors = random_dag(seed, num_ops=30)
    rank = rng.integers(0, 3, len(predecessors))
    rank[:3] = [0, 1, 2]
    latencies = rng.exponential(size=len(predecessors))
    graph = graph_of(predecessors, rank=rank)
    program = assemble(graph, [one_kernel("gemm", float(x)) for x in latencies])
    ends = sample_replica_ends(program, jnp.arange(2, dtype=jnp.uint32), jax.random.key(0))
    expected = np.array(event_loop_ends(predecessors, list(latencies)))
    assert np.array_equal(ends[:, 0], [expected[rank == r].max() for r in range(3)])
    assert np.array_equal(ends[:, 0], ends[:, 1])


@pytest.mark.parametrize(
    "schedule",
    [GPipe(3, 5), OneFOneB(4, 6), InterleavedOneFOneB(2, 4, 3), LoopedBFS(2, 3, 2)],
    ids=lambda s: type(s).__name__,
)
def test_constant_latencies_give_the_exact_evaluation(schedule):
    forward = np.arange(1.0, 1 + schedule.num_stages)
    backward = 2 * forward
    program = pipeline_program(schedule, forward=forward, backward=backward, send_recv=0.25)
    shape = (schedule.num_stages, schedule.num_microbatches)
    timeline = evaluate(
        schedule,
        forward=np.broadcast_to(forward[:, None], shape),
        backward=np.broadcast_to(backward[:, None], shape),
        send_recv=0.25,
    )
    ends = sample_replica_ends(program, jnp.arange(1, dtype=jnp.uint32), jax.random.key(0))
    assert np.array_equal(ends[:, 0], timeline.rank_ends)


def test_the_closed_form_of_a_sum_and_of_a_maximum():
    """One rank adds its ops up; two ops that wait for nothing race."""
    variability = Variability(residual={"gemm": lognormal(0.2)})
    program = pipeline_program(OneFOneB(1, 8), variability=variability)
    law = simulate(program, num_samples=100_000, key=jax.random.key(0), sampling="plain")
    relative = np.expm1(0.2**2)
    assert law.mean == pytest.approx(24.0, abs=4 * law.errors.mean)
    assert law.std == pytest.approx(np.sqrt(8 * (1 + 4) * relative), abs=4 * law.errors.std)
    race = assemble(graph_of([(), ()]), [one_kernel("gemm", 1.0)] * 2, variability=variability)
    law = simulate(race, num_samples=100_000, key=jax.random.key(0), sampling="plain")
    median = np.exp(-(0.2**2) / 2)
    assert law.cdf(median) == pytest.approx(0.25, abs=0.005)


def test_the_first_samples_do_not_depend_on_how_many_there_are():
    program, key = rich_program(8), jax.random.key(7)
    many = sample_replica_ends(program, jnp.arange(3000, dtype=jnp.uint32), key)
    few = sample_replica_ends(program, jnp.arange(10, dtype=jnp.uint32), key)
    assert np.array_equal(many[:, :10], few)


_DEVICES = """
import hashlib, sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from prism_jax import compile_job, load_job
from prism_jax.engine import prepare, simulate
from prism_jax.engine._pools import drawn_pools
from prism_jax.engine._sampling import Draws
from tests.helpers import rich_program
assert len(jax.devices()) == int(sys.argv[1])
key = jax.random.key(3)
digest = hashlib.sha256()

def add(law):
    steps, errors = law.histogram, law.errors
    for x in (steps.times, steps.counts, law.mean, law.std, errors.mean, errors.levels):
        digest.update(np.asarray(x).tobytes())

# Single precision, and a job whose composition has all of its parts.
overrides = ["layout.dp=2", "schedule.num_microbatches=8"]
overrides += ["training.overlap_grad_reduce=false", "schedule.virtual_stages=1"]
overrides += ["num_nodes=8"]
add(simulate(compile_job(load_job("gpt3-175b-h100-4096", overrides)), num_samples=70_000, key=key))
with jax.enable_x64(True):
    program = rich_program(8)
    kept = []
    for n in (5000, 20_000):
        draws = [Draws(0, n, n)]
        run = prepare(program, key)
        (drawn,) = drawn_pools(run, draws)
        kept.append(np.asarray(drawn.samples[0][:5000]))
    assert np.array_equal(*kept)
    digest.update(kept[0].tobytes())
    for options in ({}, {"sampling": "importance"}, {"allocations": 3}):
        add(simulate(program, num_samples=9_000, key=key, **options))
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_any_number_of_devices_gives_the_same_bits(pytestconfig):
    found = {
        subprocess.run(
            [sys.executable, "-c", _DEVICES, devices],
            cwd=pytestconfig.rootpath,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for devices in ("1", "8")
    }
    assert len(found) == 1


@pytest.mark.slow
def test_float32_is_within_rounding_of_float64():
    program = rich_program(8)
    single = jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, program
    )
    ids = jnp.arange(4000, dtype=jnp.uint32)
    double_ends = sample_replica_ends(program, ids, jax.random.key(0))
    single_ends = sample_replica_ends(single, ids, jax.random.key(0))
    assert single_ends.dtype == jnp.float32
    # Uniforms have 23 bits against 32, so samples differ where a score is in the tail.
    np.testing.assert_allclose(single_ends, double_ends, rtol=1e-4)


def test_parameter_values_and_keys_do_not_compile_again():
    program = rich_program(8)
    ids = jnp.arange(8, dtype=jnp.uint32)

    parameters, rest = eqx.partition(program, eqx.is_inexact_array)

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def sample(parameters, key):
        return sample_replica_ends(eqx.combine(parameters, rest), ids, key)

    sample(parameters, jax.random.key(0))
    slower = eqx.tree_at(lambda p: p.latencies.mean, parameters, 2 * program.latencies.mean)
    first = sample(parameters, jax.random.key(1))
    second = sample(slower, jax.random.key(1))
    assert np.all(second > first)
    with pytest.raises(ValueError, match="give a function its parameters"):
        eqx.filter_jit(sample_replica_ends)(program, ids, jax.random.key(0))


def test_laws_of_another_family_compile_no_steps_again():
    """Where nothing follows the ops, steps do not depend on laws: only replicas compile anew."""

    def run(law):
        program = compile_graph([Op(law), Op(law, after=[0])])
        simulate(program, num_samples=5_000, key=jax.random.key(0))

    run(LogNormal(1.0, 0.1))
    with compilations() as compiled:
        run(Gamma(1.0, 0.1))
    assert len(compiled) <= 1  # Another test may have compiled it.


@pytest.mark.slow
def test_a_second_program_of_a_bucket_compiles_nothing():
    """Other schedules, microbatches, replicas and costs: values, derivatives, ends of replicas and
    what-ifs.
    """
    from prism_jax.analysis import Quantile, estimate, slow_rank, what_if

    variability = Variability(residual={"gemm": lognormal(0.05)}, rank=lognormal(0.02))
    programs = [
        pipeline_program(GPipe(4, 9), num_replicas=16, variability=variability),
        pipeline_program(LoopedBFS(4, 4, 2), num_replicas=2, variability=variability, forward=1.5),
        pipeline_program(GPipe(4, 11), num_replicas=8, variability=variability, send_recv=0.1),
        pipeline_program(InterleavedOneFOneB(4, 4, 2), num_replicas=9, variability=variability),
    ]

    def run(program):
        simulate(program, num_samples=9_000, key=jax.random.key(1), sampling="plain")
        arguments = {"num_samples": 9_000, "key": jax.random.key(1)}
        eqx.filter_grad(estimate)(program, Quantile(0.9), **arguments)
        sample_replica_ends(program, jnp.arange(9, dtype=jnp.uint32), jax.random.key(1))
        what_if(program, {"slow": slow_rank(program, 1, 1.2)}, **arguments)

    with compilations() as compiled:
        run(programs[0])
        assert compiled
        # Few distinct replica samples go back in small tiles, many in large ones.
        run(pipeline_program(GPipe(4, 9), num_replicas=2, variability=variability))
        for program in programs[1:]:
            compiled.clear()
            run(program)
            assert not compiled


def test_parameters_and_index_arrays_compile_nothing():
    """Parameters and index arrays, in shapes that no other test has."""
    with compilations() as compiled:
        law = Scaled(LogNormal(np.ones((3, 5, 7)), np.full((1, 1, 7), 0.05)), 2.0)
        blocks = [one_kernel("gemm", 1.0 + op) for op in range(300)]
        program = assemble(graph_of([()] * 300, rank=range(300)), blocks)
        structure = structure_of(program)
        assert not compiled
    assert law.dtype == jnp.result_type(float)
    assert structure.ranks >= 300


def test_programs_that_differ_in_numbers_have_their_own_tables_in_one_run():
    """For each parameter: those of a program by itself, in bits. By those of the network and rates
    of stalls, strata weigh differently, and a row that is refused says so by itself.
    """
    program, key = rich_program(8), jax.random.key(0)
    leaves, tree = jax.tree.flatten(program)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(program)]
    like = None

    def changed(place, x):  # Of another object for each number, as programs of jobs are.
        copied = [
            y if isinstance(y, np.ndarray) else jax.tree.map(lambda z: z * 1, y) for y in leaves
        ]
        return tree.unflatten([*copied[:place], x, *copied[place + 1 :]])

    for place in range(len(leaves)):
        if not eqx.is_inexact_array(leaves[place]):
            continue
        x = np.asarray(leaves[place])
        programs = [changed(place, jnp.asarray(x * factor)) for factor in (1.0, 0.9, 0.8)]
        run = prepare_together(programs, key, like)
        if "network" in paths[place] or ".rate" in paths[place]:
            assert run is None
            continue
        assert run is not None
        like = run
        alone = prepare(programs[2], key)
        for plan in ("plan", "plan_of_steps"):
            of_row = jax.tree.map(lambda x: x[2], getattr(run, plan).tables)
            assert eqx.tree_equal(of_row, getattr(alone, plan).tables), paths[place]
        programs.append(changed(place, jnp.asarray(x * np.nan)))
        assert prepare_together(programs, key, like) is None


@pytest.mark.slow
def test_vmap_over_keys_and_parameters_is_a_loop():
    program = rich_program(8)
    ids = jnp.arange(16, dtype=jnp.uint32)
    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.vmap(lambda key: sample_replica_ends(program, ids, key))(keys)
    looped = jnp.stack([sample_replica_ends(program, ids, key) for key in keys])
    np.testing.assert_allclose(mapped, looped, rtol=1e-12)
    sigmas = jnp.array([0.0, 0.05, 0.1])

    def with_sigma(sigma):
        changed = eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, sigma)
        return sample_replica_ends(changed, ids, keys[0])

    np.testing.assert_allclose(
        jax.vmap(with_sigma)(sigmas), jnp.stack([with_sigma(s) for s in sigmas]), rtol=1e-12
    )


def test_eulers_identity():
    """A replica's ends are homogeneous of degree one in the mean latencies of its kernels."""
    variability = Variability(residual={"gemm": lognormal(0.05), "send_recv": lognormal(0.3)})
    program = pipeline_program(OneFOneB(3, 4), variability=variability)
    ids = jnp.arange(50, dtype=jnp.uint32)

    @jax.jit
    @jax.value_and_grad
    def total_and_criticality(mean):
        changed = eqx.tree_at(lambda p: p.latencies.mean, program, mean)
        return jnp.sum(jnp.max(sample_replica_ends(changed, ids, jax.random.key(0)), axis=0))

    mean = program.latencies.mean
    total, criticality = total_and_criticality(mean)
    assert float(jnp.sum(mean * criticality)) == pytest.approx(float(total), rel=1e-12)


def test_threefry_is_the_published_one():
    """With 20 rounds the test vectors of Random123; with 13 an independent implementation."""

    def reference(key, counter, rounds):
        mask = 2**32 - 1
        schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
        x, y = (counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask
        for i in range(rounds):
            r = [13, 15, 26, 6, 17, 29, 16, 24][i % 8]
            x = (x + y) & mask
            y = (((y << r) | (y >> (32 - r))) & mask) ^ x
            if i % 4 == 3:
                j = i // 4 + 1
                x = (x + schedule[j % 3]) & mask
                y = (y + schedule[(j + 1) % 3] + j) & mask
        return x, y

    assert reference((0, 0), (0, 0), 20) == (0x6B200159, 0x99BA4EFE)
    ones = 2**32 - 1
    assert reference((ones, ones), (ones, ones), 20) == (0x1CB996FC, 0xBB002BE7)
    key, counter = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
    found = threefry(jnp.array(key, jnp.uint32), *(jnp.uint32(c) for c in counter))
    assert tuple(int(word) for word in found) == reference(key, counter, 13)


def test_normals_are_normal_and_independent():
    import scipy.stats

    ids = jnp.arange(20_000, dtype=jnp.uint32)
    for dtype in (jnp.float32, jnp.float64):
        words = key_data(jax.random.key(1))
        of_words = jax.jit(normals, static_argnums=3)
        z = np.asarray(of_words(words, ids, counters(8), jnp.dtype(dtype)))
        assert z.shape == (8, 20_000)
        for row in z:
            assert scipy.stats.kstest(row, "norm").pvalue > 1e-3
        correlation = np.corrcoef(np.concatenate([z, z[:, ::-1]]))
        off = correlation[~np.eye(16, dtype=bool)]
        assert np.abs(off).max() < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("bad", [0, -5, True, 2**32])
def test_a_bad_number_of_samples_is_refused(bad):
    with pytest.raises(ValueError, match="num_samples"):
        simulate(rich_program(8), num_samples=bad, key=jax.random.key(0))


def test_bad_programs_are_refused():
    graph = graph_of([()])
    block = [one_kernel("gemm", 1.0)]
    with pytest.raises(ValueError, match="negative"):
        assemble(graph, [one_kernel("gemm", -1.0)])
    with pytest.raises(ValueError, match=r"residual of gemm.*sigma"):
        assemble(graph, block, variability=Variability(residual={"gemm": negative_spread()}))
    with pytest.raises(ValueError, match="did you mean `gemm`"):
        assemble(graph, block, variability=Variability(residual={"gem": lognormal(0.1)}))
    stalls = {"gemm": Stall(jnp.asarray(-1.0), lognormal(0.1))}
    with pytest.raises(ValueError, match="stall rate of `gemm`"):
        assemble(graph, block, variability=Variability(stalls=stalls))
    with pytest.raises(ValueError, match="at least 1"):
        assemble(graph, block, num_replicas=0)
    with pytest.raises(ValueError, match="must be 'auto'"):
        unchecked(simulate)(
            assemble(graph, block), num_samples=1, key=jax.random.key(0), sampling="all"
        )
    wide = Variability(residual={"gemm": lognormal(1.5)})
    two = ((Segment(((Kernel("gemm", "a", 1.0), 2),)), 1),)
    with pytest.raises(ValueError, match="skewness"):
        simulate(assemble(graph, [two], variability=wide), num_samples=9, key=jax.random.key(0))
    # The sum of a constant and a gamma law of skewness 2, which matters where it is wide.
    for constant, refused in ((9.0, pytest.raises(ValueError, match="skewness 2,")), (999.0, None)):
        kernels = (Kernel("constant", "b", constant), 1), (Kernel("gemm", "a", 1.0), 1)
        laws = Variability(residual={"gemm": Gamma(1.0, 1.0)})
        program = assemble(graph, [((Segment(kernels), 1),)], variability=laws)
        with refused or contextlib.nullcontext():
            law = simulate(program, num_samples=2**14, key=jax.random.key(0))
            assert law.quantile(0.95) == pytest.approx(constant + gamma.ppf(0.95, 1), abs=0.09)
    negative = eqx.tree_at(lambda p: p.latencies.mean, assemble(graph, block), -jnp.ones(1))
    with pytest.raises(ValueError, match="negative or not finite"):
        simulate(negative, num_samples=10, key=jax.random.key(0))


def unchecked(function):
    """A function without the type checks of the test run."""
    return inspect.unwrap(function)


def test_simulate_refuses_bad_programs_bad_keys_and_tracing():
    from prism_jax.analysis import slow_rank

    program = rich_program(8)
    with pytest.raises(ValueError, match="use `compile_job`"):
        unchecked(simulate)("job", num_samples=1, key=jax.random.key(0))  # Without the type hook.
    with pytest.raises(ValueError, match=r"A `Scenario` was given .*; give its `\.program`"):
        unchecked(simulate)(slow_rank(program, 0, 2.0), num_samples=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="use `sample_replica_ends`"):
        eqx.filter_jit(lambda p: simulate(p, num_samples=9, key=jax.random.key(0)).mean)(program)
    for key in (jax.random.split(jax.random.key(0), 3), 0):
        with pytest.raises(ValueError, match="must be one key"):
            unchecked(key_data)(key)


def test_ctrl_c_between_groups_of_programs_waits_for_no_law(monkeypatch):
    groups = iter([(None, map(pytest.fail, ["A law is computed after Ctrl-C."]))])

    def drawn(*_):
        for group in groups:
            return group
        raise KeyboardInterrupt

    monkeypatch.setattr(_together, "_drawn", drawn)
    programs = [rich_program(8)] * (2 * _together._TOGETHER + 1)
    with pytest.raises(KeyboardInterrupt):
        next(_together.simulate_each(programs, num_samples=8, key=jax.random.key(0)))


@pytest.mark.slow
def test_tiles_side_by_side_give_the_bits_of_tiles_one_by_one(monkeypatch):
    """The way of an accelerator, run on a CPU in single precision: values and derivatives, and rows
    of a sweep, whose steps, errors and figures are those of all programs at once.
    """
    from prism_jax import _devices
    from prism_jax.analysis import Quantile, estimate
    from prism_jax.replica import _tiles

    def found():
        law = simulate(program, num_samples=9_000, key=jax.random.key(3))
        arguments = {"num_samples": 3_000, "key": jax.random.key(4)}
        gradient = eqx.filter_grad(estimate)(program, Quantile(0.9), **arguments)
        return law, [np.asarray(x) for x in jax.tree.leaves(gradient)]

    with jax.enable_x64(False):
        program, others = rich_program(8), {"num_samples": 3_000, "key": jax.random.key(5)}
        programs = [
            eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, jnp.asarray(sigma))
            for sigma in (0.02, 0.03, 0.04, 0.05, 0.06)
        ]
        laws = [simulate(row, **others) for row in programs]
        law, gradient = found()
        monkeypatch.setattr(_tiles, "on_accelerator", lambda: True)
        wide, of_wide = found()
        monkeypatch.setattr(_devices, "chosen", lambda: jax.devices()[:1])
        wide_laws = [*_together.simulate_each(programs, **others)]
    # XLA may contract a product and a sum into one operation here and not there: one ulp.
    ulp = float(np.finfo(np.float32).eps)
    levels = np.linspace(0, 1, 3_000)
    for of_row, alone in zip([wide, *wide_laws], [law, *laws], strict=True):
        np.testing.assert_allclose(of_row.quantile(levels), alone.quantile(levels), rtol=2 * ulp)
        assert np.isclose(of_row.effective_samples, alone.effective_samples, rtol=1e-12)
        np.testing.assert_allclose(of_row.errors.levels, alone.errors.levels, rtol=1e-3, atol=1e-5)
        assert np.isclose(of_row.errors.mean, alone.errors.mean, rtol=1e-3)
    for x, y in zip(of_wide, gradient, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e4 * ulp, atol=1e4 * ulp * np.abs(y).max())


def test_a_stage_without_layers_takes_no_time():
    graph = graph_of([(), (0,), (1,)])
    program = assemble(graph, [one_kernel("gemm", 1.0), (), one_kernel("gemm", 2.0)])
    ends = sample_replica_ends(program, jnp.arange(1, dtype=jnp.uint32), jax.random.key(0))
    assert float(ends[0, 0]) == 3.0


@pytest.mark.parametrize("batches", [3, 12])  # Of the first pool, and of a later one.
def test_ctrl_c_keeps_the_steps_simulated_so_far(monkeypatch, ctrl_c, batches):
    original = _pools.by_chunk

    def by_chunk(draws, samples):
        for number, part in enumerate(original(draws, samples)):
            if len(draws) > 1 and number == batches:  # The pilot has one pool.
                ctrl_c()
            yield part

    monkeypatch.setattr(_pools, "by_chunk", by_chunk)
    law = simulate(rich_program(8), num_samples=1_200_000, key=jax.random.key(0))
    assert law.interrupted
    assert 0 < law.num_samples < law.requested == 1_200_000
    assert np.isfinite(law.mean)


def test_ctrl_c_while_samples_become_steps_loses_none_of_them(monkeypatch, ctrl_c):
    original = _pools.pool_of

    def interrupt(run, drawn, *rest):
        if drawn.draws.steps == 20_000:
            ctrl_c()
        return original(run, drawn, *rest)

    monkeypatch.setattr("prism_jax.engine._simulate.pool_of", interrupt)
    law = simulate(rich_program(8), num_samples=20_000, key=jax.random.key(0))
    assert law.num_samples == 20_000
    assert not law.interrupted


def test_an_estimate_of_some_of_the_steps_is_none(monkeypatch, ctrl_c):
    from prism_jax.analysis import Mean, estimate

    def interrupt(run, drawn, *options):
        ctrl_c()
        return _pools.pool_of(run, drawn, *options)

    monkeypatch.setattr("prism_jax.engine._simulated_steps.pool_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        estimate(rich_program(8), Mean(), num_samples=100_000, key=jax.random.key(0))


def test_numbers_of_numpy_are_numbers():
    from prism_jax.engine._check import check_num_samples

    assert type(check_num_samples(np.uint16(60_000))) is int


def test_keys_that_are_traced_are_refused():
    program = rich_program(8)
    with pytest.raises(ValueError, match="cannot be traced"):
        jax.jit(lambda k: simulate(program, num_samples=100, key=k).mean)(jax.random.key(0))


_PROCESSES = """
import hashlib, sys, jax
port, count, number = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_enable_x64", True)
if count != "1":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
from prism_jax.engine import simulate
from tests.helpers import rich_program
assert len(jax.devices()) == int(count)
law = simulate(rich_program(8), num_samples=9_000, key=jax.random.key(3))
steps = law.histogram
print(hashlib.sha256(steps.times.tobytes() + steps.counts.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_give_the_same_bits_as_one(pytestconfig):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESSES, port, count, number],
            cwd=pytestconfig.rootpath,
            stdout=subprocess.PIPE,
            text=True,
        )
        for count, number in (("1", "0"), ("2", "0"), ("2", "1"))
    ]
    try:
        found = [process.communicate(timeout=300)[0].split()[-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes)
    assert len(set(found)) == 1


def test_draws_alone_are_the_latencies_of_the_reference_step():
    """What `benchmarks/throughput.py` compares the engine with."""
    graph, key = reference_graph(), jax.random.key(0)
    program = _with_engine.program(graph)
    mean = _with_engine.draws(program, 4096, key)
    assert mean == pytest.approx(np.sum(graph.means), rel=0.02)
    assert _with_engine.value(program, 4096, key) < mean
