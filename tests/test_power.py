"""Power caps, and the clocks that follow from them."""

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from benchmarks.clocks import rows
from prism_jax.cluster import clock_factor, clock_factors, compute_latency, drawn
from prism_jax.data import Power, Variation, load_device, load_kernels
from prism_jax.prediction import energy
from validation.power import device_rows, law_rows, v100_rows

from .helpers import by_numpy


_LIMIT = "cluster.device.power.limit_w"
# Of the 1,000 W that products would draw besides, 512 W are left: a clock of 0.8.
# In order: the limit, the rated one, static; products, attention, copies; and the law of static.
_POWER = Power(712.0, 712.0, 200.0, 1200.0, 600.0, 500.0, 0.1, 0.01, 7.5)


def _with(**changes):
    return msgspec.structs.replace(_POWER, **changes)


def _job(*overrides):
    return prism.load_job("examples/job.toml", overrides)


def _known(value):
    return value


def test_the_clock_is_the_root_of_the_power_that_is_left():
    assert clock_factor(_POWER, "gemm") == 1
    # At 543 W the clock is 0.7, from 1,200 W on it is one.
    assert clock_factor(_with(limit_w=543.0), "gemm") == pytest.approx(8 / 7)
    assert clock_factor(_with(limit_w=1200.0), "gemm") == pytest.approx(0.8)
    assert clock_factor(_with(limit_w=5000.0), "gemm") == pytest.approx(0.8)
    square = _with(limit_w=543.0, exponent=2.0)
    assert clock_factor(square, "gemm") == pytest.approx(np.sqrt(512 / 343))
    # Attention would draw less than both limits.
    assert clock_factor(_with(limit_w=650.0), "attention") == 1
    assert clock_factor(None, "gemm") == 1
    # Far down, the clock stays at a tenth.
    assert clock_factor(_with(limit_w=200.1), "gemm") == pytest.approx(8)


def test_devices_that_leak_more_or_are_warmer_are_slower():
    z = np.linspace(-4, 4, 9)
    found = clock_factors(_POWER, "gemm", z)
    # Of the two spreads, 0.1 and 0.01 times 7.5.
    np.testing.assert_allclose(found, np.cbrt(512 / (712 - 200 * np.exp(0.125 * z))))
    assert np.all(np.diff(found) > 0)
    warm = clock_factors(_with(warmer_k=12.5), "gemm", z)
    np.testing.assert_allclose(warm[:-1], found[1:])  # 12.5 K are as much as one sigma.
    np.testing.assert_allclose(clock_factors(_with(limit_w=5000.0), "gemm", z), 0.8)


def test_products_feel_the_clock_and_copies_do_not():
    cluster = prism.load_cluster("dgx-h100", 1)
    kernels = load_kernels(cluster)

    def latency(kind, flop, num_bytes, limit_w):
        device = msgspec.structs.replace(cluster.device, power=_with(limit_w=limit_w))
        return compute_latency(kind, "bf16" if flop else "", flop, num_bytes, device, kernels)

    overhead = _known(kernels.find_efficiency("gemm", "bf16")).latency_s * kernels.compute
    one, capped = (latency("gemm", 1e13, 1e6, limit_w) for limit_w in (712.0, 543.0))
    assert (capped - overhead) / (one - overhead) == pytest.approx(8 / 7)
    for kind, flop in (("norm", 0), ("gemm", 1e6)):  # Even a product, where bytes are slower.
        assert latency(kind, flop, 1e9, 543.0) == latency(kind, flop, 1e9, 712.0)


@pytest.mark.parametrize("name", ["b200", "gb200", "h100-sxm", "h200-sxm"])
def test_nothing_changes_at_the_limit_of_the_measurements(name):
    job: Any = _job(f"cluster.device={name}")
    bare = msgspec.structs.replace(job.cluster.device, power=None)
    bare = msgspec.structs.replace(job.cluster, device=bare)
    assert prism.predict(job) == prism.predict(msgspec.structs.replace(job, cluster=bare))


def test_the_derivative_of_a_step_is_that_of_its_products():
    # Without waits, d T / d L is - T / (3 (L - S)) of what the clock bounds.
    alone = ("layout.pp=1", "layout.dp=1", "layout.tp=1", "schedule.virtual_stages=1")
    job = _job(f"{_LIMIT}=650", *alone, "schedule.kind=1f1b")
    power, found = _known(load_device("h100-sxm").power), _known(energy(job))
    products = prism.predict(job).breakdown["gemm"]
    # Overheads of calls feel no clock.
    assert found.seconds_per_w == pytest.approx(-products / (3 * (650 - power.static_w)), rel=0.02)


@pytest.mark.parametrize("limit", [650, 500])
def test_the_derivative_of_a_step_is_that_of_differences(limit):
    found = _known(energy(_job(f"{_LIMIT}={limit}")))
    higher, lower = (prism.predict(_job(f"{_LIMIT}={limit + d}")).mean for d in (5, -5))
    assert found.seconds_per_w == pytest.approx((higher - lower) / 10, rel=1e-3)


def test_energy_is_the_sum_over_parts_of_a_step():
    job = _job(f"{_LIMIT}=600")
    step, found, power = (
        prism.predict(job),
        _known(energy(job)),
        _known(load_device("h100-sxm").power),
    )
    # All kernels of an H100 would draw more than 600 W.
    idle = ("bubble", "host", "exposed")
    waits = [s for part, s in step.breakdown.items() if part.partition(" ")[0] in idle]
    total = 600 * (step.mean - sum(waits)) + power.static_w * sum(waits)
    assert found.joules == pytest.approx(32 * total)
    assert found.tokens_per_joule * found.joules == pytest.approx(step.tokens_per_s * step.mean)
    known = [drawn(_POWER, kind) for kind in ("gemm", "attention", "norm", "")]
    assert known == [712, 600, 500, 200]


def _spread(limit):
    """The law of steps, and the spread of GPUs in it."""
    program = prism.compile_job(_job("kernels.rank=power", f"{_LIMIT}={limit}"))
    law = _known(program.variability.rank)
    mean, variance = by_numpy(lambda law: (law.mean(), law.variance()))(law)
    return program, float(np.sqrt(variance) / mean)


def test_warmer_devices_draw_more_up_to_their_limit():
    leaked = 200 * (np.exp(0.01 * 10) - 1)
    warmer = _with(warmer_k=10.0)
    assert drawn(warmer, "") == pytest.approx(200 + leaked)
    assert drawn(warmer, "norm") == pytest.approx(500 + leaked)
    assert drawn(warmer, "gemm") == 712


def test_a_cap_widens_the_law_of_gpus():
    found = {limit: _spread(limit)[1] for limit in (500, 700, 2000)}
    assert found[500] > 2 * found[700]
    # To first order, the spread of clocks is S sigma / (3 (L - S)); of attention it is less.
    power = _known(load_device("h100-sxm").power)
    sigma = np.hypot(power.leakage_sigma, power.leakage_per_k * power.temperature_k)
    of_clocks = power.static_w * sigma / (3 * (700 - power.static_w))
    assert 0.6 * of_clocks < found[700] < 1.1 * of_clocks
    assert found[2000] == pytest.approx(0, abs=1e-6)  # Where no GPU is limited, none differs.


@pytest.mark.slow
def test_a_cap_widens_the_law_of_steps():
    tails = []
    for limit in (2000, 700, 500):
        steps = prism.simulate(_spread(limit)[0], num_samples=4096, key=jax.random.key(0))
        tails.append(float(steps.quantile(0.95) / steps.quantile(0.5)) - 1)
    assert 0 < tails[0] < tails[1] < tails[2] / 2


def test_predict_command_prints_the_cost_of_a_power_cap(answered):
    words = ["predict", "examples/job.toml"]
    assert "power:   600 W a GPU at most" in answered([*words, "--set", f"{_LIMIT}=600"])
    found = answered([*words, "--json"])["energy"]
    assert found["limit_w"] == 700
    assert found["seconds_per_w"] < 0
    assert "energy" not in answered(["predict", "megatron-22b-a100-8", "--json"])


def test_a_law_by_power_needs_the_power_of_its_device():
    with pytest.raises(ValueError, match="the device `a100-80g-sxm` draws is not known; give"):
        prism.compile_job(prism.load_job("megatron-22b-a100-8", ["kernels.rank=power"]))
    law = Variation("", "rank", "power", {}, "override kernels.rank=power")
    assert _known(_job("kernels.rank=power").kernels).find_variation("rank") == law


def test_the_law_of_clocks_is_that_of_v100(shared):
    *halves, bert = v100_rows(shared / "data")
    for row in halves[:2]:
        measured, predicted, fitted = (
            np.array(row[name]) for name in ("measured", "predicted", "of_fitted")
        )
        # As near as the halves are to each other, or half a per cent.
        assert np.all(np.abs(predicted - measured) < np.abs(fitted - measured) + 0.005)
    # Below its limit, a GPU's clock is the highest, whatever it leaks.
    assert bert["predicted"] == [1.0, 1.0]


def test_the_constants_of_devices_are_those_of_the_measurements(shared):
    (law,) = law_rows(shared / "data")
    for row in device_rows(shared / "data"):
        power = _known(load_device(row["name"]).power)
        for name in ("limit_w", "static_w", "gemm_w", "attention_w", "moving_w"):
            assert getattr(power, name) == pytest.approx(row[name], abs=0.6), name
        for name in ("leakage_sigma", "leakage_per_k", "temperature_k"):
            assert getattr(power, name) == pytest.approx(law[name], rel=0.01), name


# Of each family; with stalls and congestion in so many steps that their law shows.
_JOBS = (*range(9), 25, 10, 11)
_SAMPLES, _ERRORS = 400, 2.5
_LIMITS = {"mean": 0.002, "std": 0.08, "p99": 0.003}


@pytest.mark.slow
@pytest.mark.parametrize("job", _JOBS)
def test_steps_have_the_law_of_clocks_of_all_gpus(job):
    """Beyond the standard errors of the simulation."""
    (row,) = rows(0, [job], _SAMPLES)
    for name, limit in _LIMITS.items():
        assert abs(row[name]) < limit + _ERRORS * row[f"{name}_error"], row


@pytest.mark.parametrize("seed", [2, 0])
def test_a_forward_and_the_backward_after_it_wait_once(seed):
    """Replicas of ZeRO-2 first meet where the first gradients of a backward are reduced; with two
    pipeline ranks, after a forward on each, whose GPUs are not both the slowest of their ranks.
    """
    (row,) = rows(seed, [24], _SAMPLES)
    assert abs(row["mean"]) < 3e-4 + _ERRORS * row["mean_error"], row
