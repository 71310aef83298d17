"""Calibration: what is put in comes out, other scales follow, and files lose nothing."""

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import jax
import msgspec
import numpy as np
import polars as pl
import pytest
from scipy.special import ndtri

from prism_jax import latency
from prism_jax.analysis import CRPS
from prism_jax.calibration import agreement, calibrate
from prism_jax.calibration._observe import (
    StepLaw,
    core_spread,
    law_of_steps,
    observe_runs,
    spread_of,
)
from prism_jax.calibration._scale import CoreSplit, Problem, most_likely_noise, without_calibration
from prism_jax.cli import main
from prism_jax.data import Calibrated, Variation, apply_calibrated, load_job, load_priors, save_job
from prism_jax.data._priors import Prior
from prism_jax.engine import simulate, simulated_steps
from prism_jax.law import crps
from prism_jax.prediction import constant_step, expected_error, levels_of_law, predict
from prism_jax.program import compile_job, variability_of
from prism_jax.trace import read_runs

from .helpers import by_numpy


# All GPUs are equal, so that the level is that of compute alone.
_EIGHT = ("layout.dp=8", "schedule.num_microbatches=8", "schedule.virtual_stages=1")
_EIGHT += ("schedule.kind=1f1b", "kernels.network.slowdown=1.0", "kernels.rank.sigma=0")
_THIRTY_TWO = ("layout.dp=32", *_EIGHT[1:])
_NAME = "gpt3-175b-h100-4096"
_STEP = 0.004
_WILD = 0.15


def _true(overrides):
    """A job whose GPUs are 7 % slower than its kernels say, with wilder collectives."""
    job = load_job(_NAME, overrides)
    laws = [
        msgspec.structs.replace(v, parameters={"sigma": _WILD})
        for v in job.kernels.variability
        if v.component == "residual" and v.kernel in ("all_gather", "reduce_scatter")
    ]
    laws += [v for v in job.kernels.variability if v.component in ("rank", "network")]
    laws.append(Variation("", "step", "constant", {}))
    return _with(job, Calibrated(source="made up", compute=1.07, variability=tuple(laws)))


def _with(job, calibrated):
    kernels = apply_calibrated(job.kernels, calibrated, "test")
    return msgspec.structs.replace(job, kernels=kernels, calibrated=calibrated)


def _autoregressive(rng, number, decay=0.9):
    values = np.empty(number)
    values[0] = rng.standard_normal()
    for i in range(1, number):
        values[i] = decay * values[i - 1] + np.sqrt(1 - decay**2) * rng.standard_normal()
    return values


def _runs(job, *, number=1000, runs=3, seed=0):
    """Step times as a cluster would log them: what steps share comes and goes."""
    rng = np.random.default_rng(seed)
    simulated = simulated_steps(
        compile_job(job), num_samples=number * runs, key=jax.random.key(seed)
    )
    parts = np.split(simulated.steps, runs)
    return [part * np.exp(_STEP * _autoregressive(rng, number)) for part in parts]


def _nothing_else():
    """Priors that know that compute alone makes the level, and nothing of the noise but that it is
    the same at each scale.
    """
    shipped = load_priors()
    zero = {
        name: msgspec.structs.replace(getattr(shipped, name), mean=0.0, deviation=1e-6)
        for name in ("network", "constant_s", "growth")
    }
    zero["collective_noise"] = Prior(shipped.collective_noise.mean, 3.0, "a test")
    zero["collective_scale"] = Prior(0.0, 0.01, "a test")
    return msgspec.structs.replace(shipped, **zero)


@pytest.fixture(scope="module")
def calibrated():
    runs, job = _runs(_true(_EIGHT)), load_job(_NAME, _EIGHT)
    options = {"key": jax.random.key(0), "num_samples": 4096}
    return calibrate(job, runs, source="a test", priors=_nothing_else(), **options)


@pytest.mark.slow
def test_level_and_spread_are_found(calibrated):
    assert calibrated.calibrated.compute == pytest.approx(1.07, rel=0.005)
    sigma = calibrated.kernels.find_variation("step").parameters["sigma"]
    assert sigma == pytest.approx(_STEP, rel=0.2)  # 3,000 steps tell as much as 160 would alone.
    noise = calibrated.kernels.find_variation("residual", "reduce_scatter").parameters["sigma"]
    assert noise == pytest.approx(_WILD, rel=0.15)
    steps = np.concatenate(_runs(_true(_EIGHT), seed=1))
    law = simulate(compile_job(calibrated), num_samples=20_000, key=jax.random.key(1))
    assert law.std == pytest.approx(np.std(steps), rel=0.2)
    assert calibrated.measured.num_samples == 3000


@pytest.mark.slow
def test_another_scale_follows(calibrated):
    """Four times the replicas: the law of the true job, which was never seen there."""
    job = _with(load_job(_NAME, _THIRTY_TWO), calibrated.calibrated)
    law = simulate(compile_job(job), num_samples=20_000, key=jax.random.key(2))
    steps = np.concatenate(_runs(_true(_THIRTY_TWO), number=2000, seed=2))
    assert law.quantile(0.5) == pytest.approx(np.median(steps), rel=2e-3)
    assert law.quantile(0.95) == pytest.approx(np.quantile(steps, 0.95), rel=4e-3)
    assert law.std == pytest.approx(np.std(steps), rel=0.25)


@pytest.mark.slow
def test_a_calibrated_job_is_read_as_it_was_written(calibrated, tmp_path):
    save_job(calibrated, tmp_path / "job.toml")
    again = load_job(tmp_path / "job.toml")
    assert again == calibrated
    kernels = load_job(tmp_path / "job.toml", ["layout.dp=16", "kernels.step.sigma=0.5"]).kernels
    assert kernels.compute == calibrated.calibrated.compute
    (step,) = [v for v in kernels.variability if v.component == "step"]
    assert step.parameters["sigma"] == 0.5
    assert step.family == "lognormal-outliers"


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_step_times_are_taken_apart(decay):
    """A factor that steps share, noise of their own, outliers, and levels of the runs."""
    rng = np.random.default_rng(3)
    shared, own, levels = 0.003, 0.002, np.array([1.0, 1.01, 0.99, 1.005, 0.995])
    runs = []
    for level in levels:
        factor = shared * _autoregressive(rng, 4000, decay) + own * rng.standard_normal(4000)
        pauses = np.where(rng.random(4000) < 0.01, 0.1, 0)
        runs.append(20 * level * (1 + factor + pauses))
    observed = observe_runs(runs)
    assert observed.core == pytest.approx(np.hypot(shared, own), rel=0.03)
    # Without memory, nothing tells the factor from the noise.
    assert observed.shared == pytest.approx(9 / 13 if decay else 0.0, abs=0.03)
    assert len(observed.excess) == pytest.approx(200, abs=4 * np.sqrt(200))
    assert np.median(observed.excess) == pytest.approx(2.0, rel=0.02)
    assert observed.between == pytest.approx(np.std(levels, ddof=1), rel=0.03)
    assert observed.median == pytest.approx(20.0, rel=2e-3)


def test_the_typical_run_takes_no_longer_than_a_sort(monkeypatch):
    """Its steps are quantiles, of as many levels as there are steps: the time of `np.quantile` is
    the product of both.
    """
    runs = [10 + np.random.default_rng(i).gamma(4.0, 0.1, 3000 + i) for i in range(3)]
    levels, work, quantile = (np.arange(3001) + 0.5) / 3001, [], np.quantile
    medians = [np.median(run) for run in runs]
    relative = [run / middle for run, middle in zip(runs, medians, strict=True)]
    typical = np.median([quantile(steps, levels) for steps in relative], axis=0)
    monkeypatch.setattr(
        np,
        "quantile",
        lambda a, q, **how: work.append(np.size(a) * np.size(q)) or quantile(a, q, **how),
    )
    found = observe_runs(runs)
    np.testing.assert_allclose(found.steps, np.median(medians) * typical, rtol=1e-12)
    assert max(work, default=0) <= 4 * 3003


def test_the_score_is_that_of_its_definition():
    """`E|X - y| - E|X - X'| / 2`, and its derivatives against differences."""
    rng = np.random.default_rng(4)
    steps, measured = rng.normal(10, 1, 60), rng.normal(10.3, 0.7, 25)
    objective = CRPS(measured)

    def value(x, weights):
        away = np.abs(x[:, None] - measured).mean(axis=1)
        within = np.abs(x[:, None] - x)
        return weights @ away - weights @ within @ weights / 2

    even = np.full(60, 1 / 60)
    assert objective.value(steps) == pytest.approx(value(steps, even), rel=1e-9)
    assert crps(np.sort(steps), measured) == pytest.approx(value(steps, even), rel=1e-9)
    slope, influence = objective.slope(steps, 1.0), objective.influence(steps, 1.0)
    assert abs(influence.mean()) < 1e-12
    for i in range(0, 60, 7):
        moved = np.zeros(60)
        moved[i] = 1e-7
        difference = (value(steps + moved, even) - value(steps - moved, even)) / 2e-7
        assert slope[i] == pytest.approx(difference, abs=1e-8)
        change = 1e-5 * ((np.arange(60) == i) - even)  # Weights that still sum to one.
        difference = (value(steps, even + change) - value(steps, even - change)) / 2e-5
        assert influence[i] == pytest.approx(difference, abs=1e-8)


def _csv(path, rows):
    path.write_text("run,step_time_s\n" + "".join(f"{run},{x}\n" for run, x in rows))
    return str(path)


@pytest.mark.slow
def test_the_command_writes_a_job(tmp_path, answered, capsys):
    rng = np.random.default_rng(5)
    times = _csv(tmp_path / "steps.csv", [(i % 2, 1.2 + 0.01 * rng.random()) for i in range(60)])
    out = str(tmp_path / "job.toml")
    overrides = [word for text in _EIGHT for word in ("--set", text)]
    assert main(["calibrate", _NAME, "--to", times, "--out", out, "--json", *overrides]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result["num_runs"] == 2
    assert result["num_steps"] == 60
    simulated = answered(["simulate", out, "--samples", "5000", "--json"])
    assert simulated["step_time_s"]["p50"] == pytest.approx(1.205, rel=2e-3)
    assert simulated["measured"]["num_samples"] == 60


_ONE_NODE = "megatron-22b-a100-8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "outliers", "level"), [(0.001, 0.0, 1.0), (0.005, 0.03, 0.7), (0.03, 0.0, 1.6)]
)
def test_step_times_of_any_kind_come_back(spread, outliers, level):
    """Narrower than the kernels' noise, or wider than collectives explain; with outliers or none;
    of one replica, whose stalls are not rare among many."""
    job = load_job(_ONE_NODE)
    law = simulate(compile_job(job), num_samples=4096, key=jax.random.key(0))
    rng = np.random.default_rng(6)
    run = level * law.quantile(0.5) * np.exp(spread * rng.standard_normal(1000))
    run = np.where(rng.random(1000) < outliers, 1.3 * run, run)
    options = {"key": jax.random.key(0), "num_samples": 1024, "num_iterations": 2}
    found = calibrate(job, [run], source="a test", **options)
    figures = agreement(found, [run], num_samples=8192)
    for figure, tolerance in (("p50_s", 2e-3), ("core_spread", 0.1)):
        ours, theirs = figures[figure]
        assert ours == pytest.approx(theirs, rel=tolerance), figure
    ours, theirs = figures["p95 / p50"]
    # Where 3 % are outliers, the p95 of 1,000 steps scatters by 0.14 of their spread.
    assert ours == pytest.approx(theirs, abs=0.45 * spread)


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_a_level_out_of_reach_is_refused(factor):
    run = factor * np.random.default_rng(7).normal(1.1, 0.01, 100)
    with pytest.raises(ValueError, match="too far from the job's"):
        calibrate(
            load_job(_ONE_NODE), [run], source="a test", key=jax.random.key(0), num_samples=1024
        )


@pytest.mark.slow
def test_an_executor_changes_nothing():
    run = np.random.default_rng(7).normal(1.1, 0.01, 100)
    others = [(load_job(_ONE_NODE, ["schedule.num_microbatches=2"]), [1.9 * run])]
    options = {
        "source": "a test",
        "key": jax.random.key(0),
        "num_samples": 1024,
        "num_iterations": 0,
    }
    alone = calibrate(load_job(_ONE_NODE), [run], others=others, **options)
    with ThreadPoolExecutor(2) as executor:
        options["executor"] = executor
        assert calibrate(load_job(_ONE_NODE), [run], others=others, **options) == alone


_EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def _holds(job, measured):
    """Whether the interval of the prediction of a calibrated job holds the median of its steps."""
    error, mean = expected_error(job), predict(job).mean
    low, high = error.interval()
    assert high / low < 1.03  # Not by its width.
    assert mean * np.exp(error.bias) == pytest.approx(measured, rel=1e-3)
    return low * mean < measured < high * mean


@pytest.mark.parametrize("longer", [pytest.param(-0.002, marks=pytest.mark.slow), 0.03])
def test_the_interval_of_a_calibrated_job_holds_its_steps(longer, monkeypatch, tmp_path):
    """However much longer than a step without variability they are: simulated steps stand here for
    those of the engine.
    """
    noise = 1 + 0.004 * np.random.default_rng(9).standard_normal(64)

    def steps_of(given, jobs):
        return [(1 + longer) * constant_step(job)(kernels) * noise for job, kernels in jobs]

    monkeypatch.setattr(Problem, "steps_of", steps_of)
    job, times = (_EXAMPLES / name for name in ("job.toml", "step_times.csv"))
    runs = read_runs(times)
    options = {"key": jax.random.key(0), "num_iterations": 1}
    found = calibrate(load_job(job), runs, source="a test", **options)
    median = float(np.median(runs[0]))
    assert _holds(found, median)
    save_job(found, tmp_path / "job.toml")
    again = load_job(tmp_path / "job.toml")
    assert expected_error(again) == expected_error(found)
    # The law of its steps is around the same median.
    assert levels_of_law(expected_error(again), 0.5) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["job", "large_job", _NAME, "gpt3-175b-h100-768", _ONE_NODE])
def test_intervals_of_calibrated_jobs_hold_their_steps(name, shared):
    """Of jobs and runs of the examples, of MLPerf Training, and made."""
    if name.endswith("job"):
        job = load_job(_EXAMPLES / f"{name}.toml")
        runs = read_runs(_EXAMPLES / f"{name.replace('job', 'step_times')}.csv")
    elif name == _ONE_NODE:
        job, runs = load_job(name), [np.random.default_rng(7).normal(1.1, 0.01, 100)]
    else:
        system = {_NAME: "eos-dfw_n512_ngc23.09_nemo"}.get(name, "dgxh100_n96_nemo")
        rows = pl.scan_parquet(shared / "data/mlperf/step_times.parquet").filter(
            pl.col("system") == system, pl.col("phase") == "steady"
        )
        parts = rows.collect().partition_by("run", maintain_order=True)
        job, runs = load_job(name), [part["step_time_s"].to_numpy() for part in parts]
    found = calibrate(job, runs, source="a test", key=jax.random.key(0), num_samples=2048)
    assert _holds(found, float(np.median([np.median(run) for run in runs])))


def test_an_earlier_calibration_is_replaced():
    """But not what was changed since."""
    stall = Variation("gemm", "stall", "lognormal", {"rate": 1e-3, "median_s": 2.0, "sigma": 0.1})
    rank = Variation("", "rank", "lognormal", {"sigma": 0.5})
    job = load_job(_ONE_NODE)
    first = _with(job, Calibrated(source="before", compute=1.3, variability=(stall, rank)))
    plain = without_calibration(first, "now")
    assert plain == without_calibration(job, "now")
    assert plain.kernels.find_variation("stall", "gemm") is None
    kernels = without_calibration(load_job(_ONE_NODE, ["kernels.step.sigma=0.5"]), "now").kernels
    step = kernels.find_variation("step")
    assert step.parameters["sigma"] == 0.5


def test_calibrate_overwrites_no_file_of_another_origin(tmp_path, refused, written):
    times = _csv(tmp_path / "steps.csv", [(0, 1.0 + 0.01 * (i % 7)) for i in range(60)])
    out = written("job.toml", "kind = 'job'  # mine\n")
    assert "`--force` to overwrite it" in refused(
        ["calibrate", _ONE_NODE, "--to", times, "--out", str(out)]
    )
    assert out.read_text() == "kind = 'job'  # mine\n"
    assert "a folder that exists and can be written to" in refused(
        ["calibrate", _ONE_NODE, "--to", times, "--out", f"{times}/a.toml"]
    )


def test_noise_of_collectives_is_told_by_scales_or_by_priors():
    """What follows the collectives over scales is theirs, what does not is the step's own; of one
    scale alone the priors decide, and collectives that are nothing to a step tell nothing.
    """
    priors = load_priors()
    usual = np.exp(priors.collective_noise.mean)
    grow = [1e-5, 1e-4, 4e-4]
    for noise, step in ((0.2, 3e-4), (0.03, 2e-3)):
        told = [CoreSplit(1e-9 + c * noise**2 + step**2, 1e-9, c, 100_000) for c in grow]
        assert most_likely_noise(told, _nothing_else()) == pytest.approx(noise, rel=0.1)
    assert most_likely_noise([], priors) is None
    short = most_likely_noise([CoreSplit(1e-3, 1e-9, 1e-10, 1000)], priors)
    assert short == pytest.approx(usual, rel=1e-6)
    # Twice the usual is believed in part; far more is a step's own, which has no such bound.
    spreads = [0.03 * usual * x for x in (2, 99)]
    each = [most_likely_noise([CoreSplit(s**2, 1e-9, 0.03**2, 1000)], priors) for s in spreads]
    assert usual * 1.2 < float(each[0] or 0) < usual * 2
    assert each[1] == pytest.approx(usual, rel=0.1)


@pytest.mark.slow
def test_the_printed_agreement_is_that_of_the_job(calibrated):
    """Though the factor of a step is put to it on the host."""
    figures = agreement(calibrated, _runs(_true(_EIGHT)), num_samples=16384)
    law = simulate(compile_job(calibrated), num_samples=50_000, key=jax.random.key(3))
    p50 = law.quantile(0.5)
    assert figures["p50_s"][0] == pytest.approx(p50, rel=3e-4)
    assert figures["p95 / p50"][0] == pytest.approx(law.quantile(0.95) / p50, abs=5e-4)
    steps = np.asarray(law.quantile((np.arange(4000) + 0.5) / 4000))
    assert figures["core_spread"][0] == pytest.approx(core_spread(steps), rel=0.05)


def test_a_short_run_leans_on_other_systems():
    """Of ten times as many steps, what these say counts as much more; with none they are all."""
    rng, priors = np.random.default_rng(8), load_priors()
    shares, spreads = [], []
    for number in (20, 200, 20_000):
        steps = 3.0 * np.exp(0.01 * rng.standard_normal(number))
        steps[: number // 10] *= 1.3
        observed = observe_runs([steps])
        spreads.append(spread_of(observed, priors))
        shares.append(law_of_steps([observed], spreads[-1], priors).outlier_share)
    assert spreads == sorted(spreads)
    assert priors.step_spread.value < spreads[0] < 0.01
    assert spreads[-1] == pytest.approx(0.01, rel=0.02)
    assert priors.outlier_share.value < shares[0] < shares[1] < shares[2]
    assert shares[-1] == pytest.approx(0.1, rel=0.01)


def test_the_factors_of_a_step_are_those_of_its_law():
    """The law that a file holds, and the factors that the host takes for it."""
    law = StepLaw(0.003, 0.04, 0.05, 0.5)
    variation = law.variation("a test")
    family = latency.make_latency(variation.family, variation.parameters)
    factors = np.sort(law.factors(20_000))
    assert factors.mean() == pytest.approx(1.0, rel=1e-12)
    levels = np.array([0.05, 0.5, 0.9, 0.97, 0.99])
    exact = by_numpy(lambda law, z: law.from_normal(z) / law.mean())(family, ndtri(levels))
    assert np.quantile(factors, levels) == pytest.approx(np.asarray(exact), rel=2e-4)
    variance = by_numpy(lambda law: law.variance() / law.mean() ** 2)(family)
    assert np.var(factors) == pytest.approx(float(variance), rel=0.02)


def test_a_stall_of_constant_size_is_a_stall():
    stall = Variation("gemm", "stall", "constant", {"rate": 1e-3, "median_s": 2.0})
    laws = variability_of([stall, Variation("", "step", "constant", {})])
    assert laws.step is None
    assert float(laws.stalls["gemm"].size.mean()) == 2.0


def test_the_shift_of_a_file_is_in_medians_of_what_is_above_it():
    """As `docs/data_format.md` says: a stall takes at least `shift` times `median_s`."""
    parameters = {"rate": 1e-3, "median_s": 2.0, "shift": 0.5, "sigma": 0.1}
    law = variability_of([Variation("gemm", "stall", "shifted-lognormal", parameters)])
    size = law.stalls["gemm"].size.from_normal
    assert float(size(np.float32(0.0))) == pytest.approx((1 + 0.5) * 2.0)
    assert float(size(np.float32(-200.0))) == pytest.approx(0.5 * 2.0)
