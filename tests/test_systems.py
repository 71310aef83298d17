"""The laws over systems: of the spread of steps, of the level of runs, of the start of a run."""

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import data
from prism_jax.calibration import epistemic, level_of_runs
from prism_jax.calibration._epistemic import laws_of_systems
from prism_jax.calibration._observe import upper_spread
from prism_jax.data._variations import check_variation
from prism_jax.latency import LogNormal
from prism_jax.program import compile_job, variability_of
from prism_jax.runs import training_run
from validation.sites import configurations, of_gpt3, site_rows, site_table, spread_of_sites
from validation.systems import OF_SYSTEMS, fitted, systems
from validation.tails import system_table

from .helpers import refusal


_STEP = {"sigma": 0.003, "seconds": 0.004, "experts_seconds": 0.2, "seconds_share": 0.05}


def _sigma(parameters, **about):
    law: Any = variability_of([_step(parameters)], **about).step
    return float(law.sigma)


def _step(parameters):
    return data.Variation("", "step", "lognormal", parameters)


def test_seconds_add_to_the_spread_of_a_step_as_variances():
    assert _sigma(_STEP) == 0.003  # Nothing is known of how long a step takes.
    assert _sigma(_STEP, step_s=1.0) == pytest.approx(0.005)
    assert _sigma(_STEP, step_s=10.0, experts=True) == pytest.approx(np.hypot(0.003, 0.02))
    # No more than a share of a short step.
    assert _sigma(_STEP, step_s=1e-3) == pytest.approx(np.hypot(0.003, 0.05))
    alone = {name: _STEP[name] for name in ("sigma", "seconds")}
    assert _sigma(alone, step_s=1.0, experts=True) == pytest.approx(0.005)
    assert _sigma({"sigma": 0.003}, step_s=1.0) == 0.003
    for wrong in (("gemm", "residual", "lognormal"), ("", "step", "gamma")):
        with pytest.raises(ValueError, match=r"^`seconds` is a parameter of .* `step`"):
            check_variation(data.Variation(*wrong, {"seconds": 1.0}))


def test_a_job_has_the_spread_of_its_own_step():
    """Of a step that takes `t` seconds it is `hypot(sigma, seconds / t)`."""
    sigmas, times = [], []
    for microbatches in (8, 64):
        job: Any = data.load_job(
            "megatron-22b-a100-8", [f"schedule.num_microbatches={microbatches}"]
        )
        step = _step({"sigma": 0.0, "seconds": 0.01})
        mine = data.replace_variations(job.kernels.variability, [step])
        kernels = msgspec.structs.replace(job.kernels, variability=mine)
        program = compile_job(msgspec.structs.replace(job, kernels=kernels))
        law: Any = program.variability.step
        sigmas.append(float(law.sigma))
        times.append(prism.prediction.constant_step(job)(kernels))
    assert np.array(sigmas) * times == pytest.approx(2 * [0.01], rel=0.01)


def test_shipped_laws_of_systems_equal_those_fitted_to_the_logs(shared):
    priors, found = data.load_priors(), fitted(systems(shared / "data"))
    for name in OF_SYSTEMS:
        ours, theirs = getattr(priors, name), getattr(found.priors, name)
        for field in ours.__struct_fields__:
            value = getattr(ours, field)
            if field != "source":
                expected = getattr(theirs, field)
                near = pytest.approx(expected, rel=0.03) if field != "systems" else expected
                assert value == near, (name, field)
    for cluster, kernels in (("dgx-h100", 0.0007), ("gb200-nvl72", 0.0), ("hgx-b200", 0.0)):
        (step,) = (v for v in data.load_variability(cluster) if v.component == "step")
        given = found.parameters(cluster != "dgx-h100")
        given["sigma"] = np.sqrt(given["sigma"] ** 2 - kernels**2)
        assert step.parameters == pytest.approx(given, rel=0.05)


def test_sites_differ_as_the_shipped_law_says(shared):
    rows = [*configurations(shared / "data"), of_gpt3(shared / "data")]
    assert len(rows) >= 4
    assert data.load_priors().sites.deviation == pytest.approx(spread_of_sites(rows)[0], rel=0.01)


def test_only_systems_of_one_configuration_are_compared(tmp_path, capsys):
    """Whole numbers as decimals are the same; runs without a time do not count, which is noted."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    head = "system,gpu,gpus,precision,global_batch,micro_batch,step_p50_s"
    lines = [
        "a,X,8,fp8,16,2,1.0",
        "b,X,8.0,fp8,16.0,2,1.1",
        "b,X,8,fp8,16,2,",
        "a,X,8,fp8,16,2,n/a",
    ]
    others = ["c,X,16,fp8,16,2,3.0", "d,Y,8,fp8,16,2,2.0"]
    table = folder / "sites_llama31_8b.csv"
    table.write_text("\n".join([head, *lines, *others]))
    rows = site_rows(tmp_path)["rows"]
    assert f"2 rows of {table} are left out: no GPU, system" in capsys.readouterr().err
    assert [row["machine"] for row in rows] == ["X", "all"]
    assert all(np.isclose(row["measured"], np.log(1.1) / np.sqrt(2)) for row in rows)
    table.write_text("\n".join([head, *others]))
    alone = site_rows(tmp_path)
    assert alone == {"rows": []}
    assert site_table(alone).count("\n") == 1


def test_the_spread_between_sites_is_pooled_over_configurations():
    """Each configuration has a level of its own, whose loss a degree of freedom pays for."""
    rng = np.random.default_rng(0)
    rows = [
        {"logs": 5 * rng.standard_normal() + 0.02 * rng.standard_normal(3)} for _ in range(2000)
    ]
    spread, degrees = spread_of_sites(rows)
    assert degrees == 4000
    assert spread == pytest.approx(0.02, rel=0.05)


def test_differences_between_sites_are_part_of_errors_of_published_runs():
    """No class is narrower; a calibrated job has the error of its own site."""
    deviation = data.load_priors().sites.deviation
    assert all(law.spread > deviation for law in data.load_expected_errors().classes)
    error = prism.expected_error(data.load_job("megatron-22b-a100-8"))
    assert error.about_sites().endswith(
        "differ by 1.4 % (standard deviation), which is part of that"
    )
    alone = msgspec.structs.replace(error, at_one_site=True)
    assert alone.about_sites().startswith("of the calibrated site; sites")


def test_systems_of_which_nothing_is_known_spread_as_the_law_says():
    priors = data.load_priors()
    laws = laws_of_systems(priors, 0.002, 4000)
    logs = np.log([law.sigma for law in laws])
    assert np.exp(np.median(logs)) == pytest.approx(0.002, rel=0.05)
    assert all(0 < law.outlier_share <= 0.2 and law.outlier_excess > 0 for law in laws)
    # Student's law, and that of the mean of so many.
    number, deviation = priors.system_spread.number, priors.system_spread.deviation
    expected = deviation * np.sqrt((1 + 1 / number) * (number - 1) / (number - 3))
    assert np.std(logs) == pytest.approx(expected, rel=0.08)
    normal = np.exp(0.01 * np.random.default_rng(0).standard_normal(100_000))
    assert upper_spread(normal) == pytest.approx(0.01, rel=0.02)


def test_runs_from_configuration_are_around_the_law_that_is_simulated():
    job = data.load_job("megatron-22b-a100-8")
    law = prism.simulate(compile_job(job), num_samples=4096, key=jax.random.key(0))
    found, priors = epistemic(job, law), data.load_priors()
    assert found.spread == priors.system_spread.deviation
    assert found.error.std == prism.expected_error(job).std
    tails = np.quantile(found.steps, 0.95, axis=1) / np.median(found.steps, axis=1) - 1
    simulated = law.quantile(0.95) / law.quantile(0.5) - 1
    assert 0.8 < simulated / np.median(tails) < 1.25


def test_models_with_experts_have_runs_of_their_own():
    priors = data.load_priors()
    dense = data.load_job("megatron-22b-a100-8")
    experts = msgspec.structs.replace(dense, model=data.load_model("deepseek-v3"))
    for job, level, drift in zip(
        (dense, experts),
        (priors.level, priors.level_experts),
        (priors.drift, priors.drift_experts),
        strict=True,
    ):
        found = level_of_runs(job)
        assert found == (level.deviation, pytest.approx(np.expm1(drift.mean)))


def _runs(num_steps, **options):
    causes = (data.Cause(name="gpu", count=0),)
    failures = data.Failures(
        device_hours=1.0, causes=causes, restart_s=0.0, blocking_s=1e-6, source="made"
    )
    program = prism.compile_graph([prism.Op(LogNormal(1.0, 1e-6))])
    options |= {
        "failures": failures,
        "known_rates": True,
        "key": jax.random.key(0),
        "num_runs": 20_000,
    }
    return training_run(program, num_steps=num_steps, **options)


def test_runs_differ_in_level_and_are_slower_at_first():
    alike, other = _runs(100_000), _runs(100_000, level=0.03)
    assert np.std(np.log(alike.days)) < 1e-6
    assert np.std(np.log(other.days)) == pytest.approx(0.03, rel=0.03)
    assert other.mean.value == pytest.approx(alike.mean.value, rel=1e-3)
    for seconds, extra in ((100_000, 0.02 * 1800), (3600, 0.02 * 1800), (1800, 0.02 * 1350)):
        more = _runs(seconds, drift=0.02).days - _runs(seconds).days
        assert more * 86_400 == pytest.approx(extra, rel=1e-3)
    refusal(lambda: _runs(100, level=2), "`level=2` must be a share from 0 to 1")


def test_the_command_has_the_level_of_other_systems(answered):

    words = ["megatron-22b-a100-8", "--steps", "1000", "--samples", "256", "--runs", "1000"]
    for more, level in ((), data.load_priors().level.deviation), (("--level", "0"), 0.0):
        assert answered(["run", *words, *more, "--json"])["level_std"] == level


def test_a_table_of_systems_counts_those_in_their_band():
    row = {"table": "dense", "name": "one", "measured": 2.0, "predicted": 2.1, "inside": True}
    row |= {"measured_p95_over_p50": 1.01, "predicted_p95_over_p50": 1.012, "band": [1.0, 1.1]}
    row |= {"measured_std_over_p50": 0.02, "predicted_std_over_p50": 0.03}
    rows = [row, {**row, "table": "experts", "inside": False, "measured_p95_over_p50": 1.2}]
    text = system_table(rows)
    assert "| all | 2 | 0.63 | 1 of 2 (50 %) |" in text
    assert "| dense | 1 | 1.20 | 1 of 1 (100 %) |" in text
    assert text.count("(out)") == 1
