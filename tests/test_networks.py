"""Laws of networks, of fleets and of congestion."""

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import polars as pl
import pytest
from scipy.stats import norm

import prism_jax as prism
from prism_jax.data import Variation, at_age, list_names, load_device, load_failures, load_network
from prism_jax.latency import make_latency
from prism_jax.prediction import constant_step
from prism_jax.program import SharedNetwork, variability_of
from prism_jax.schedule import OneFOneB
from validation import fleet

from .helpers import pipeline_program, refusal


_SPELLS = {"slowdown": 1.4, "sigma": 0.7, "spell_s": 4.0, "calm_sigma": 0.02}


def _network(step_s: float, parameters=_SPELLS) -> SharedNetwork:
    law = Variation("", "network", "spells", parameters)
    network = variability_of([law], step_s=step_s).network
    assert isinstance(network, SharedNetwork)
    return network


def test_regimes_have_the_moments_of_the_law():
    network = _network(3.0)
    factors, shares = np.asarray(network.factors()), np.asarray(network.probabilities())
    congested = np.exp(-3 / 4)
    assert np.isclose(shares.sum(), 1)
    assert np.isclose(network.probability, congested)
    assert np.isclose(shares @ factors, 1 + congested * 0.4 * np.exp(0.7**2 / 2))
    assert np.isclose(shares[:3] @ (factors[:3] - 1) ** 2, (1 - congested) * 0.02**2)


def test_long_steps_see_no_congestion_and_none_is_left_without_spells():
    assert float(_network(1e3).probability) < 1e-9
    assert float(_network(1.0, {**_SPELLS, "spell_s": 0.0}).probability) == 0
    still = _network(1.0).with_spread(jnp.zeros(()))
    np.testing.assert_array_equal(np.asarray(still.factors()), 1)


def test_a_step_is_as_long_as_its_regimes_say():
    """Two stages with two transfers of 0.5 s between them; nothing else varies."""
    network = _network(3.0)
    program = pipeline_program(
        OneFOneB(2, 1),
        send_recv=0.5,
        variability=prism.Variability(network=network),
        network_links=("network",),
    )
    law = prism.simulate(program, num_samples=40_000, key=jax.random.key(0))
    shares, factors = np.asarray(network.probabilities()), np.asarray(network.factors())
    mean = shares @ factors
    # How many steps are in a regime is set, to a step.
    dealt = len(shares) * np.ptp(factors) / 40_000
    assert abs(law.mean - (6 + mean)) < dealt
    std = np.sqrt(shares @ (factors - mean) ** 2)
    assert abs(law.std - std) < dealt * np.ptp(factors) / std
    slopes = prism.sensitivity(program, prism.Std(), num_samples=8192, key=jax.random.key(0)).parts
    (spread,) = (part.spread for part in slopes if part.name == "network")
    assert np.isclose(spread.value, law.std, rtol=0.1)  # It is all that varies.


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_spells_last_longer_the_more_others_load_the_network(load):
    (usual,), (loaded,) = load_network("shared"), load_network("shared", load)
    assert loaded.parameters["spell_s"] == load * usual.parameters["spell_s"]
    assert load_network("dedicated", load) == ()


def test_a_cluster_names_its_network(tmp_path):
    job = prism.load_job("examples/job.toml", ["cluster.network=shared", "cluster.load=2"])
    (law,) = load_network("shared", 2.0)
    assert job.kernels.find_variation("network") == law
    path = tmp_path / "job.toml"
    prism.save_job(job, path)
    assert prism.load_job(path).kernels == job.kernels
    still = prism.load_job(path, ["kernels.network.slowdown=1", "kernels.network.calm_sigma=0"])
    network = prism.compile_job(still).variability.network
    np.testing.assert_array_equal(np.asarray(network.factors()), 1)


_ALIKE = {"sigma": 0.02, "slow_weight": 0.0, "slow_factor": 1.0}


@pytest.mark.parametrize("drawn", [1, 8, 64])
def test_the_slowest_of_gpus_of_a_law(drawn):
    """Against quantiles, and of numbers against draws of them all."""
    law = make_latency("lognormal-mixture", _ALIKE)
    levels = (np.arange(20_000) + 0.5) / 20_000
    values = np.exp(0.02 * norm.ppf(levels ** (1 / drawn)))
    expected = values.mean() / np.exp(0.02**2 / 2)
    assert np.isclose(fleet.largest_of_law(law, drawn), expected, atol=2e-5)
    times = np.random.default_rng(0).uniform(1, 2, 64)
    every = {1: 1.0, 8: None, 64: times.max() / times.mean()}[drawn]
    assert every is None or np.isclose(fleet.largest_of(times, drawn), every)


def test_devices_of_fleets_have_laws_of_their_own():
    for cluster, device in (("mi250x", "mi250x"), ("dgx-a100-40g", "a100-40g-sxm")):
        kernels = prism.load_job("examples/job.toml", {"cluster": cluster, "num_nodes": 4}).kernels
        assert kernels.find_variation("rank") == load_device(device).laws[0].variation


@pytest.mark.parametrize("name", ["titan-old", "titan-new"])
def test_rates_by_age_are_over_those_of_all_years(name):
    counted = load_failures(name)
    rates = [counted.device_hours / at_age(counted, years).device_hours for years in range(9)]
    assert np.allclose(rates[: len(counted.by_age)], counted.by_age)
    assert min(rates) < 1 < max(rates) == rates[-1]
    assert at_age(counted, 1.9) == at_age(counted, 1.0)
    refusal(lambda: at_age(load_failures("llama-3"), 1.0), "no rates `by_age`")


def test_rows_of_a_fleet_do_not_need_every_cell_and_file(tmp_path, capsys):
    """Whole numbers as decimals; a run without its compute counts in the totals alone."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    lines = [f"{i}.0,{i / 10},0.5,0.1,0.1,{0.7 + i / 10}" for i in range(20)]
    lines += ["20,,0.5,0.1,0.1,5.0", "21,9.0,,0.1,0.1,9.7", "22,1.0,0.5,0.1,0.1,"]
    head = "row,all_reduce_s,compute_s,memory_ops_s,other_s,total_s"
    table = folder / "breakdown_frontier_nanogpt.csv"
    table.write_text("\n".join([head, *lines]))
    values = np.linspace(1, 1.1, 8)
    times = {"node": [*map(float, range(8)), 1.0], "gpu": [0.0] * 8 + [None]}
    frame = pl.DataFrame(times | {"time_s": [*values, 3.0], "memory_gb": [40.0] * 8 + [None]})
    frame.write_parquet(folder / "gemm_perlmutter.parquet")
    figures = {row["figure"]: row["measured"] for row in fleet.fleet_rows(tmp_path)["rows"]}
    total = np.array([*(0.7 + np.arange(20) / 10), 5.0, 9.7])
    assert np.isclose(figures["communication_share"], 1)
    assert np.isclose(figures["p95_over_p50"], np.quantile(total, 0.95) / np.median(total))
    assert np.isclose(figures["slowest_of_8"], 1.1 / values.mean())
    err = capsys.readouterr().err
    assert "gemm_frontier.parquet is missing" in err
    assert f"1 rows of {table} are left out: no `total_s`" in err
    assert "1 runs of nanogpt on frontier count in the tail alone" in err
    assert "gemm_perlmutter.parquet are left out: no node, GPU or time" in err


# The largest of 11 systems of MLPerf Training, as in `kernels/dgx-h100/variability.csv`.
_MOST = 1.12
# Two of much communication between nodes: dense and with experts.
_MUCH = {"gpt3-175b-h100-4096", "qwen3-235b-h100-256"}
_NAMES = [
    pytest.param(name, marks=() if name in _MUCH else pytest.mark.slow)
    for name in list_names("job")
]
_SET = ["kernels.network.slowdown=1.2"]
_NETWORK = Variation(
    "", "network", "two-regimes", {"probability": 0.01, "slowdown": 1.2, "step_excess": 0.016}
)


def _longer(job: prism.Job) -> float:
    """A step without other variability in the congested regime, over that in the calm one."""
    network: Any = prism.compile_job(job).variability.network
    kernels, seconds = job.kernels, constant_step(job)
    assert kernels is not None
    calm, congested = (
        seconds(msgspec.structs.replace(kernels, network=float(factor) * kernels.network))
        for factor in network.factors()
    )
    return congested / calm


def _law(job: prism.Job) -> dict[str, float]:
    law = job.kernels.find_variation("network")
    return law.parameters


@pytest.mark.parametrize("name", _NAMES)
def test_congestion_makes_no_shipped_job_longer_than_was_measured(name):
    job = prism.load_job(name)
    longer = _longer(job)
    assert 1 <= longer <= _MOST
    assert longer <= 1 + _law(job)["step_excess"] + 1e-6


@pytest.mark.slow
def test_the_tail_of_a_job_of_communication_alone_is_no_longer_than_was_measured():
    job = prism.load_job("qwen3-235b-h100-256")
    law = prism.simulate(prism.compile_job(job), num_samples=8192, key=jax.random.key(0))
    assert law.quantile(0.99) < _MOST * law.quantile(0.5)


def test_a_slowdown_that_is_given_is_kept():
    """By `--set`, whatever it makes of the step; and where it makes little of it in any case."""
    name, few = "qwen3-235b-h100-256", ["schedule.num_microbatches=32"]
    bounded, kept = (prism.load_job(name, [*few, *more]) for more in ([], _SET))
    assert "step_excess" not in _law(kept)
    assert _longer(kept) > 1.1 > _longer(bounded) > 1.01
    for excess, slowdown in ((0.015, 1.2), (0.016, 1.2), (0.064, 1.05)):
        network = variability_of([_NETWORK], excess=lambda _, e=excess: e).network
        assert float(network.slowdown) == pytest.approx(slowdown)
