"""Jobs of uneven sequences: what ops have of their microbatch's data, and waits that no row has."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.analysis import Mean, estimate
from prism_jax.data import Call, Job, Layout, Outline, ScheduleConfig
from prism_jax.profile import ladder, replayed_step_times, shuffled_means, step_graph, traced_graph
from prism_jax.profile._components import take_apart
from prism_jax.profile._laws import law_of_data
from prism_jax.program import Sets, Variability
from prism_jax.replica import sample_replica_ends
from prism_jax.schedule import GPipe, OneFOneB, replay as replay_graph
from prism_jax.trace import Trace, outline

from .helpers import by_hand, law_of_profile, lognormal, pipeline_program


# A small job: what its ops take, and what they have of their microbatch's data.
_JOB = Job(Layout(dp=6, pp=3), ScheduleConfig(kind="1f1b", num_microbatches=6), name="uneven")
_MEANS = np.array(
    [[0.1, 0.2], [0.1, 0.2], [0.15, 0.3]]
)  # Of stages and phases, at a factor of one.
_LOADINGS = np.array([[0.8, 1.2], [0.8, 1.2], [0.6, 1.0]])
_TRUTH = {"rank": 0.004, "residual": 0.008, "step": 0.0, "worker_step": 0.0, "stall_rate": 0.0}
_COMPUTE = ("forward-compute", "backward-compute")


def _factors(rng, steps, *, together=True):
    """Heavy-tailed factors of mean one, `(dp, microbatches, steps)`, of which those of a replica's
    step are alike."""
    shape = (_JOB.layout.dp, _JOB.schedule.num_microbatches, steps)
    busy = rng.uniform(size=(shape[0], 1, steps) if together else shape) < 0.2
    q = np.where(busy, rng.uniform(0.2, 1.0, shape), 0.2 * rng.uniform(size=shape) ** 2)
    return 1 + 1.2 * (q - (0.2 * 0.6 + 0.8 * 0.2 / 3))


def _outline(scope):
    """An op after the pipeline before which the last stages and the first worker share the loss."""
    dp, pp = _JOB.layout.dp, _JOB.layout.pp
    alone = tuple(("self",) * pp for _ in range(dp))
    waits = [["self"] * (pp - 1) + [scope and "dp"] for _ in range(dp)]
    waits[0][0] = scope or "self"
    waits = tuple(tuple(x or "self" for x in row) for row in waits)
    calls = (Call("layernorm-grads-all-reduce", "self", waits), Call("optimizer", "self", alone))
    reduce = Call("grads-reduce-scatter", "dp", alone)
    return Outline((Call("params-all-gather", "dp", alone),), (calls[0], reduce, calls[1]))


def _latencies(rng, step, workers, steps):
    """Latencies of ops, `(ops, steps)`, of workers with factors of their own."""
    seconds = np.full((len(step.kind), steps), 1e-3) * np.exp(
        0.05 * rng.standard_normal((len(step.kind), steps))
    )
    factor, pp = _factors(rng, steps), _JOB.layout.pp
    for op, kind in enumerate(step.kind):
        if kind in _COMPUTE:
            (d, s), p = divmod(step.members[op][0], pp), _COMPUTE.index(kind)
            data = 1 + _LOADINGS[s, p] * (factor[d, step.call[op]] - 1)
            noise = np.exp(_TRUTH["residual"] * rng.standard_normal(steps))
            seconds[op] = _MEANS[s, p] * workers[d, s] * data * noise
    return seconds


def _traced(step, latencies):
    """A trace of these latencies."""
    dp, pp = _JOB.layout.dp, _JOB.layout.pp
    starts, ends = replay_graph(step.graph.predecessors, latencies)
    start, end = {}, {}
    for op, kind in enumerate(step.kind):
        if kind.startswith("launch"):
            continue
        calls = _JOB.schedule.num_microbatches if step.graph.microbatch[op] >= 0 else 1
        for i, member in enumerate(step.members[op]):
            name = kind.replace("send_recv", ("send", "recv")[i % 2])
            # A worker starts when it comes to an op, not when the others have.
            own = [p for p in step.graph.predecessors[op] if member in step.members[p]]
            mine = ends[own].max(axis=0) if own else starts[op]
            for table, values in ((start, mine), (end, ends[op])):
                empty = np.full((latencies.shape[1], dp, pp, calls), np.nan)
                place = (slice(None), *divmod(member, pp), step.call[op])
                table.setdefault(name, empty)[place] = values
    return Trace(_JOB, np.arange(latencies.shape[1]), start, end, {})


@pytest.fixture(scope="module")
def made():
    """A trace, its profile, and step times of the law that it is from."""
    rng = np.random.default_rng(0)
    step = step_graph(_JOB, _outline("last"))
    workers = np.exp(_TRUTH["rank"] * rng.standard_normal((_JOB.layout.dp, _JOB.layout.pp)))
    trace = _traced(step, _latencies(rng, step, workers, 120))
    law = replayed_step_times(step, step.by_kind(_latencies(rng, step, workers, 4000)))
    return trace, prism.fit_profile(trace), law


def test_who_shares_the_loss_is_found(made):
    trace, profile, _ = made
    assert outline(trace) == profile.outline == _outline("last")


def test_a_wait_that_is_missing_moves_the_mean(made):
    """Both outlines replay the trace; only with the right one a launch is no wait."""
    trace, profile, _ = made
    moved = {}
    for scope in ("last", None):
        step, latencies = traced_graph(trace, _outline(scope))
        np.testing.assert_allclose(
            replayed_step_times(step, latencies), trace.step_times(), rtol=1e-9
        )
        moved[scope] = shuffled_means(step, latencies)
    launch = "launch layernorm-grads-all-reduce"
    assert max(map(abs, moved["last"].values())) < 0.002
    assert abs(moved[None][launch]) > 0.01
    assert not any("shuffled" in note for note in profile.fitted.notes)


def test_components_and_loadings_are_those_of_the_truth(made):
    _, profile, _ = made
    found = {c.name: c for c in profile.fitted.components}
    for name, true in _TRUTH.items():
        component = found[name]
        assert abs(component.value - true) < 3 * component.standard_error, name
    assert found["residual"].standard_error < 1e-4
    loadings = {(m.kind, m.stage): m.loading for m in profile.means}
    values = np.array([[loadings[kind, s] for kind in _COMPUTE] for s in range(3)])
    # They are one on average, and the factor takes the rest.
    np.testing.assert_allclose(values / values.mean(), _LOADINGS / _LOADINGS.mean(), rtol=0.02)
    means = {(m.kind, m.stage): m.mean_s for m in profile.means if m.dp_rank == 0}
    ratios = [means[kind, s] / _MEANS[s, p] for s in range(3) for p, kind in enumerate(_COMPUTE)]
    # Of the sampled data's mean, and of workers that differ.
    np.testing.assert_allclose(np.array(ratios) / np.mean(ratios), 1, atol=0.02)


def test_the_law_of_other_steps_is_predicted(made):
    trace, profile, law = made
    assert profile.sets
    predicted = law_of_profile(profile)
    own = trace.step_times()
    assert predicted.mean == pytest.approx(law.mean(), abs=3 * own.std() / np.sqrt(len(own)))
    assert predicted.std == pytest.approx(law.std(), rel=3 / np.sqrt(2 * len(own)))


def test_the_ladder_goes_from_the_trace_to_the_profile(made):
    trace, profile, _ = made
    rungs = ladder(trace, profile)
    own = trace.step_times()
    assert rungs[0].mean_s == pytest.approx(own.mean(), rel=1e-9)
    assert rungs[0].p95_s == pytest.approx(np.quantile(own, 0.95), rel=1e-6)
    law = law_of_profile(profile)
    assert rungs[-1].mean_s == pytest.approx(law.mean, abs=4 * law.std / np.sqrt(300))
    assert len({rung.name for rung in rungs}) == len(rungs)


def test_a_profile_keeps_loadings_and_sets(made, tmp_path):
    _, profile, _ = made
    prism.save_profile(profile, tmp_path / "p")
    again = prism.load_profile(tmp_path / "p")
    assert again.means == profile.means
    assert again.sets == profile.sets
    # Sets of an earlier profile do not stay behind.
    prism.save_profile(msgspec.structs.replace(profile, sets=()), tmp_path / "p")
    assert prism.load_profile(tmp_path / "p").sets == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stretch,factor\n0,1.0\n0,1.0\n", "give all the same number"),
        ("stretch,factor\n0,0.0\n1,0.0\n", "all factors are zero"),
        ("stretch,factor\n0,-1.0\n", "column `factor`"),
    ],
)
def test_bad_sets_are_refused(made, tmp_path, text, message):
    prism.save_profile(made[1], tmp_path / "p")
    (by_hand(tmp_path / "p") / "microbatches.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        prism.load_profile(tmp_path / "p")


def _logs(rng, *, loadings, together=True, steps=80):
    factor = _factors(rng, steps, together=together)[:, None, None]
    data = np.log(1 + loadings[None, :, :, None, None] * (factor - 1))
    return data + 0.008 * rng.standard_normal((*data.shape[:1], 3, 2, *data.shape[3:]))


def test_loadings_without_difference_equal_one():
    logs = _logs(np.random.default_rng(1), loadings=np.ones((3, 2)))
    np.testing.assert_array_equal(take_apart(logs, np.arange(80)).data.loadings, 1)


def test_microbatches_that_are_independent_are_drawn_so():
    rng = np.random.default_rng(2)
    for together in (True, False):
        apart = take_apart(_logs(rng, loadings=_LOADINGS, together=together), np.arange(80))
        law, sets = law_of_data(apart, np.arange(80), "made")
        lengths = {len(stretch) for stretch in sets}
        # Rows of factors that belong together; a table of quantiles; or a law.
        assert lengths == {6} if together else bool(law) or lengths == {1}
        if sets and not together:
            spread = np.std(sets) / np.mean(sets)
            assert spread == pytest.approx(np.std(apart.data.factor), rel=0.02)


def _ends(program, number=3000):
    ids = jnp.arange(number, dtype=jnp.uint32)
    return np.asarray(sample_replica_ends(program, ids, jax.random.key(0)))


def _with_loading(program, loading):
    table = dataclasses.replace(program.latencies, loading=loading)
    return dataclasses.replace(program, latencies=table)


def test_loadings_of_one_leave_the_law_unchanged():
    program = pipeline_program(OneFOneB(2, 4), variability=Variability(microbatch=lognormal(0.2)))
    ones = jnp.ones_like(program.latencies.mean)
    np.testing.assert_array_equal(_ends(_with_loading(program, ones)), _ends(program))
    constant = pipeline_program(OneFOneB(2, 4), variability=Variability())
    zeros = _ends(_with_loading(program, 0 * ones))
    np.testing.assert_allclose(zeros, np.broadcast_to(_ends(constant), zeros.shape), rtol=1e-12)


def test_sets_are_drawn_together():
    """A chain of four microbatches takes twelve times the mean of one of the stretches' windows."""
    rng = np.random.default_rng(3)
    factors = rng.uniform(0.5, 2.0, (3, 6))
    sets = Sets(jnp.asarray(factors), 4)
    program = pipeline_program(GPipe(1, 4), variability=Variability(microbatch=sets))
    windows = np.lib.stride_tricks.sliding_window_view(factors, 4, axis=1)
    assert float(sets.mean()) == pytest.approx(windows.mean())
    expected = np.sort(12 * windows.mean(axis=2).reshape(-1) / windows.mean())
    found, counts = np.unique(np.round(_ends(program, 9000)[0], 6), return_counts=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.max(np.abs(counts - 1000)) < 4 * np.sqrt(1000)


def test_sets_of_one_microbatch_have_independent_factors():
    rng = np.random.default_rng(4)
    factors = rng.gamma(4.0, 0.25, 500)
    sets = Sets(jnp.asarray(factors[:, None]), 1)
    program = pipeline_program(GPipe(1, 4), variability=Variability(microbatch=sets))
    ends = _ends(program, 20_000)[0]
    cv = factors.std() / factors.mean()
    assert ends.mean() == pytest.approx(12, abs=4 * 12 * cv / 2 / np.sqrt(20_000))
    assert ends.std() == pytest.approx(12 * cv / 2, rel=0.05)


@pytest.mark.slow
def test_derivatives_are_those_of_differences():
    """With respect to loadings and to the factors of sets."""
    rng = np.random.default_rng(5)
    sets = Sets(jnp.asarray(rng.uniform(0.5, 2.0, (20, 4))), 4)
    laws = Variability(microbatch=sets, residual={"gemm": lognormal(0.02)})
    program = pipeline_program(OneFOneB(2, 4), forward=np.array([1.0, 1.5]), variability=laws)
    program = _with_loading(program, jnp.linspace(0.5, 1.0, len(program.latencies.mean)))
    options = {"num_samples": 4096, "key": jax.random.key(0)}
    gradients = eqx.filter_grad(estimate)(program, Mean(), **options)
    for leaf in (lambda p: p.latencies.loading, lambda p: p.variability.microbatch.factors):
        gradient = np.asarray(leaf(gradients))
        direction = 1e-6 * rng.uniform(0.0, 1.0, gradient.shape)
        up, down = (
            float(estimate(eqx.tree_at(leaf, program, leaf(program) + d), Mean(), **options))
            for d in (direction, -direction)
        )
        assert np.sum(gradient * direction) == pytest.approx((up - down) / 2, rel=1e-4)
        assert abs(up - down) > 1e-9
