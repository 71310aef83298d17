import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.maxplus import (
    AbstractOpLaw,
    Latencies,
    cell_ends,
    cells,
    propagate,
    to_lanes,
    to_levels,
)

from .helpers import event_loop_ends, random_dag


class _Given(AbstractOpLaw):
    given: jax.Array

    def latency(self, op, z, common):
        return self.given + z


def _ends_of_sinks(levels, latencies):
    """With latencies given, and no noise."""
    lanes = to_lanes(levels, len(levels.sinks.value))
    given = Latencies(
        tables=_Given(latencies),
        rows=_Given(lanes.ops),
        common=None,
        noise=lambda arguments, counter: jnp.zeros(counter.shape),
        noise_arguments=None,
    )
    ends = propagate(lanes, given, latencies.shape[1], latencies.dtype)
    return ends[: len(levels.sinks.value)]


def _ends_of_ops(levels, latencies):
    lanes = to_lanes(levels, len(levels.sinks.value))
    cell = cells(levels, lanes.width)[:-1]
    in_cells = jnp.zeros((lanes.num_cells, latencies.shape[1])).at[cell].set(latencies)
    return cell_ends(lanes, in_cells)[cell]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [None, 1, 3])
def test_equals_an_event_loop_exactly(seed, width):
    predecessors = random_dag(seed)
    rng = np.random.default_rng(seed)
    latencies = rng.exponential(size=(len(predecessors), 3))
    latencies[rng.random(latencies.shape) < 0.1] = 0.0
    sinks = [(5, 11), (len(predecessors) - 1,), tuple(range(len(predecessors)))]
    levels = to_levels(predecessors, sinks, width)
    ends = _ends_of_ops(levels, jnp.asarray(latencies))
    found = _ends_of_sinks(levels, jnp.asarray(latencies))
    for sample in range(latencies.shape[1]):
        expected = np.array(event_loop_ends(predecessors, list(latencies[:, sample])))
        assert np.array_equal(ends[:, sample], expected)
        assert np.array_equal(found[:, sample], [expected[list(s)].max() for s in sinks])


@pytest.mark.parametrize("seed", range(5))
def test_eulers_identity_and_bounds_hold_exactly(seed):
    """The makespan is homogeneous of degree one, so it is the sum of latency times derivative;
    integers and ties make it exact."""
    predecessors = random_dag(seed)
    latencies = np.random.default_rng(seed).integers(0, 4, (len(predecessors), 2)).astype(float)
    levels = to_levels(predecessors, [tuple(range(len(predecessors)))])

    def makespan(latencies):
        return jnp.sum(_ends_of_sinks(levels, latencies))

    value, criticality = jax.value_and_grad(makespan)(jnp.asarray(latencies))
    assert np.sum(latencies * criticality) == pytest.approx(float(value), rel=1e-14)
    assert np.all((criticality >= 0) & (criticality <= 1))
    assert np.all(value / 2 <= latencies.sum(axis=0).max())
    doubled = makespan(jnp.asarray(2 * latencies))
    assert doubled == 2 * value


def test_levels_hold_every_op_once_and_reuse_slots():
    predecessors = [()] + [(op,) for op in range(99)]
    levels = to_levels(predecessors, [(99,)])
    ops = levels.ops.value
    assert sorted(ops[ops >= 0]) == list(range(100))
    assert levels.num_slots <= 4


def test_an_op_that_waits_for_a_later_one_is_refused():
    with pytest.raises(ValueError, match="Op 0 waits for \\[1\\]; number the ops"):
        to_levels([(1,), ()], [(1,)])
