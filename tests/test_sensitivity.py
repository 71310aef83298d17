"""Sensitivities, what-ifs and critical paths, against differences and closed forms."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from prism_jax.analysis import (
    CVaR,
    Exceedance,
    Mean,
    Quantile,
    Std,
    criticality,
    estimate,
    scale_kernel,
    sensitivity,
    slow_rank,
    what_if,
)
from prism_jax.analysis._derivative import figure_gradient, figure_gradients
from prism_jax.analysis._figure import Figure, figure, figure_of, figure_value
from prism_jax.analysis._jackknife import (
    Jackknifed,
    combined,
    jackknifed,
    stacked,
    withheld,
    without_groups,
)
from prism_jax.analysis._knobs import slopes as slopes_of, turned
from prism_jax.engine import simulated_steps
from prism_jax.latency import Gamma, LogNormal, Mixture, Normal, Weibull, scale_spread
from prism_jax.maxplus import critical_ops, latest_ends, op_ends, to_levels
from prism_jax.program import Op, Stall, Variability, compile_graph
from prism_jax.schedule import GPipe, OneFOneB

from .helpers import lognormal, one_kernel, pipeline_program, random_dag, rich_program


@pytest.mark.slow
def test_derivatives_are_those_of_differences():
    """Of each knob, with common random numbers."""
    program, objective = rich_program(16), Quantile(0.8)
    options = {"num_samples": 32_000, "key": jax.random.key(0)}
    found = sensitivity(program, objective, parts=[], **options)
    rows = {row.name: row for row in found.parts}
    step = 0.05
    labels = [
        ("kernel", "gemm", "mean"),
        ("kernel", "send_recv", "mean"),
        ("kernel", "gemm", "spread"),
        ("shared factor", "rank", "spread"),
        ("shared factor", "microbatch", "spread"),
        ("stalls", "stalls of gemm", "spread"),
        ("stage", "stage 1", "mean"),
        ("stage", "stage 2", "spread"),
        ("rank", "GPUs of rank 2", "spread"),
    ]
    ends = [
        figure_value(figure(turned(program, {label: 1 + by}), objective, **options))
        for label in labels
        for by in (step, -step)
    ]
    expected = combined(lambda x: (x[:, ::2] - x[:, 1::2]) / (2 * step), stacked(*ends))
    for label, theirs in zip(labels, expected.estimates(), strict=True):
        _, name, what = label
        ours = getattr(rows[name], what)
        truth = theirs.value
        noise = np.hypot(ours.standard_error, theirs.standard_error)
        # The same random numbers, but a finite step and a kernel of finite width.
        gap, allowed = abs(ours.value - truth), 4 * noise + 0.01 * abs(truth)
        assert gap < allowed, (label, ours, truth)
    spread, relative = rows["rank"].spread, rows["rank"].spread_elasticity
    assert relative.value == pytest.approx(spread.value / found.value.value, rel=1e-4)
    expected_error = spread.standard_error / found.value.value
    assert relative.standard_error == pytest.approx(expected_error, rel=0.05)


@pytest.mark.slow
def test_gains_add_up_to_the_whole_where_parts_do():
    """Of the mean of a chain: noise that is summed costs nothing, and stalls their mean."""
    program = pipeline_program(
        GPipe(1, 6),
        variability=Variability(
            residual={"gemm": lognormal(0.1)},
            stalls={"gemm": Stall(jnp.asarray(1e-3), lognormal(0.5))},
        ),
    )
    found = sensitivity(
        program,
        Mean(),
        num_samples=32_000,
        key=jax.random.key(1),
        shapley=["gemm", "stalls of gemm"],
    )
    size = float(jnp.exp(0.125))
    expected = 12 * 1e-3 * size  # A first-order rate: two stalls in a step are rarer still.
    rows = {row.name: row for row in found.parts}
    stalls, gemm = rows["stalls of gemm"], rows["gemm"]
    assert stalls.gain.value == pytest.approx(expected, rel=0.05)
    assert stalls.spread.value == pytest.approx(expected, rel=0.05)
    assert gemm.mean.value == pytest.approx(18.0, rel=1e-3)
    assert gemm.gain.value == pytest.approx(0, abs=4 * gemm.gain.standard_error + 1e-6)
    whole, total = found.whole_gain, found.sum_of_gains
    error = np.hypot(whole.standard_error, total.standard_error)
    assert whole.value == pytest.approx(total.value, abs=4 * error)
    shared = sum(figure.value for figure in found.shapley.values())
    assert shared == pytest.approx(whole.value, abs=1e-9)
    assert found.parts[0].name == "stalls of gemm"
    assert "spread [s]" in found.table().columns


@pytest.mark.parametrize(
    ("law", "rel"),
    [
        (lognormal(0.2), 0.02),
        (Gamma(1.0, 0.2), 1e-6),
        (Normal(1.0, 0.05), 1e-6),
        (Weibull(1.0, 4.0), 1e-6),
    ],
)
def test_a_wider_law_keeps_its_mean(law, rel):
    mean, std = float(law.mean()), float(jnp.sqrt(law.variance()))
    for factor in (0.0, 0.5, 1.0):
        wide = scale_spread(law, factor)
        assert float(wide.mean()) == pytest.approx(mean, rel=1e-6)
        assert float(jnp.sqrt(wide.variance())) == pytest.approx(factor * std, rel=rel, abs=1e-6)


@pytest.mark.slow
def test_intervals_cover():
    """How often 95 % intervals hold the value of a much longer run, within what 60 tell. (2,000 in
    `benchmarks/gradients.py --coverage`.)"""
    program, threshold = rich_program(), 20.6
    objectives = [Mean(), Std(), Quantile(0.9), CVaR(0.9)]

    def figures(count, seed):
        options = {"num_samples": count, "key": jax.random.key(seed)}
        steps = simulated_steps(program, **options)
        found = [figure_of(steps, o) for o in (Exceedance(threshold), *objectives)]
        assert found[0].simulated.exceedance is not None
        return stacked(*(figure_value(one) for one in found))

    truth = figures(400_000, 99).values
    inside, values, errors = [], [], []
    for seed in range(60):
        found = figures(4_000, seed)
        low, high = np.array([one.interval() for one in found.estimates()]).T
        inside.append((low <= truth) & (truth <= high))
        values.append(found.values)
        errors.append(found.scatter)
    assert np.all(np.mean(inside, axis=0) >= 0.85)
    ratio = np.median(errors, axis=0) / np.std(values, axis=0)
    assert np.all((ratio > 0.7) & (ratio < 1.5)), ratio


@pytest.mark.slow
def test_the_conditional_probability_is_that_of_the_steps():
    """With the step factor left open, and with the tail, and with neither."""
    varied = Variability(residual={"optimizer": lognormal(0.3), "gemm": lognormal(0.02)})
    tail = pipeline_program(OneFOneB(3, 4), variability=varied, tail=one_kernel("optimizer", 1.0))
    number = 32_000
    options = {"num_samples": number, "key": jax.random.key(3)}
    for program, last in (
        (rich_program(), "step"),
        (tail, "tail"),
        (rich_program(step=None), None),
    ):
        steps = simulated_steps(program, **options).steps
        threshold = float(np.quantile(steps, 0.9))
        value, simulated, _ = figure(program, Exceedance(threshold), **options)
        assert value == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / number))
        assert (simulated.exceedance and simulated.exceedance.last) == last


@pytest.mark.slow
@pytest.mark.parametrize("varying", ["step", "tail"])
def test_conditional_probabilities_have_derivatives(varying):
    """With a number of steps that leaves a tile unfilled, against differences."""
    if varying == "step":
        variability = Variability(residual={"gemm": lognormal(0.02)}, step=lognormal(0.02))
    else:
        variability = Variability(residual={"gemm": lognormal(0.02), "optimizer": lognormal(0.2)})
    program = pipeline_program(
        OneFOneB(3, 4), variability=variability, tail=one_kernel("optimizer", 5.0)
    )
    options = {"num_samples": 3001, "key": jax.random.key(3)}
    threshold = float(np.quantile(simulated_steps(program, **options).steps, 0.9))
    found = figure(program, Exceedance(threshold), **options)
    simulated = found.simulated
    assert simulated.exceedance.last == varying
    slopes = figure_gradient(found).latencies.mean
    assert np.all(np.isfinite(slopes))
    ends = []
    for by in (1e-4, -1e-4):
        mean = program.latencies.mean * (1 + by)
        moved = eqx.tree_at(lambda p: p.latencies.mean, program, mean)
        ends.append(figure(moved, Exceedance(threshold), **options)[0])
    by_all = float(jnp.sum(slopes * program.latencies.mean))
    assert by_all == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-2)
    assert figure(program, Exceedance(99.0), **options)[0] == 0


def _sum_of_normals(num_replicas: int, sigma: float = 0.05):
    """Three normal ops one after the other; and for p95 of the slowest replica, its derivative with
    respect to the spread of an op, in closed form.
    """
    law = Normal(1.0, sigma)
    ops = [Op(1.0, kind=kind, after=[*range(i)][-1:]) for i, kind in enumerate("abc")]
    variability = Variability(residual=dict.fromkeys("abc", law))
    program = compile_graph(ops, variability=variability, num_replicas=num_replicas)
    z = norm.ppf(0.95 ** (1 / num_replicas))
    return program, 3 + np.sqrt(3) * sigma * z, sigma * z / np.sqrt(3)


@pytest.mark.parametrize("num_samples", [5_000, 40_000])
def test_every_step_counts_in_derivatives(num_samples):
    program, *_ = _sum_of_normals(num_replicas=1)
    for objective, of_mean, of_spread in ((Mean(), 1, 0), (Std(), 0.05 / 3**0.5, 0.05 / 3**0.5)):
        options = {"num_samples": num_samples, "key": jax.random.key(0)}
        gradient = figure_gradient(figure(turned(program, {}), objective, **options))
        found = slopes_of(program, {}, jax.tree.map(lambda x: x[None], gradient))
        allowed = 5 * 0.05 / np.sqrt(num_samples)
        assert found["kernel", "a", "mean"][0] == pytest.approx(of_mean, abs=allowed)
        assert found["kernel", "a", "spread"][0] == pytest.approx(of_spread, abs=allowed)


@pytest.mark.slow
def test_intervals_cover_where_few_replica_samples_decide():
    """About 300 of them lie beyond p95."""
    program, value, of_spread = _sum_of_normals(num_replicas=16)

    def p95(seed: int) -> Figure:
        options = {"num_samples": 10_000, "key": jax.random.key(seed)}
        return figure(turned(program, {}), Quantile(0.95), **options)

    def derivative(seed: int) -> Jackknifed:
        gradients, rests_on = figure_gradients(p95(seed))
        slopes = slopes_of(program, {}, gradients)["kernel", "a", "spread"][:, None]
        return Jackknifed(slopes[0], slopes[1:], np.array([rests_on]))

    # Of derivatives there are fewer keys, which take longer.
    for keys, truth, estimated in (
        (400, value, lambda seed: figure_value(p95(seed))),
        (60, of_spread, derivative),
    ):
        estimates = [estimated(seed) for seed in range(keys)]
        low, high = np.array([x.estimates()[0].interval() for x in estimates]).T
        known = ~np.isnan(low)
        assert np.mean(known) >= 0.9
        coverage = np.mean(((low < truth) & (truth < high))[known])
        assert coverage >= 0.95 - 2.3 * np.sqrt(0.95 * 0.05 / keys)
        errors, values = np.array([(x.scatter[0], x.values[0]) for x in estimates]).T
        assert 0.8 < np.median(errors) / np.std(values) < 1.3


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_without_a_group_of_samples_steps_have_the_law_of_the_others(num_replicas):
    """Of a run without the group's samples, in closed form: a mean of one replica is that of the
    others; the slowest of several is the next of them more often.
    """
    program, *_ = _sum_of_normals(num_replicas)
    simulated = simulated_steps(program, num_samples=2**14, key=jax.random.key(0))
    group, lost = simulated.deciders.group, simulated.steps - simulated.without
    lost = np.where(np.isnan(lost), simulated.steps - simulated.steps.mean(), lost)
    for number, steps in enumerate(without_groups(simulated)):
        assert np.all(np.diff(steps) >= 0)
        moved = simulated.steps.mean() - steps.mean()
        expected = np.sum(lost[group == number]) / len(steps)
        assert moved == pytest.approx(expected, abs=2e-4)


def test_a_quantile_in_a_gap_of_the_law_has_a_known_error():
    """Which of two clusters of steps a quantile between them belongs to is uncertain, and so is its
    derivative; without some groups it lies where no step does.
    """
    two = Mixture((0.952, 0.048), (LogNormal(1.0, 0.001), LogNormal(2.0, 0.001)))
    laws = Variability(residual={"a": two}, step=lognormal(0.002))
    program = compile_graph([Op(1.0, kind="a")], variability=laws)
    found, rests_on = figure_gradients(
        figure(program, Quantile(0.95), num_samples=2_000, key=jax.random.key(0))
    )
    assert rests_on >= 20
    slopes = np.asarray(found.latencies.mean)[:, 0]
    assert np.isfinite(slopes).all()
    assert np.std(slopes[1:]) > 0.01  # Of a quantile within a cluster it would be 0.0005.


def test_too_few_samples_withhold_standard_errors():
    program, *_ = _sum_of_normals(num_replicas=64)
    found = sensitivity(
        program, Quantile(0.95), num_samples=100, key=jax.random.key(0), parts=["a"]
    )
    assert np.isnan(found.value.standard_error)
    assert np.isnan(found.value.interval()).all()
    assert any("p95 rests on " in note for note in found.notes)


@pytest.mark.slow
def test_a_derivative_that_all_steps_share_has_no_error():
    """What is added to each step is added to every figure, whatever the weights of steps. How many
    of them lie near a quantile is no uncertainty of that.
    """
    program = pipeline_program(
        OneFOneB(3, 4),
        variability=Variability(residual={"gemm": lognormal(0.05)}),
        tail=one_kernel("optimizer", 5.0),
    )
    table = program.latencies
    (added_to,) = np.flatnonzero(np.array(table.kind) == table.kinds.index("optimizer"))
    options = {"num_samples": 2_048, "key": jax.random.key(4)}
    for objective, expected in ((Mean(), 1), (Quantile(0.9), 1), (CVaR(0.9), 1), (Std(), 0)):
        apart, _ = figure_gradients(figure(program, objective, **options))
        added = np.asarray(apart.latencies.mean)[:, added_to]
        np.testing.assert_allclose(added, expected, atol=1e-4)


def test_the_farthest_tail_is_no_longer_than_the_slowest_step():
    steps = np.random.default_rng(0).normal(10, 1, 1000)
    assert CVaR(1 - 1e-9).value(steps) == pytest.approx(steps.max())
    assert CVaR(0.9).value(steps) == pytest.approx(np.sort(steps)[-100:].mean(), rel=1e-3)


def test_critical_ops_and_slack_of_any_graph():
    """The path is as long as the step; an op that takes its slack longer makes it no longer, one
    that takes more does."""
    rng = np.random.default_rng(0)
    for seed in range(4):
        predecessors = random_dag(seed)
        levels = to_levels(predecessors, [range(len(predecessors))])
        latencies = rng.gamma(2.0, 1.0, (len(predecessors), 3))
        ends = op_ends(levels, latencies)
        makespan = ends.max(axis=0)
        critical = critical_ops(levels, ends, np.zeros(3, int))
        np.testing.assert_allclose(np.where(critical, latencies, 0).sum(axis=0), makespan)
        slack = latest_ends(levels, latencies, makespan[None]) - ends[: len(latencies)]
        assert np.all(np.abs(np.where(critical, slack, 0)) < 1e-9)
        for extra in (0.0, 0.1):
            one_longer = np.eye(len(slack))[:, :, None] * (slack + extra)  # Which, of all, by what.
            changed = np.moveaxis(latencies + one_longer, 0, 1).reshape(len(slack), -1)
            new = op_ends(levels, changed).max(axis=0).reshape(-1, 3)
            np.testing.assert_allclose(new, makespan + extra + 0 * new, atol=1e-9)


@pytest.mark.slow
def test_criticality_is_the_derivative_of_the_mean():
    """Of stages: their share of the critical path, times the step, is what they cost the mean."""
    program = rich_program(8, stalls={})  # These do not grow with an op's latency.
    options = {"num_samples": 10_000, "key": jax.random.key(5)}
    found = criticality(program, **options)
    assert found.num_steps == 10_000
    rows = {row.name: row for row in sensitivity(program, Mean(), parts=[], **options).parts}
    steps = simulated_steps(program, **options).steps
    for stage in range(3):
        row = rows[f"stage {stage}"]
        share = found.stages["share"][stage] * steps.mean()
        assert share == pytest.approx(row.mean.value, abs=5 * row.mean.standard_error)
    assert np.all(found.stages["probability"] == 1)  # Every microbatch passes through all.
    first = (found.ops["phase"] == "F") & (found.ops["microbatch"] == 0)
    assert found.ops["probability"][first] == pytest.approx(1.0, abs=1e-9)
    assert np.all(found.ops["slack_s"] >= 0)
    assert 0 < np.median(found.exposed_communication) < 0.2
    tail = criticality(program, band=(0.9, 1.0), **options)
    assert tail.num_steps == 1000
    assert "slack [s]" in tail.table().columns
    assert len(tail.table("ranks")) == 3


@pytest.mark.slow
def test_a_slow_rank_in_one_replica_of_many():
    """Against replicas simulated apart, and between none slow and all slow."""
    program = rich_program(8, stalls={}, network=None, step=None)
    options = {"num_samples": 48_000, "key": jax.random.key(6)}
    one, every = slow_rank(program, 1, 1.1), slow_rank(program, 1, 1.1, replicas=None)
    found = what_if(program, {"one": one, "all": every}, **options)
    change = {name: found.changes[name]["p50"].value for name in ("one", "all")}
    assert 0 < change["one"] < change["all"]
    slow = simulated_steps(dataclasses.replace(one.program, num_replicas=1), **options)
    # Seven like the others, and one that is slow.
    rest = simulated_steps(dataclasses.replace(program, num_replicas=7), **options)
    factor = np.random.default_rng(0).permutation(len(rest.steps))
    apart = np.maximum(slow.steps, rest.steps[factor])
    whole = simulated_steps(program, unlike=(one.program, 1), **options).steps
    for q in (0.05, 0.5, 0.95):
        assert np.quantile(whole, q) == pytest.approx(np.quantile(apart, q), rel=1e-3)
    assert np.std(whole) == pytest.approx(np.std(apart), rel=0.03)


def test_some_unlike_replicas_share_the_regime_of_their_step():
    """Those that are unlike in name alone: as many steps are congested, and take as long."""
    program = rich_program(16)
    alike, unlike = (
        simulated_steps(program, num_samples=4096, key=jax.random.key(8), unlike=replicas)
        for replicas in (None, (program, 5))
    )
    congested = np.bincount(alike.composed.regime)
    np.testing.assert_array_equal(np.bincount(unlike.composed.regime), congested)
    assert unlike.steps.mean() == pytest.approx(alike.steps.mean(), rel=0.01)


@pytest.mark.slow
def test_scaling_a_collective_scales_its_mean():
    program = rich_program(stalls={}, network=None)
    found = what_if(
        program,
        {
            "no sends": scale_kernel(program, "send_recv", 0.0),
            "same": scale_kernel(program, "send_recv", 1.0),
        },
        num_samples=16_000,
        key=jax.random.key(7),
    )
    assert found.changes["no sends"]["mean"].interval()[1] < 0
    assert found.changes["same"]["p95"].value == pytest.approx(0, abs=1e-9)
    assert found.table().columns[0] == "scenario"


@pytest.mark.slow
def test_changes_of_a_program_compose_in_any_order():
    program = rich_program(2, stalls={}, network=None)
    both = slow_rank(scale_kernel(program, "gemm", 0.5).program, 1, 1.2, replicas=None).program
    other = scale_kernel(slow_rank(program, 1, 1.2, replicas=None).program, "gemm", 0.5).program
    options = {"num_samples": 500, "key": jax.random.key(0)}
    steps = [simulated_steps(p, **options).steps for p in (both, other, program)]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-9)
    assert np.all(steps[0] < steps[2])


_JOB = "megatron-22b-a100-8"


@pytest.mark.slow
def test_the_commands(answered):
    # All in one, for they share what is compiled.
    words = ["sensitivity", _JOB, "--samples", "2000", "--objective", "p90", "--json"]
    found = answered(words)
    assert found["unit"] == "s"
    assert {part["group"] for part in found["parts"]} >= {"kernel", "stage", "rank"}
    words = ["whatif", _JOB, "--samples", "2000", "--slow-rank", "stage=0:1.5", "--json"]
    found = answered([*words, "--kernel", "all_reduce:0.5"])
    assert found["changes"]["slow rank stage=0:1.5"]["mean"]["value"] > 0.3
    assert found["changes"]["kernel all_reduce:0.5"]["mean"]["value"] < 0
    found = answered(["criticality", _JOB, "--samples", "500", "--json"])
    assert found["ranks"][0]["probability"] == 1
    assert found["exposed_communication"]["p5"] <= found["exposed_communication"]["p95"]
    words = ["--samples", "1000", "--json"]
    costs = ["--cost", "gemm=1", "--cost", "rank=2", "--budget", "1"]
    found = answered(["improve", _JOB, *words, *costs, "--iterations", "3"])
    assert found["after"]["value"] < found["before"]["value"]
    target = str((found["before"]["value"] + found["after"]["value"]) / 2)
    assert (
        0
        < answered(["target", _JOB, *words, "--part", "rank", "--at", target])["factor"]["value"]
        < 1
    )


@pytest.mark.parametrize(("sigma", "objective"), [(0.0, Std()), (0.1, Exceedance(100.0))])
def test_where_no_step_counts_derivatives_are_zero(sigma, objective):
    """Of steps that are all equal, or all on one side of the threshold."""
    program = compile_graph([Op(lognormal(sigma))])
    options = {"num_samples": 100, "key": jax.random.key(0)}
    found = eqx.filter_grad(estimate)(program, objective, **options)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(found))


def test_with_no_sample_beyond_it_the_error_of_a_figure_is_unknown():
    """Also where it is zero without any group. A change that always is zero is known."""
    program = compile_graph([Op(lognormal(0.1))], num_replicas=4)
    steps = simulated_steps(program, num_samples=60, key=jax.random.key(0))
    found = jackknifed(steps, [Exceedance(100.0)])
    assert np.isnan(found.standard_error).all()
    assert "far more steps" in withheld("It", float(found.support[0]))[0]
    assert (combined(np.subtract, found, found).standard_error == 0).all()
