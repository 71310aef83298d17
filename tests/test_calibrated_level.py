"""The level of a calibrated job: factors, a constant and an exponent, from one scale or several."""

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import data
from prism_jax.calibration import epistemic
from prism_jax.calibration._calibrate import fit_level
from prism_jax.calibration._observe import observe_runs
from prism_jax.calibration._scale import Problem, Scale
from prism_jax.cli._measured import _agreement
from prism_jax.data._priors import Prior
from prism_jax.engine import simulate
from prism_jax.lowering import job_parts
from prism_jax.prediction import constant_step, slope_of_level, with_level
from prism_jax.program import Variability

from .helpers import compile_with


_NAME = "gpt3-175b-h100-4096"
_TRUTH = np.array([np.log(1.04), np.log(1.4), 0.05, 0.008])


_SMALL = ("layout.pp=2", "schedule.kind=1f1b", "schedule.virtual_stages=1")


def _job(dp, microbatches):
    changes = (f"layout.dp={dp}", f"schedule.num_microbatches={microbatches}")
    return prism.load_job(_NAME, (*_SMALL, *changes))


def _kernels(job):
    """Those of a job without any level."""
    kernels = msgspec.structs.replace(job_parts(job).kernels, constant_share=None)
    return with_level(kernels, np.zeros(4), 1)


def _vague():
    shipped = data.load_priors()
    vague = {
        name: msgspec.structs.replace(getattr(shipped, name), deviation=deviation)
        for name, deviation in (("network", 1.0), ("constant_s", 1.0), ("growth", 0.1))
    }
    return msgspec.structs.replace(shipped, **vague)


def _given(jobs, priors, seconds=None):
    """Jobs without any level, whose steps are `seconds`, by default those of the program."""
    runs = observe_runs([np.linspace(1.0, 1.1, 40)])  # A level is fitted to medians that are given.
    seconds = [constant_step(job) for job in jobs] if seconds is None else seconds
    plain = [msgspec.structs.replace(job, kernels=_kernels(job)) for job in jobs]
    scales = [Scale(job, runs, step) for job, step in zip(plain, seconds, strict=True)]
    return Problem(scales, 8, priors, jax.random.key(0), 1)


def _medians(problem):
    pairs = zip(problem.scales, problem.kernels_at(_TRUTH), strict=True)
    return np.array([scale.seconds(kernels) for scale, kernels in pairs])


_SCALES = ((8, 64), (8, 16), (128, 64), (128, 16), (64, 8))


@pytest.mark.slow
def test_a_step_without_variability_is_that_of_the_program():
    """Whatever the factors: the host's step and the engine's are one."""
    job = _job(16, 16)
    kernels = with_level(job_parts(job).kernels, _TRUTH, 8)
    program = compile_with(msgspec.structs.replace(job, kernels=kernels), Variability())
    law = simulate(program, num_samples=8, key=jax.random.key(0))
    assert constant_step(job)(kernels) == pytest.approx(law.mean, rel=2e-6)


def test_constant_adds_seconds_and_growth_is_a_power_of_replicas():
    job = _job(16, 16)
    seconds = constant_step(job)
    plain = seconds(_kernels(job))
    later = msgspec.structs.replace(_kernels(job), constant_s=0.25)
    assert seconds(later) == pytest.approx(plain + 0.25, rel=1e-12)
    grown = msgspec.structs.replace(_kernels(job), growth=0.5, num_replicas=4)
    twice = msgspec.structs.replace(_kernels(job), compute=2.0)
    assert seconds(grown) == pytest.approx(seconds(twice), rel=1e-12)


def test_network_factor_slows_only_jobs_of_several_nodes():
    """A factor on it leaves a job within one node as it is, and slows any other."""
    within = prism.load_job("megatron-22b-a100-8")
    for job, slower in ((within, False), (_job(16, 16), True)):
        seconds = constant_step(job)
        changed = seconds(msgspec.structs.replace(_kernels(job), network=3.0))
        assert (changed > seconds(_kernels(job)) * (1 + 1e-9)) == slower


@pytest.mark.slow
def test_several_scales_tell_the_level():
    problem = _given([_job(*scale) for scale in _SCALES], _vague())
    level = fit_level(problem, _medians(problem), np.full(len(_SCALES), 1e-4))
    errors = np.sqrt(np.diag(level.covariance))
    assert np.all(np.abs(level.values - _TRUTH) < 0.5 * errors)
    assert np.all(errors < [0.01, 0.3, 0.02, 2e-3])
    assert level.prior == ()


@pytest.mark.slow
def test_covariance_of_the_level_equals_its_scatter():
    """The covariance is that of medians with independent errors, each moved in turn."""
    problem, noise = _given([_job(*scale) for scale in _SCALES], _vague()), np.full(5, 1e-4)
    medians = _medians(problem)
    centre, total = fit_level(problem, medians, noise), np.zeros((4, 4))
    for errors in np.diag(noise):
        moved = fit_level(problem, medians * np.exp(errors), noise).values - centre.values
        total += np.outer(moved, moved)
    errors = np.sqrt(np.diag(centre.covariance))
    # So little noise leaves nothing to the priors, and no bend to the step.
    assert total / np.outer(errors, errors) == pytest.approx(
        centre.covariance / np.outer(errors, errors), abs=0.1
    )


def test_one_scale_tells_compute_alone():
    job, priors = _job(8, 64), data.load_priors()
    problem = _given([job], priors)
    level = fit_level(problem, medians := _medians(problem), np.array([1e-3]))
    (known,) = problem.kernels_at(level.values)
    assert problem.scales[0].seconds(known) == pytest.approx(medians[0], rel=1e-6)
    assert level.prior == ("network", "constant_s", "growth")
    means = [one.mean for one in (priors.network, priors.constant_s, priors.growth)]
    assert level.values[1:] == pytest.approx(means)
    # What is not known of the rest makes up for itself where it was measured, and not elsewhere.
    for other, more in ((job, False), (_job(64, 8), True)):
        slope = slope_of_level(constant_step(other), known)
        spread = np.sqrt(slope @ level.covariance @ slope)
        assert (spread > 1.5e-3) == more


def _calibrated(job, covariance=None, **changes):
    problem = np.zeros((4, 4)) if covariance is None else covariance
    rows: Any = tuple(tuple(float(x) for x in row) for row in problem)
    known = data.Uncertainty(covariance=rows, **changes)
    calibrated = data.Calibrated("made up", num_replicas=8, uncertainty=known)
    kernels = data.apply_calibrated(_kernels(job), calibrated, "test")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)


def test_epistemic_law_widens_with_the_uncertainty_of_the_level():
    """Known for certain it is the law; else it is as much wider as level and spread are unknown."""
    job = _calibrated(prism.load_job("megatron-22b-a100-8"))
    law = simulate(
        prism.compile_job(job), num_samples=4096, key=jax.random.key(0), sampling="plain"
    )
    certain = epistemic(job, law)
    for q in (0.05, 0.5, 0.95):
        assert certain.quantile(q) == pytest.approx(law.quantile(q), rel=1e-4)
    job = _calibrated(job, np.diag([0.03**2, 0, 0, 0]), level=0.04, spread=0.5)
    found = epistemic(job, law)
    # All of a step within a node is compute or the collectives beside it.
    assert 0.04 < found.error.std < 0.05
    logs = np.log([found.quantile(q) for q in (0.1587, 0.8413)])
    assert np.diff(logs)[0] / 2 == pytest.approx(found.error.std, rel=0.1)
    low, high = found.intervals()["p50"]
    assert np.log(high / low) / 3.29 == pytest.approx(found.error.std, rel=0.05)


def _csv(path, median, seed=0):
    steps = median * np.exp(0.003 * np.random.default_rng(seed).standard_normal(60))
    path.write_text("step_time_s\n" + "".join(f"{x}\n" for x in steps))
    return str(path)


_CHANGES = ("layout.dp=8", "schedule.num_microbatches=8", "schedule.virtual_stages=1")


@pytest.mark.slow
def test_the_command_takes_several_scales(tmp_path, answered, refused):

    small, large = tmp_path / "small.toml", tmp_path / "large.toml"
    prism.save_job(prism.load_job(_NAME, (*_CHANGES, "schedule.kind=1f1b")), small)
    prism.save_job(
        prism.load_job(_NAME, (*_CHANGES[1:], "layout.dp=32", "schedule.kind=1f1b")), large
    )
    times = [_csv(tmp_path / f"{i}.csv", median) for i, median in enumerate((1.05, 1.06))]
    out = str(tmp_path / "job.toml")
    words = ["--to", times[0], "--job", str(small), "--to", times[1], "--job", str(large)]
    result = answered(["calibrate", *words, "--out", out, "--json"])
    assert result["num_steps"] == 120
    assert set(result["standard_errors"]) == {"compute", "network", "constant_s", "growth"}
    assert "constant_s" in result["prior"]
    (other,) = result["agreement_of_others"]
    assert (other["job"], other["to"]) == (str(large), times[1])
    assert other["p50_s"] == pytest.approx([1.06, 1.06], rel=0.01)
    known = answered(["simulate", out, "--samples", "2000", "--json", "--epistemic"])
    assert known["step_time_s"]["p50"] == pytest.approx(1.05, rel=5e-3)
    assert known["epistemic"]["p95"] > known["step_time_s"]["p95"]
    assert "3 jobs and 2 files" in refused(
        ["calibrate", _NAME, *words, "--out", str(tmp_path / "other.toml")]
    )


def test_the_agreement_lists_each_run_beside_its_calibration():
    figures = {"p50_s": (1.0, 1.1), "p95 / p50": (1.0, 1.2), "core_spread": (0.1, 0.3)}
    result = {"agreement": figures, "agreement_of_others": []}
    assert "a.csv" not in str(_agreement(result, "a.csv"))
    other = {"job": "b.toml", "to": "b.csv", **figures, "p50_s": (7.5, 8.5)}
    lines = _agreement(result | {"agreement_of_others": [other]}, "a.csv").text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == 3 * ["a.csv"] + 3 * ["b.csv"]
    assert lines[4].split() == ["b.csv", "p50_s", "7.5", "8.5"]


def test_priors_say_where_they_are_from():
    priors = data.load_priors()
    for name in priors.__struct_fields__:
        problem = getattr(priors, name)
        for one in problem if isinstance(problem, tuple) else (problem,):
            assert len(one.source) > 20, name
            assert not isinstance(one, Prior) or one.deviation > 0


def test_the_median_that_is_far_off_is_named():
    job = prism.load_job("megatron-22b-a100-8")
    jobs = [msgspec.structs.replace(job, name=name) for name in ("near", "far")]
    seconds = [lambda kernels: 2 * kernels.compute, lambda kernels: 3 * kernels.compute]
    problem = _given(jobs, data.load_priors(), seconds)
    with pytest.raises(ValueError, match=r"^far: the measured median of 3000 s"):
        fit_level(problem, np.array([2.0, 3000.0]), np.array([0.01, 0.01]))
