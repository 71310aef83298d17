"""Laws of steps against a simulation with a clock for each GPU: see `benchmarks/clocks.py`."""

import pytest

from benchmarks.clocks import rows


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
