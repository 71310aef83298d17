"""Sliders: between simulated points they give what a simulation gives there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from prism_jax.analysis import LEVELS, P95, Rare, moved, sliders
from prism_jax.analysis._sliders import Smooth, _with_slow_gpus
from prism_jax.engine import simulated_steps
from prism_jax.latency import LogNormal, Mixture
from prism_jax.program import Stall, Variability
from prism_jax.schedule import GPipe

from .helpers import lognormal, one_kernel, pipeline_program, refusal


_OTHER = jax.random.key(9)


@pytest.fixture(scope="module")
def program():
    rank = Mixture([1.0, 0.0], (LogNormal(1.0, 0.02), LogNormal(1.5, 0.02)))
    stalls = {"gemm": Stall(jnp.asarray(5e-4), LogNormal(0.3, 0.3))}
    # One rank and few laws, of which little is compiled.
    return pipeline_program(
        GPipe(1, 2),
        forward=1.0,
        variability=Variability(
            residual={"gemm": lognormal(0.05)}, rank=rank, step=lognormal(0.01), stalls=stalls
        ),
        reduction=one_kernel("reduce_scatter", 0.5, "network"),
        num_replicas=64,
    )


@pytest.fixture(scope="module")
def found(program):
    return sliders(program, num_samples=4096, key=jax.random.key(0))


def test_a_parabola_is_followed_on_either_side_of_the_own_value():
    values, scale = np.array([0.0, 1.0, 4.0]), 1 + LEVELS

    def law(x):
        return scale * (2 + 3 * x + np.where(x > 1, 0.5, -0.25) * (x - 1) ** 2)

    slider = Smooth("spread", 1.0, values, np.stack([*map(law, values)]), 3 * scale)
    for x in (0.0, 0.4, 1.0, 2.5, 4.0):
        np.testing.assert_allclose(slider.law(x), law(x), rtol=1e-12)


def test_rare_events_follow_their_product_law_where_quantiles_jump():
    # Done by `t`: without an event by a normal law; with one, all take one second more.
    times = np.linspace(-1, 3, 200_001)

    def law(number):
        hit = norm.sf(times, 1, 0.1)
        share = norm.cdf(times, 0, 0.1) * np.exp(-number * hit)
        return np.interp(LEVELS, share, times)

    values = np.array([0.0, 2.0, 8.0])
    slider = Rare("slow", 0.0, values, np.stack([*map(law, values)]))
    for number in (0.0, 0.3, 0.65, 1.0, 2.0, 5.0):
        off = np.abs(slider.law(number) - law(number))[3:-3]
        # The chance of none, `exp(-number)`, is where quantiles jump; the level there is not known.
        jump = np.abs(LEVELS - np.exp(-number))[3:-3] < 0.03
        assert np.all(off[~jump] < 0.04), number


def test_parameters_that_matter_have_sliders(found):
    names = [slider.name for slider in found.sliders]
    assert len(names) == 6
    assert {"slow GPUs", "stall rate", "mean of reduce_scatter"} <= {*names}
    assert names[0] == "slow GPUs"  # Their number can be changed.
    reach = [abs(slider.laws[-1] - found.law)[P95] for slider in found.sliders[1:]]
    assert reach == sorted(reach, reverse=True)
    for slider in found.sliders:
        assert slider.own in slider.positions()
        assert slider.change(slider.own) == pytest.approx(0, abs=1e-9)
        for value, law in zip(slider.values, slider.laws, strict=True):
            np.testing.assert_allclose(slider.law(value)[3:-3], law[3:-3], rtol=1e-6)


def test_p95_is_that_of_fresh_simulations_between_the_points(program, found):
    def p95(values):
        steps = simulated_steps(moved(program, values), num_samples=8192, key=_OTHER).steps
        return np.quantile(steps, 0.95)

    own, points = p95({}), {}
    for slider in found.sliders:
        points |= {(slider.name, x): {slider.name: x} for x in slider.values[:-1] * 0.7 + 0.6}
    points["pair"] = found.check.values
    points["slow"] = {"slow GPUs": 3.0, "spread of GPUs": 2.0}
    for label, values in points.items():
        simulated = p95(values)
        off = abs(found.at(values)[P95] - found.law[P95] - (simulated - own))
        assert off < max(0.1 * abs(simulated - own), 0.003 * own), label
    assert found.check.p95 == found.at(found.check.values)[P95]
    off = abs(found.check.p95 - found.check.simulated)
    assert off < 0.1 * abs(found.check.simulated - own)


def test_sliders_at_their_own_values_change_nothing(program, found):
    same = moved(program, {slider.name: slider.own for slider in found.sliders})
    before, after = (
        simulated_steps(one, num_samples=512, key=_OTHER).steps
        for one in (moved(program, {}), same)
    )
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(found.at({}), found.law)
    slow, _ = _with_slow_gpus(program, 4.0)
    assert isinstance(slow.variability.rank, Mixture)
    assert slow.variability.rank.weights[1] == pytest.approx(4 / program.world_size)


def test_wrong_values_are_one_sentence(found):
    refusal(lambda: found.at({"spread of gpu": 2}), "slider")
    refusal(lambda: found.at({"spread of GPUs": 5}), "give a value in [0, 4]")
