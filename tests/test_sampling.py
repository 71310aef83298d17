"""Importance sampling, and laws merged and saved."""

import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_jax import Variability, load_law, merge_laws, save_law, simulate
from prism_jax.engine import Plain, prepare
from prism_jax.engine._run import all_draws
from prism_jax.replica import leading_axes, make_plan
from prism_jax.schedule import OneFOneB

from .helpers import lognormal, pipeline_program, rich_program


def _program(num_replicas=1, sigma=0.05, rank=None):
    variability = Variability(
        residual={"gemm": lognormal(sigma), "send_recv": lognormal(0.3)}, rank=rank
    )
    return pipeline_program(OneFOneB(3, 6), variability=variability, num_replicas=num_replicas)


@pytest.mark.slow
def test_the_law_is_that_of_plain_sampling():
    program = _program(rank=lognormal(0.02))
    plain = simulate(program, num_samples=400_000, key=jax.random.key(0), sampling="plain")
    other = simulate(program, num_samples=100_000, key=jax.random.key(1), sampling="importance")
    assert other.sampling == "importance"
    noise = np.hypot(plain.errors.mean, other.errors.mean)
    assert abs(plain.mean - other.mean) < 5 * noise
    assert other.std == pytest.approx(plain.std, rel=0.03)
    for q in (0.05, 0.5, 0.95, 0.999):
        wide = sum(np.diff(law.quantile_interval(q))[0] for law in (plain, other))
        assert abs(plain.quantile(q) - other.quantile(q)) < 1.5 * wide


@pytest.mark.slow
def test_importance_sampling_sharpens_the_tail():
    program = _program()
    laws = {
        way: [
            simulate(program, num_samples=16_384, key=jax.random.key(k), sampling=way)
            for k in range(12)
        ]
        for way in ("plain", "importance")
    }

    def scatter(way):
        return np.std([float(law.quantile(0.9995)) for law in laws[way]], ddof=1)

    # With a quarter of the replica samples.
    assert scatter("importance") < 0.6 * scatter("plain")
    assert laws["importance"][0].effective_samples < 16_384 / 4


def test_the_leading_axes_do_not_depend_on_how_many_samples_are_computed_at_once(monkeypatch):
    program = rich_program(8)
    plan, key = make_plan(program), jax.random.key(0)
    found = []
    for numbers in (1, 2**20):
        monkeypatch.setattr("prism_jax.replica._lead._AT_ONCE", numbers)
        found.append(leading_axes(program, plan, key))
    assert eqx.tree_equal(*found)


def test_more_replicas_than_samples_can_show():
    """Then samples are drawn slow by themselves, and the interval covers explicit replicas."""
    program = _program(1024)
    few = 20_000
    explicit = simulate(program, num_samples=1_500, key=jax.random.key(9), replicas="explicit")
    found = simulate(program, num_samples=few, key=jax.random.key(0))
    assert found.sampling == "importance"
    low, high = found.quantile_interval(0.95)
    near, far = explicit.quantile_interval(0.95)
    assert low < far
    assert near < high
    plain = simulate(program, num_samples=few, key=jax.random.key(0), sampling="plain")
    assert all(np.isnan(x) for x in plain.quantile_interval(0.95))


def test_long_runs_come_in_parts_and_sharpen_the_whole_law():
    program = _program()
    plain = dataclasses.replace(prepare(program, jax.random.key(0)), sampling=Plain())
    pieces = all_draws(plain, 1_000_000)
    assert sum(draws.steps for draws in pieces) == 1_000_000
    assert len(pieces) > 2
    many = dataclasses.replace(plain, program=_program(65_536))
    assert len(all_draws(many, 10_000_000)) == 1
    short, long = (
        simulate(program, num_samples=n, key=jax.random.key(2)) for n in (150_000, 600_000)
    )
    assert long.num_samples == 600_000
    assert long.errors.mean == pytest.approx(short.errors.mean / 2, rel=0.05)
    assert long.histogram.counts.sum() == 600_000


def test_merged_laws_are_the_law_of_all_steps():
    program = _program(4)
    laws = [simulate(program, num_samples=30_000, key=jax.random.key(k)) for k in range(4)]
    merged = merge_laws(laws)
    assert merged.num_samples == 120_000
    assert merged.mean == pytest.approx(np.mean([law.mean for law in laws]), rel=1e-12)
    assert merged.errors.mean == pytest.approx(laws[0].errors.mean / 2, rel=0.1)
    assert merged.quantile(1.0) == max(law.quantile(1.0) for law in laws)
    quantiles = np.array([law.quantile(0.95) for law in laws], float)
    assert abs(merged.quantile(0.95) - quantiles.mean()) < quantiles.std()
    with pytest.raises(ValueError, match="share a key"):
        merge_laws([laws[0], laws[0]])
    other = simulate(_program(4, sigma=0.06), num_samples=1_000, key=jax.random.key(7))
    with pytest.raises(ValueError, match="different programs"):
        merge_laws([laws[0], other])
    with pytest.raises(ValueError, match="at least one law"):
        merge_laws([])


def test_laws_in_other_bins_do_not_merge():
    law = simulate(_program(2), num_samples=5_000, key=jax.random.key(0))
    other = simulate(_program(2), num_samples=5_000, key=jax.random.key(1))
    low, high = other.histogram.edges
    wider = dataclasses.replace(other.histogram, edges=(low, high * 1.01))
    with pytest.raises(ValueError, match="different bins"):
        merge_laws([law, dataclasses.replace(other, histogram=wider)])
    assert merge_laws(iter([law, other])).num_samples == 10_000


@pytest.mark.slow
def test_intervals_cover_where_few_samples_decide_many_steps():
    """Importance sampling of few samples, without a step factor: one sample is an atom. An interval
    is said to be unknown more often than elsewhere, and where one is given it covers."""
    one = simulate(_program(), num_samples=8_000_000, key=jax.random.key(100), sampling="plain")
    runs = 40
    for num_replicas in (1024, 4096):
        truth = one.quantile(0.95 ** (1 / num_replicas))
        program = _program(num_replicas)
        laws = [
            simulate(program, num_samples=20_000, key=jax.random.key(k), sampling="importance")
            for k in range(runs)
        ]
        intervals = np.array([law.quantile_interval(0.95) for law in laws])
        low, high = intervals[~np.isnan(intervals[:, 0])].T
        assert len(low) >= runs / 2
        covered = np.sum((low <= truth) & (truth <= high))
        assert covered >= scipy.stats.binom.ppf(0.001, len(low), 0.95)


def test_a_saved_law_is_read_back(tmp_path):
    law = simulate(_program(2), num_samples=5_000, key=jax.random.key(0))
    save_law(law, tmp_path / "law.npz")
    again = load_law(tmp_path / "law.npz")
    assert again == law
    assert (again.compile_s, again.run_s) == (law.compile_s, law.run_s)
    assert [file.name for file in tmp_path.iterdir()] == ["law.npz"]
    (tmp_path / "bad.npz").write_text("no law")
    with pytest.raises(ValueError, match="is not a law"):
        load_law(tmp_path / "bad.npz")
    whole = (tmp_path / "law.npz").read_bytes()
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * len(whole), size=60).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "bad.npz").write_bytes(damaged)
        with contextlib.suppress(ValueError):  # Nothing else is raised.
            assert load_law(tmp_path / "bad.npz").mean == law.mean
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="is not a law"):
        load_law(tmp_path / "other.npz")


def test_incompatible_ways_of_sampling_are_refused():
    program, key = _program(), jax.random.key(0)
    with pytest.raises(ValueError, match="does not go with"):
        simulate(program, num_samples=10, key=key, replicas="explicit", sampling="importance")
    with pytest.raises(ValueError, match="below 2\\^32"):
        simulate(_program(4096), num_samples=2**21, key=key, replicas="explicit")


@pytest.mark.slow
def test_the_core_is_differentiable_under_jit_and_vmap():
    """The hand-written rule, mapped over keys and parameters, equals a loop."""
    from prism_jax import sample_replica_ends

    program = _program(rank=lognormal(0.02))
    ids = jnp.arange(64, dtype=jnp.uint32)

    @jax.jit
    def gradient(sigma, key):
        def mean(sigma):
            changed = eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, sigma)
            ends = sample_replica_ends(changed, ids, key)
            # Every rank has a cotangent: several paths for each sample.
            return jnp.mean(jnp.sum(ends, axis=0))

        return jax.grad(mean)(sigma)

    keys, sigmas = jax.random.split(jax.random.key(0), 3), jnp.array([0.02, 0.05, 0.1])
    mapped = jax.vmap(gradient)(sigmas, keys)
    looped = [gradient(s, k) for s, k in zip(sigmas, keys, strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(looped), rtol=1e-10)

    def value(sigma):
        changed = eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, sigma)
        return float(jnp.mean(jnp.sum(sample_replica_ends(changed, ids, keys[0]), axis=0)))

    step = 1e-6
    difference = (value(sigmas[0] + step) - value(sigmas[0] - step)) / (2 * step)
    assert float(mapped[0]) == pytest.approx(difference, rel=1e-5)
