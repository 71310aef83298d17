"""What the host, the graphs and the sharding of a software stack cost."""

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import predict
from prism_jax.data import load_job, load_priors
from prism_jax.loads import mean_of_fullest
from prism_jax.lowering import job_parts
from prism_jax.workload.modules import MLP, MoE
from prism_jax.workload.modules._routing import dropless_concentration

from .helpers import kernels_of, lower_job


_SMALL = [
    "model.num_layers=4",
    "layout.pp=1",
    "layout.tp=1",
    "layout.dp=16",
    "num_nodes=2",
    "schedule.kind=1f1b",
    "schedule.virtual_stages=1",
    "schedule.num_microbatches=2",
]


def _job(*changes):
    return load_job("gpt3-175b-h100-4096", (*_SMALL, *changes))


def _costs(job):
    return job_parts(job)


@pytest.mark.parametrize("tp", [("layout.tp=1",), ("layout.tp=8", "layout.dp=2")])
@pytest.mark.parametrize("overlap", ["true", "false"])
def test_a_recomputation_that_stops_early_leaves_out_the_last_product(tp, overlap):
    """And what follows it: the scattering of its output, and the residual."""
    more = (*tp, "training.recompute=full", f"training.tp_overlap={overlap}")
    whole, early = (_job(*more, f"training.recompute_early_stop={x}") for x in ("false", "true"))
    product = MLP(4 * 12288).last_product(_costs(whole))
    before, after = (Counter(kernels_of(lower_job(job).backward[0])) for job in (whole, early))
    assert {kernel.kind for kernel in after - before} == set()
    left = before - after
    kinds = Counter({"gemm": 4, "elementwise": 4})
    if whole.layout.tp > 1:
        kinds["reduce_scatter"] = 8 if overlap == "true" else 4  # In pieces, the first apart.
    assert {k.kind for k in left} == set(kinds)
    assert sum(n for k, n in left.items() if k.kind == "gemm") == 4
    assert all(k.flop == product.flop for k in left if k.kind == "gemm")
    assert sum(n for k, n in left.items() if k.kind == "reduce_scatter") == kinds["reduce_scatter"]


def test_each_switch_of_a_framework_makes_a_step_longer():
    fsdp = ("training.zero=3", "training.dtype=fp8")
    step = prism.predict(_job(*fsdp)).mean
    for change in (
        "training.gather_copy_bytes=4",
        "training.gradient_copy_bytes=18",
        "training.scaling=tensor",
        "training.eager_share=0.5",
    ):
        assert prism.predict(_job(*fsdp, change)).mean > step, change


def test_copies_are_of_whole_layers_and_each_microbatch():
    """A job with twice the bytes for each gradient takes twice as much longer."""
    steps = [
        prism.predict(_job("training.zero=3", f"training.gradient_copy_bytes={size}")).mean
        for size in (0, 1000, 2000)
    ]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=1e-2)


def test_without_sharded_parameters_nothing_is_copied():
    changed = prism.predict(_job("training.zero=1", "training.gather_copy_bytes=100")).mean
    assert changed == prism.predict(_job("training.zero=1")).mean


def test_broadcasts_in_turn_pass_along_the_ring_once_for_each_gpu():
    plain = ("training.zero=1", "training.overlap_param_gather=false")
    job, turns = _job(*plain), _job(*plain, "training.gather_in_turn=true")
    costs = _costs(job)
    hops = costs.collective("all_gather", 0, costs.group("dp")).mean
    more = prism.predict(turns).mean - prism.predict(job).mean
    assert more == pytest.approx((job.layout.dp - 1) * hops, rel=1e-6)


def test_the_constant_of_a_step_is_at_most_a_part_of_it():
    job = _job()
    kernels, most = job.kernels, load_priors().constant_share.value
    assert kernels is not None
    assert kernels.network == load_priors().uncalibrated.network

    def step(**changes):
        changed = msgspec.structs.replace(kernels, **changes)
        return prism.predict(msgspec.structs.replace(job, kernels=changed)).mean

    none, some, more = (step(constant_s=x) for x in (0.0, 1e-3, 10.0))
    assert some == pytest.approx(none + 1e-3, rel=1e-9)
    assert none < more <= (1 + most) * none
    assert step(constant_s=10.0, constant_share=None) == pytest.approx(none + 10, rel=1e-9)


_SLOW_HOST = ("training.host_module_s=1", "training.host_experts_s=5")
_DENSE = "megatron-22b-a100-8"


def _with_experts(*overrides):
    experts = ("model=qwen3-30b-a3b", "layout.ep=8", "layout.etp=1", "layout.tp=1", "layout.dp=8")
    short = ("schedule.num_microbatches=2", "training.sequence_length=512")
    return load_job(_DENSE, [*experts, *short, *overrides])


def test_host_launches_bound_the_time_of_a_layer_from_below():
    job = load_job(_DENSE, ["training.recompute=none", *_SLOW_HOST])
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
