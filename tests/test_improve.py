"""Budgets and targets, against closed forms."""

import jax
import numpy as np
import pytest

from prism_jax.analysis import Exceedance, Std, improve, target
from prism_jax.analysis._improve import _affordable, _best_shares
from prism_jax.program import Op, Variability, compile_graph
from prism_jax.schedule import GPipe

from .helpers import lognormal, one_kernel, pipeline_program


_KEY = jax.random.key(0)


def _program(tail=0.1):
    """Eight ops of a chain and a tail, which vary independently."""
    variability = Variability(residual={"gemm": lognormal(0.05), "optimizer": lognormal(tail)})
    return pipeline_program(GPipe(1, 4), variability=variability, tail=one_kernel("optimizer", 3.0))


@pytest.mark.slow
def test_a_budget_is_spent_where_variances_balance():
    """Of `a^2 (1 - x)^2 + b^2 (1 - y)^2` with `x + 2 y = 1`, by Lagrange's rule."""
    a, b = 0.05 * np.sqrt(4 * 1 + 4 * 4), 0.1 * 3.0
    found = improve(
        _program(), Std(), {"gemm": 1.0, "optimizer": 2.0}, 1.0, num_samples=16_000, key=_KEY
    )
    # a^2 (1 - x) = multiplier, b^2 (1 - y) = 2 * multiplier.
    multiplier = 2 / (1 / a**2 + 4 / b**2)
    assert found.removed["gemm"] == pytest.approx(1 - multiplier / a**2, abs=0.03)
    assert found.removed["optimizer"] == pytest.approx(1 - 2 * multiplier / b**2, abs=0.03)
    assert found.spent == pytest.approx(1.0, abs=1e-6)
    expected = np.hypot(multiplier / a, 2 * multiplier / b)
    assert found.after.value == pytest.approx(
        expected, abs=4 * found.after.standard_error + 0.01 * expected
    )
    assert min(found.path) < found.path[0]  # Better than evenly spent.
    assert found.table()["part"].to_list() == sorted(
        found.removed, key=lambda name: -found.removed[name]
    )


@pytest.mark.slow
def test_a_budget_for_everything_takes_all_away():
    found = improve(
        _program(),
        Std(),
        {"gemm": 1.0, "optimizer": 2.0},
        5.0,
        num_samples=640,
        key=_KEY,
        num_iterations=2,
    )
    assert found.removed == {"gemm": 1.0, "optimizer": 1.0}
    assert found.spent == 3.0
    assert found.after.value == pytest.approx(0, abs=1e-5)


def test_a_probability_may_fall_to_zero():
    """An improvement that no step exceeds the threshold after is not a mistake."""
    ops = [Op(lognormal(0.1), kind="a"), Op(lognormal(0.1), kind="b", after=[0])]
    options = {"num_samples": 400, "key": jax.random.key(0), "num_iterations": 2}
    found = improve(compile_graph(ops), Exceedance(2.3), {"a": 1.0, "b": 1.0}, 1.9, **options)
    assert min(found.path) == 0 < found.before.value


def test_projection_onto_the_budget_is_the_nearest_point():
    """Against many affordable points: none is nearer."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        wanted, prices = rng.normal(0.5, 1, 3), rng.uniform(0.2, 1, 3)
        nearest = _affordable(wanted, prices, 1.0)
        assert nearest.sum() <= 1 + 1e-9
        assert np.all((nearest >= 0) & (nearest <= prices))
        points = rng.uniform(0, prices, (2000, 3))
        points = points[points.sum(axis=1) <= 1]
        distance = np.linalg.norm(points - wanted, axis=1).min()
        assert np.linalg.norm(nearest - wanted) <= distance + 1e-9


def test_a_linear_figure_is_lowered_as_far_as_the_budget_goes():
    """One dear part and twenty cheap ones that gain twice as much for their money."""
    gains, prices = np.array([1.0, *[0.02] * 20]), np.array([100.0, *[1.0] * 20])

    def value_and_gradient(removed):
        return -float(gains @ removed), -gains

    removed, path = _best_shares(value_and_gradient, prices, 20.0, 5)
    assert -path[1] == pytest.approx(0.4)
    np.testing.assert_allclose(removed, [0, *[1] * 20])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_target_is_met(factor):
    """The spread of a single sum is that of its parts."""
    program = _program(tail=0.0)
    std = 0.05 * np.sqrt(20)
    found = target(program, Std(), "gemm", factor * std, num_samples=32_000, key=_KEY)
    assert found.reached == pytest.approx(factor * std, rel=1e-3)
    assert found.factor.value == pytest.approx(factor, abs=4 * found.factor.standard_error)
    assert found.without == pytest.approx(0, abs=1e-5)
