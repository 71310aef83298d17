import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax._padding import pad
from prism_jax.analysis import Mean, estimate
from prism_jax.cli import main
from prism_jax.data import load_job
from prism_jax.loads import Loads, Unevenness, fullest, with_draws
from prism_jax.lowering import job_parts, lay_out
from prism_jax.op_law import gpu_factors
from prism_jax.op_law._block import added_load, at_fullest, deciding, fuller
from prism_jax.op_law._segment import segment_maxima
from prism_jax.prediction import predict
from prism_jax.program import compile_job
from prism_jax.program._assemble import assemble
from prism_jax.replica import make_plan
from prism_jax.workload import block_means

from .helpers import by_numpy, graph_of, lognormal
from .test_importers import CONFIGS


# A job of 32 GPUs whose two layers have eight experts each.
EXPERTS = pathlib.Path(__file__).parent / "data/experts.toml"
# Concentration, members, tokens that are sent.
_CASES = [
    (c, n, tokens)
    for c in (0.1, 1.0, 10.0, 100.0, 1000.0, np.inf)
    for n, tokens in ((2, 8192), (8, 65536), (8, 400), (64, 131072))
]
_fullest = by_numpy(fullest)


def _loads(cases, experts: int | np.ndarray = 1, capacity=None, spread=1.0):
    concentration, members, counts = (np.array(x, float) for x in zip(*cases, strict=True))
    alike = np.ones_like(members)
    capacity = alike * (np.inf if capacity is None else capacity)
    loads = Loads(members, counts, experts * alike, alike, capacity=capacity)
    loads = pad(with_draws(loads), {}, float)
    return loads, Unevenness(jnp.asarray(concentration), jnp.asarray(spread * alike))


def _drawn(rng, samples, concentration, members, counts, experts=1, capacity=np.inf):
    """The loads of all members, by counting tokens."""
    number = members * experts
    popular = np.full((samples, number), 1 / number)
    if np.isfinite(concentration):
        popular = rng.gamma(concentration / number, size=(samples, number))
        popular /= popular.sum(axis=1, keepdims=True)
    loads = rng.multinomial(counts, popular) * number / counts
    return np.minimum(loads, capacity).reshape(samples, members, experts).mean(axis=2)


def test_the_fullest_member_is_that_of_counted_tokens():
    rng, samples = np.random.default_rng(0), 20_000
    for case in _CASES:
        moments = np.asarray(_fullest(*_loads([case])).load)[:, 0]
        drawn = _drawn(rng, samples, *case).max(axis=1)
        apart = drawn - moments[0]
        for power, moment in enumerate([0.0, *moments[1:]], 1):
            noise = np.std(apart**power) / np.sqrt(samples)
            own = np.std(apart**power) / np.sqrt(4096)  # At most that of independent draws.
            assert abs(np.mean(apart**power) - moment) < 4.5 * noise + own, (case, power)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, [1.25] * 5])
def test_the_mean_of_the_fullest_has_its_derivative(capacity):
    """Where all are equally popular, only the noise of counts is left, and nothing to gain."""

    loads, uneven = _loads([(1.0, 8, 65536)] * 5, 4, capacity)

    def mean(concentration):
        return jnp.sum(fullest(loads, Unevenness(concentration, uneven.spread)).load[0])

    value = by_numpy(jax.value_and_grad(mean))
    at = np.array([0.1, 3.0, 50.0, 1e4, np.inf])
    slopes = np.asarray(value(jnp.asarray(at))[1])
    assert slopes[-1] == 0
    for i, slope in enumerate(slopes[:-1]):
        step = np.where(np.arange(5) == i, 1e-6 * at[i], 0)
        up, down = (float(value(jnp.asarray(at + sign * step))[0]) for sign in (1, -1))
        assert slope == pytest.approx((up - down) / (2e-6 * at[i]), rel=1e-4)


# Concentration, members, tokens that are sent; experts of a member, and their capacity.
_CUT = [
    ((50.0, 8, 65536), 4, 1.5),
    ((400.0, 8, 65536), 16, 1.25),
    ((200.0, 16, 65536), 4, 1.25),
    ((200.0, 16, 65536), 4, 3.0),
    ((20.0, 8, 65536), 2, 1.25),
    ((10.0, 8, 65536), 4, 1.5),
    ((50.0, 2, 8192), 4, 1.25),
    ((100.0, 8, 400), 4, 1.25),
    ((1000.0, 64, 131072), 4, 1.1),
    ((50.0, 8, 65536), 4, 1.0),
    ((1000.0, 8, 65536), 4, 1.0),
    ((np.inf, 8, 65536), 4, 1.0),
    ((np.inf, 8, 8192), 16, 1.25),
]
_FREE = [case for case in _CASES if case[0] >= 100]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32], ids=str)
def test_loads_with_a_capacity_are_those_of_counted_tokens(dtype):
    """Also without one, in the law of one that cuts nothing. The spread of a member's load is that
    of differences between members, for which it waits.
    """
    rng, samples = np.random.default_rng(6), 20_000

    def found(case, experts, capacity):
        laws = _loads([case], experts, capacity)
        found = _fullest(*jax.tree.map(lambda x: x.astype(dtype) if x.dtype == float else x, laws))
        return np.asarray(found.load)[:, 0], np.asarray(found.member)[:, 0]

    for case in _CUT:
        load, one = found(*case)
        drawn = _drawn(rng, samples, *case[0], *case[1:])
        apart = np.sqrt(np.mean(np.var(drawn, axis=1, ddof=1)))
        assert one[0] == pytest.approx(np.mean(drawn), rel=0.003), case
        assert np.sqrt(one[1]) == pytest.approx(apart, rel=0.015), case
        top = drawn.max(axis=1)
        assert load[0] == pytest.approx(np.mean(top), rel=0.003), case
        assert load[1] > 0, case
        squares = (top - np.mean(top)) ** 2
        noise = np.std(squares) / np.sqrt(samples) / np.mean(squares) / 2
        assert np.sqrt(load[1]) == pytest.approx(np.std(top), rel=0.01 + 4 * noise), case
    for case in _FREE:
        (cut, _), (free, _) = (found(case, 1, capacity) for capacity in (1e9, np.inf))
        np.testing.assert_allclose(cut, free, rtol=1e-6)
        # By two experts of a member the draws are others, so that both laws have their errors: the
        # means 0.3 %, the deviations 3 %.
        (cut, _), (free, _) = (found(case, 2, capacity) for capacity in (1e9, np.inf))
        assert cut[0] == pytest.approx(free[0], rel=0.002)
        assert np.sqrt(cut[1]) == pytest.approx(np.sqrt(free[1]), rel=np.sqrt(2) * 0.03)


def test_a_rank_with_all_experts_drops_tokens_too():
    """Its load varies by what truncation takes of it, and is one where nothing is truncated."""
    rng, samples = np.random.default_rng(3), 5000
    cases = [(10.0, 1, 8192), (50.0, 1, 8192), (400.0, 1, 8192), (100.0, 1, 65536)]
    experts, capacity = (8, 8, 64, 128), (1.5, 1.25, 1.25, 1.0)
    cut, free = (_fullest(*_loads(cases, np.array(experts), most)).load for most in (capacity, 1e9))
    cut, free = np.asarray(cut), np.asarray(free)
    for case, number, most, (mean, variance, _) in zip(
        cases, experts, capacity, cut.T, strict=True
    ):
        drawn = _drawn(rng, samples, *case, number, most)
        assert mean == pytest.approx(np.mean(drawn), rel=0.003), case
        assert np.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.1), case
    np.testing.assert_allclose(free[0], 1, rtol=1e-9)
    np.testing.assert_allclose(free[1], 0, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        ("layout.ep=8", "layout.tp=2", "layout.etp=1"),
        ("layout.ep=4", "layout.tp=2", "layout.etp=2"),
        ("layout.ep=1", "layout.tp=2", "layout.etp=2"),
        ("layout.ep=1", "layout.tp=1", "layout.etp=1"),
    ],
)
def test_a_prediction_takes_the_mean_of_the_loads_that_its_program_has(changes):
    """With a capacity they are shorter, also where each rank has all experts."""
    uneven = ("model.modules.moe.load_concentration=50", "model.modules.moe.num_experts=32")
    free, cut = (
        load_job(EXPERTS, [*changes, *uneven, *more])
        for more in ((), ("model.modules.moe.capacity_factor=1.25",))
    )
    _, _, workload = lay_out(job_parts(cut))
    blocks = [*workload.forward, *workload.backward]
    program = assemble(
        graph_of([()] * len(blocks)),
        blocks,
        members=workload.members,
        group_size=workload.group_size,
    )
    means = np.asarray(make_plan(program).tables.moments)[0, :, 0, 0]
    of_blocks = means[program.rows.class_][program.ops.row]
    np.testing.assert_allclose(of_blocks, block_means(blocks), rtol=1e-5)
    assert predict(cut).mean < 0.99 * predict(free).mean


def waits(rng, found, loads, sigma=0.02, noise=0.01):
    """Of members who run 0.4 whatever their load is and 0.6 in proportion to it, on own GPUs: for
    each case, the mean and the deviation of the slowest by its law, and its drawn ends.
    """
    counts, loaded = jnp.asarray([[1.0, 1.0]]), jnp.asarray([[0.0, 1.0]])
    cumulants = jnp.asarray([[0.4, 0.6], [(noise * 0.4) ** 2, (noise * 0.6) ** 2], [0.0, 0.0]])
    groups, _ = by_numpy(gpu_factors)(lognormal(sigma), jnp.asarray([8.0]), jnp.zeros(1))
    group = jax.tree.map(lambda x: x[0], groups)

    @by_numpy
    def slowest(load):
        serial = (cumulants @ counts.T + added_load(loaded, cumulants, counts, load))[:, 0]
        share = deciding(loaded, counts, load).share[0]
        mean, variance, third = serial
        moments = segment_maxima(mean, variance, third, group, jnp.asarray(8.0), share)[:, None]
        return fuller(moments, loaded, cumulants, counts, load)[:, 0]

    gpus = np.exp(sigma * rng.standard_normal(loads[0].shape) - sigma**2 / 2)
    for number, drawn in enumerate(loads):
        load = jax.tree.map(lambda x, i=number: x[..., i : i + 1], found)
        runs = 1 + noise * rng.standard_normal((2, *drawn.shape))
        mean, variance, _, shared = (
            np.interp(gpus.max(axis=1), group.slowest, row) for row in np.asarray(slowest(load))
        )
        std = np.sqrt(np.mean(variance + shared**2) + np.var(mean))
        yield np.mean(mean), std, (gpus * (0.4 * runs[0] + 0.6 * drawn * runs[1])).max(axis=1)


def test_members_wait_for_the_slowest_of_load_times_gpu():
    rng, samples = np.random.default_rng(2), 40_000
    cases = [case for case in _CASES if case[2] == 65536]
    loads = [_drawn(rng, samples, *case) for case in cases]
    laws = waits(rng, _fullest(*_loads(cases)), loads)
    for case, (mean, std, ends) in zip(cases, laws, strict=True):
        error = np.std(ends) / np.sqrt(samples)
        assert abs(np.mean(ends) - mean) < 4 * error + 5e-4 * np.mean(ends), case
        assert std == pytest.approx(np.std(ends), rel=0.02 if case[0] > 0.5 else 0.05), case


def test_without_spread_loads_are_equal():
    found = _fullest(*_loads(_CASES))
    equal = _fullest(*_loads(_CASES, spread=0.0))
    cumulants = jnp.asarray([[2.0, 3.0], [0.1, 0.2], [0.01, 0.02]])
    loaded = jnp.zeros((len(_CASES), 2)).at[0, 1].set(1)
    assert np.array_equal(at_fullest(loaded, cumulants, equal), cumulants)
    added = added_load(loaded, cumulants, jnp.ones((1, 2)), equal)
    assert np.abs(added).max() == 0
    assert np.asarray(at_fullest(loaded, cumulants, found))[0, 1] == pytest.approx(
        3 * float(found.load[0, 0])
    )


@pytest.mark.slow
def test_a_job_with_uneven_experts_and_its_derivative(answered, written):
    """Slower than with equal loads, and by less the more even experts are."""
    means = {}
    for value in ("50", "1000", "inf", None):
        extra = [] if value is None else ["--set", f"model.modules.moe.load_concentration={value}"]
        means[value] = answered(["simulate", EXPERTS, "--json", "--samples", "16384", *extra])[
            "step_time_s"
        ]["mean"]
    assert means["50"] > 1.02 * means["1000"] > 1.02 * means["inf"] > means[None]
    job = load_job(EXPERTS, overrides=["model.modules.moe.load_concentration=50"])
    program = compile_job(job)

    def mean(by):
        loads: Any = program.loads
        unevenness: Any = loads.unevenness
        changed = dataclasses.replace(unevenness, concentration=unevenness.concentration * (1 + by))
        moved = dataclasses.replace(loads, unevenness=changed)
        moved = dataclasses.replace(program, loads=moved)
        return estimate(moved, Mean(), num_samples=16384, key=jax.random.key(0))

    slope = jax.grad(mean)(jnp.asarray(0.0))
    up, down = float(mean(jnp.asarray(0.02))), float(mean(jnp.asarray(-0.02)))
    assert float(slope) == pytest.approx((up - down) / 0.04, rel=0.01)


_JOBS = {
    "mixtral-8x7b": (128, "layout.tp=2 layout.pp=4 layout.ep=8 layout.etp=1"),
    "deepseek-v3": (
        2048,
        "layout.pp=16 layout.ep=64 schedule.kind=dual-pipe training.dtype=fp8 "
        "training.recompute=full schedule.layers_per_stage=[4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _JOBS)
def test_jobs_from_files_of_hugging_face(name, tmp_path):
    """To a law within a minute on two cores, where nothing was compiled before; and the derivative
    with respect to the means of a kind of kernel.
    """
    gpus, overrides = _JOBS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    path = tmp_path / "job.toml"
    words = ["import", str(tmp_path / "config.json"), "--gpus", str(gpus), "--out", str(path)]
    overrides += " training.sequence_length=4096 schedule.num_microbatches=60"
    overrides += " model.modules.moe.load_concentration=1000"
    assert main([*words, *(w for o in overrides.split() for w in ("--set", o))]) == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "prism_jax", "simulate", str(path), "--no-cache"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["step_time_s"]["mean"] > 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60

    program = compile_job(load_job(path))
    moved = jnp.asarray([kind == "all_to_all" for kind in program.latencies.kinds], float)
    moved = moved[np.array(program.latencies.kind)]

    def mean(by):
        table = program.latencies
        table = dataclasses.replace(table, mean=table.mean * (1 + by * moved))
        changed = dataclasses.replace(program, latencies=table)
        return estimate(changed, Mean(), num_samples=4096, key=jax.random.key(0))

    slope = float(jax.grad(mean)(jnp.asarray(0.0)))
    up, down = float(mean(jnp.asarray(0.01))), float(mean(jnp.asarray(-0.01)))
    assert slope == pytest.approx((up - down) / 0.02, rel=0.01)
