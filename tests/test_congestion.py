"""A congested network makes a step longer by what was measured, whatever communication it has."""

import jax
import msgspec
import pytest

import prism_jax as prism
from prism_jax.data import Variation, list_names
from prism_jax.prediction import constant_step
from prism_jax.program import variability_of


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
    network = prism.compile_job(job).variability.network
    assert network is not None
    kernels, seconds = job.kernels, constant_step(job)
    assert kernels is not None
    calm, congested = (
        seconds(msgspec.structs.replace(kernels, network=float(factor) * kernels.network))
        for factor in network.factors()
    )
    return congested / calm


def _law(job: prism.Job) -> dict[str, float]:
    assert job.kernels is not None
    law = job.kernels.find_variation("network")
    assert law is not None
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
        assert network is not None
        assert float(network.slowdown) == pytest.approx(slowdown)
