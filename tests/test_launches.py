"""What the host, fused kernels and uneven loads add to the mean of a step."""

import dataclasses

import numpy as np
import pytest

from prism_jax import predict
from prism_jax.data import load_job
from prism_jax.loads import mean_of_fullest
from prism_jax.lowering import job_parts
from prism_jax.workload.modules import MoE
from prism_jax.workload.modules._routing import dropless_concentration


_SLOW_HOST = ("training.host_module_s=1", "training.host_experts_s=5")
_DENSE = "megatron-22b-a100-8"


def _with_experts(*overrides):
    experts = ("model=qwen3-30b-a3b", "layout.ep=8", "layout.etp=1", "layout.tp=1", "layout.dp=8")
    short = ("schedule.num_microbatches=2", "training.sequence_length=512")
    return load_job(_DENSE, [*experts, *short, *overrides])


def test_host_launches_bound_the_time_of_a_layer_from_below():
    job = load_job(_DENSE, ["training.recompute=none", *_SLOW_HOST])
    assert job.model is not None
    passes = 2 * job.schedule.num_microbatches
    # Two modules a layer, one second each; the embedding, the head and the rest are short.
    assert predict(job).mean == pytest.approx(2 * passes * job.model.num_layers, rel=0.01)
    assert predict(load_job(_DENSE)).mean == pytest.approx(
        predict(load_job(_DENSE, ["training.host_module_s=1e-9"])).mean
    )


def test_recomputed_modules_are_launched_again():
    again = load_job(_DENSE, ["training.recompute=full", *_SLOW_HOST])
    once = load_job(_DENSE, ["training.recompute=none", *_SLOW_HOST])
    assert predict(again).mean / predict(once).mean == pytest.approx(1.5, rel=0.01)


def test_cuda_graphs_remove_the_launches_they_replay():
    eager, modules, iteration = (
        predict(_with_experts(*_SLOW_HOST, f"training.cuda_graphs={kind}")).mean
        for kind in ("none", "modules", "iteration")
    )
    # Of one second of attention and five of experts, half of the latter is left.
    assert modules / eager == pytest.approx(2.5 / 6, rel=0.01)
    assert iteration == pytest.approx(predict(_with_experts()).mean)


def test_a_pair_of_passes_takes_longer_to_launch_than_its_two_parts():
    alone, pairs = (
        predict(_with_experts(*_SLOW_HOST, f"schedule.kind={kind}")).mean
        for kind in ("1f1b", "overlapped-1f1b")
    )
    # Of two microbatches, a forward and a backward run alone, and one pair between them.
    assert pairs / alone == pytest.approx((2 + 2 * 1.4) / 4, rel=0.01)


def test_fused_experts_save_elementwise_time():
    apart, fused, biased = (
        predict(_with_experts(*more)).breakdown["elementwise"]
        for more in ((), ("training.fused_experts=true",), ("model.bias=true",))
    )
    assert fused < apart < biased


@pytest.mark.parametrize(("members", "fullest"), [(8, 1.47), (32, 1.8)])
def test_the_fullest_rank_of_a_router_as_it_is(members, fullest):
    concentration = dropless_concentration(members)
    mean = mean_of_fullest(concentration, members, 10**9, 1, np.inf)
    assert mean == pytest.approx(fullest, abs=0.01)


def test_a_router_without_a_forced_balance_takes_longer():
    even, uneven = (
        predict(_with_experts(*more)).mean for more in ((), ("model.modules.moe.balance=dropless",))
    )
    assert 1.05 < uneven / even < 1.5


def test_experts_keep_the_tokens_that_their_capacity_takes():
    """Of a router as it is, those of the fullest rank; in the mean, if all take equally many."""
    costs = job_parts(_with_experts())
    equal = MoE(128, 8, 768)
    cut = dataclasses.replace(equal, balance="dropless", capacity_factor=1.0)
    kept = [module.activations(costs)["experts"] for module in (equal, cut)]
    law = (dropless_concentration(8), 8, 8 * costs.tokens * 8, 16)
    assert kept[1] / kept[0] == pytest.approx(mean_of_fullest(*law, 1.0))
