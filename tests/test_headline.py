"""Predictions: their steps, and the intervals that commands print first."""

import re
from typing import Any

import jax.random as jr
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.calibration import epistemic
from prism_jax.cli import main
from prism_jax.data import list_names, load_cluster
from prism_jax.data._check import SHIPPED
from prism_jax.law import about_noise, law_table
from prism_jax.prediction import constant_step, levels_of_law
from prism_jax.runs import RunLaw
from prism_jax.schedule import group_ends, make_schedule, op_graph, replay


_JOB = "megatron-22b-a100-8"


@pytest.fixture(scope="module")
def job():
    return prism.load_job(_JOB)


@pytest.fixture(scope="module")
def law(job):
    return prism.simulate(prism.compile_job(job), num_samples=4096, key=jr.key(0))


def test_the_interval_of_the_mean_is_that_of_the_expected_error(job, law):
    """Of `predict`, whose steps do not vary; so the interval holds what the class's does."""
    low, high = epistemic(job, law).intervals()["mean"]
    expected = np.array(prism.expected_error(job).interval()) * prism.predict(job).mean
    np.testing.assert_allclose([low, high], expected, rtol=0.02)


def test_intervals_are_quantiles_over_all_runs(job, law):
    future = epistemic(job, law)
    found = future.intervals({"p50": 0.5, "p95": 0.95, "far": 0.9999}, level=0.8)
    assert set(found) == {"mean", "std", "p50", "p95"}  # Shapes do not reach that far.
    for name, q in (("p50", 0.5), ("p95", 0.95)):
        each = np.quantile(future.steps, q, axis=1)
        np.testing.assert_allclose(found[name], np.quantile(each, [0.1, 0.9]), rtol=1e-6)


def test_measured_figures_are_within_or_not(job, law):
    expected = epistemic(job, law).intervals()
    for factor, said in ((1.0, "yes"), (2.0, "no")):
        table = law_table(law, measured={"p95": factor * law.quantile(0.95)}, expected=expected)
        (row,) = (cells for cells in table.cells() if cells[0] == "p95")
        assert dict(zip(table.header(), row, strict=True))["within"] == said


def test_noise_matters_if_it_is_a_tenth_of_the_error(law):
    low, high = law.quantile_interval(0.95)
    for times, said in ((20, "more samples change nothing"), (5, "more samples narrow it")):
        wide = {"p95": (low, low + times * (high - low))}
        assert about_noise(law, wide).endswith(said)


def test_the_command_prints_the_interval_and_whose_errors_it_has(job, answered):
    found = answered(["simulate", _JOB, "--samples", "2000", "--json"])
    assert {"mean", "p50", "p95", "p99"} <= set(found["prediction_interval_90"])
    error = prism.expected_error(job)
    assert found["expected_error"] == {
        "bias": error.bias,
        "spread": error.spread,
        "num_runs": error.num_runs,
        "table": error.table,
    }
    mean = answered(["predict", _JOB, "--json"])["prediction_interval_90"]["mean"]
    np.testing.assert_allclose(mean, found["prediction_interval_90"]["mean"], rtol=0.02)
    said = answered(["simulate", _JOB, "--samples", "2000"])
    assert f"90 % of such runs: by the errors of {error.num_runs} published runs" in said
    assert re.search(r"noise of the simulation: p95 \+- [\d.]+ %; more samples", said)


def test_a_run_has_the_error_of_its_steps():
    """Days are those of work, and of what slow events add to it, times a level, plus the rest."""
    days = np.sort(10 + np.random.default_rng(0).gamma(2.0, size=20_000))
    parts = {"work": 8.0, "slow": 1.0, "down": days.mean() - 9}
    run = RunLaw(days, parts, {}, 600.0, 700.0, {}, len(days), len(days), 0.0)
    levels = np.array([0.9, 1.0, 1.3])
    found = run.at_levels(levels)
    assert found.mean.value == pytest.approx(days.mean() + 9 * (levels.mean() - 1), rel=1e-4)
    each = [np.mean(days + 9 * (level - 1) <= 12) for level in levels]
    assert found.probability(12).value == pytest.approx(np.mean(each), abs=1e-3)
    assert found.goodput == run.goodput


@pytest.mark.slow
def test_run_command_prints_prediction_intervals(job, answered):
    words = ["run", _JOB, "--steps", "1000", "--samples", "2000", "--runs", "5000", "--json"]
    found = answered(words)
    longer = levels_of_law(prism.expected_error(job), np.array([0.05, 0.95])) - 1
    for name, interval in found["prediction_interval_90"].items():
        expected = found["days"][name] + found["parts_days"]["work"] * longer
        np.testing.assert_allclose(interval, expected, rtol=1e-6)


def test_bounds_of_plausible_hardware_come_from_shipped_hardware():
    clusters = [load_cluster(name, 100_000) for name in list_names("cluster")]
    links = [link for cluster in clusters for link in cluster.links]
    devices = [cluster.device for cluster in clusters]
    hosts = [one.host for one in devices if one.host is not None]
    values = {
        "memory_bytes": [one.memory_bytes for one in devices],
        "memory_bandwidth_bytes_per_s": [one.memory_bandwidth_bytes_per_s for one in devices],
        "peak_flop_per_s": [peak for one in devices for peak in one.peak_flop_per_s.values()],
        "bandwidth_bytes_per_s": [link.bandwidth_bytes_per_s for link in links],
        "latency_s": [link.latency_s for link in links],
        "link_bytes_per_s": [host.link_bytes_per_s for host in hosts],
        "memory_bytes_per_s": [host.memory_bytes_per_s for host in hosts],
    }
    assert {name: (min(of), max(of)) for name, of in values.items()} == SHIPPED


def test_hardware_in_another_unit_is_refused_unless_it_is_meant(refused):
    change = ["--set", "cluster.links.nvlink.bandwidth_bytes_per_s=450"]
    assert "did you mean 450e9?" in refused(["predict", _JOB, *change])
    assert main(["predict", _JOB, *change, "--allow-implausible"]) == 0


JOBS = ("megatron-22b-a100-8", "megatron-175b-a100-64", "gpt3-175b-h100-4096")


@pytest.mark.parametrize("name", JOBS)
def test_a_prediction_is_the_step_of_constants_and_its_parts_add_up(name):
    job: Any = prism.load_job(name)
    found = prism.predict(job)
    assert found.mean == pytest.approx(constant_step(job)(job.kernels), rel=1e-12)
    assert sum(found.breakdown.values()) == pytest.approx(found.mean, rel=1e-12)
    assert min(found.breakdown.values()) >= 0
    assert 0 <= found.exposed_send_recv <= found.breakdown.get("exposed pp", 0) + 1e-12
    # Every op is of a stage, and of a phase.
    assert sum(found.stages) == pytest.approx(sum(found.phases.values()) * job.layout.pp, rel=1e-12)


def test_products_are_those_of_the_closed_form():
    """Six operations for each parameter of a matrix and token, and attention to half of all tokens,
    though its kernels are not fused and compute the other half as well.
    """
    job: Any = prism.load_job("megatron-22b-a100-8")
    model, tokens = job.model, job.training.sequence_length
    layers, width = model.num_layers, model.hidden_size
    matrices = 12 * layers * width**2 + width * model.vocab_size
    found = prism.predict(job)
    per_token = found.flop_per_s * job.layout.world_size / found.tokens_per_s
    assert per_token == pytest.approx(6 * matrices + 6 * layers * width * tokens)
    again = msgspec.structs.replace(job.training, recompute="full", recompute_layers=layers)
    same = prism.predict(msgspec.structs.replace(job, training=again))
    # What is computed again takes time, but is no work of the model.
    assert same.mean > found.mean
    assert same.flop_per_s * same.mean == pytest.approx(found.flop_per_s * found.mean)
    peak = job.cluster.device.peak_flop_per_s[job.training.dtype]
    assert found.mfu == pytest.approx(found.flop_per_s / peak)


def test_two_copies_of_a_model_share_the_microbatches():
    flat = ("megatron-175b-a100-64", ["schedule.virtual_stages=1"])
    job = prism.load_job(*flat)
    both = prism.load_job(flat[0], [*flat[1], "schedule.kind=dual-pipe"])
    one, two = prism.predict(job), prism.predict(both)
    assert two.tokens_per_s * two.mean == pytest.approx(one.tokens_per_s * one.mean)
    assert two.flop_per_s * two.mean == pytest.approx(one.flop_per_s * one.mean)


def test_predict_command_prints_the_prediction(answered):
    printed = answered(["predict", "gpt3-175b-h100-4096", "--json"])
    found = prism.predict(prism.load_job("gpt3-175b-h100-4096"))
    assert printed["step_time_s"] == {"mean": found.mean}
    assert printed["mfu"] == found.mfu
    assert printed["breakdown"] == found.breakdown
    assert "exposed dp" in answered(["predict", "gpt3-175b-h100-4096"])


@pytest.mark.parametrize(
    ("kind", "blocking"),
    [
        *((kind, False) for kind in ("1f1b", "zb-h1", "dual-pipe", "dual-pipe-v", "v-half")),
        ("1f1b", True),
    ],
)
def test_an_op_starts_when_all_before_it_have_ended(kind, blocking):
    stages = 2 if kind in ("dual-pipe-v", "v-half") else 1
    schedule = make_schedule(kind, num_ranks=4, num_microbatches=8, virtual_stages=stages)
    graph = op_graph(schedule, blocking=blocking)
    latencies = np.random.default_rng(0).lognormal(size=graph.num_ops)
    ends: list[float] = []
    for before, latency in zip(graph.predecessors, latencies.tolist(), strict=True):
        ends.append(max((ends[op] for op in before), default=0.0) + latency)
    expected = [max(ends[op] for op in last) for last in graph.last]
    assert replay(graph.predecessors, latencies)[1].tolist() == ends
    assert group_ends(graph, latencies, graph.last).tolist() == expected
